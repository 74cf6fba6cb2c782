"""Folders on disk, and what is in them: made durable, and removed when nothing is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from ckptkit.storage.keys import is_temporary


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
    _remove_upwards(folder, root, _removed)


def remove_bare(folder: Path, root: Path) -> None:
    """The same for folders with nothing at all in them, not even what another still writes."""
    _remove_upwards(folder, root, _removed_bare)


def _remove_upwards(folder: Path, root: Path, removed: Callable[[Path], bool]) -> None:
    while root in folder.parents:
        try:
            if not removed(folder):
                return
        except FileNotFoundError:
            pass
        except OSError:
            # The objects are gone, which is all that was promised.
            return
        folder = folder.parent


def _removed_bare(folder: Path) -> bool:
    folder.rmdir()
    return True


def _removed(folder: Path) -> bool:
    paths = list(folder.iterdir())
    if not all(is_temporary(path.name) for path in paths):
        return False
    for path in paths:
        path.unlink()
    folder.rmdir()
    return True
