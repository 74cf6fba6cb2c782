"""Folders on disk, and what is in them: made durable, and removed when nothing is left."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptkit.storage.keys import is_temporary
from ckptkit.storage.refusals import link_in_the_way

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
# A folder that may be passed but not read can still be gone through.
_PASSED = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)


@contextmanager
def entered(root: Path, folder: Path, made: list[Path] | None = None) -> Iterator[int]:
    """A descriptor of `folder`, reached from the root without following a symbolic link.

    All that is made, replaced or deleted is named relative to it: so neither a link that is there
    nor one that takes a folder's place meanwhile leads out of the root. The root itself is where
    its user says: links to it are followed. With `made`, folders that are missing are made and
    added to it.
    """
    try:
        descriptor = os.open(root, _PASSED)
    except FileNotFoundError:
        if made is None:
            raise
        made += make_folders(root)
        descriptor = os.open(root, _PASSED)
    try:
        path = root
        for name in folder.relative_to(root).parts:
            path /= name
            below = _below(descriptor, path, made)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _below(descriptor: int, path: Path, made: list[Path] | None) -> int:
    """A descriptor of the folder of this path, in the one that is open; never through a link."""
    try:
        try:
            return os.open(path.name, _PASSED | os.O_NOFOLLOW, dir_fd=descriptor)
        except FileNotFoundError:
            if made is None:
                raise
        try:
            os.mkdir(path.name, dir_fd=descriptor)
            made.append(path)
        except FileExistsError:
            pass  # another writer was faster
        return os.open(path.name, _PASSED | os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError as error:
        # Systems differ in what they say of a link.
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and _is_link(path.name, descriptor):
            raise link_in_the_way(path) from error
        raise


def _is_link(name: str, descriptor: int) -> bool:
    try:
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(status.st_mode)


def make_folders(path: Path) -> list[Path]:
    """Make a folder and what is missing above it; says which ones it made, the topmost first."""
    if path.is_dir():
        return []
    made = make_folders(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        return made
    return [*made, path]


def above(folder: Path, root: Path, made: list[Path]) -> list[Path]:
    """The folders whose entries lead to `folder`: up to the one that holds the root.

    Not only those that we made something in: another writer that made a folder which we use may
    die before it makes that durable.
    """
    chain = []
    while folder not in (root, folder.parent):
        folder = folder.parent
        chain.append(folder)
    holders = [path.parent for path in [*made, root]]
    return list(dict.fromkeys([*chain, *holders]))


def sync_folder(path: Path) -> None:
    """Make the entries of one folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no such thing: there, entries are durable at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the bytes of one file durable, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_nearest(folder: Path) -> None:
    """Make the entries of a folder durable, or its absence where it is gone."""
    try:
        sync_folder(folder)
    except FileNotFoundError:
        sync_nearest(folder.parent)


def sync_above(folder: Path, root: Path, made: list[Path]) -> None:
    """Make the way to `folder` durable."""
    needed = {path.parent for path in made}
    for path in above(folder, root, made):
        try:
            sync_folder(path)
        except PermissionError:
            # A folder that may be passed but not read, and that we did not change.
            if path in needed:
                raise


def remove_empty(folder: Path, root: Path) -> None:
    """Remove `folder` and what becomes empty above it, below the root.

    Names the store made for its own use do not count: whoever still needs one starts over.
    """
    _remove_upwards(folder, root, _cleared)


def remove_bare(folder: Path, root: Path) -> None:
    """The same for folders with nothing at all in them, not even what another still writes."""
    _remove_upwards(folder, root, lambda _, __: True)


def _remove_upwards(folder: Path, root: Path, may_go: Callable[[str, int], bool]) -> None:
    while root in folder.parents:
        try:
            with entered(root, folder.parent) as parent:
                if not may_go(folder.name, parent):
                    return
                os.rmdir(folder.name, dir_fd=parent)
        except FileNotFoundError:
            pass
        except OSError:
            # The objects are gone, which is all that was promised.
            return
        folder = folder.parent


def _cleared(name: str, parent: int) -> bool:
    """Whether there were only the store's own names in a folder, which are deleted."""
    descriptor = os.open(name, _FOLDER | os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        names = os.listdir(descriptor)  # noqa: PTH208 — of what is open, not of a path
        if not all(map(is_temporary, names)):
            return False
        for each in names:
            os.unlink(each, dir_fd=descriptor)
        return True
    finally:
        os.close(descriptor)
