"""What the operating system is asked for: folders made durable, files written past the page cache,
and its refusals in words that say what to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    InvalidNameError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.base.address import is_temporary

T = TypeVar("T")

BLOCK = 4096
DEVICE_BYTES = 4 << 20
"""So much by a request, and few at a time, is what a device reads fastest, into memory that stays
in a cache of the processor: what it brings is copied from there."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_TRIES = 16
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC
# A folder that may be passed but not read can still be gone through.
_PASSED = _FOLDER | getattr(os, "O_PATH", os.O_RDONLY)
_KINDS: dict[int, tuple[type[CkptkitError], str]] = {
    errno.EACCES: (AccessError, "check the owner and the permissions of the path"),
    errno.EPERM: (AccessError, "check the owner, the permissions and the attributes (lsattr)"),
    errno.EROFS: (AccessError, "the file system is mounted read-only; choose another place"),
    errno.ENOSPC: (NoSpaceError, "free some space or choose another place; df shows what is left"),
    errno.EDQUOT: (NoSpaceError, "the quota is used up; free some space or ask for more"),
    errno.ENOENT: (NotFoundError, "check the path, or whether it was deleted meanwhile"),
    errno.EEXIST: (AlreadyExistsError, "delete it first or choose another name"),
    errno.ENAMETOOLONG: (InvalidNameError, "choose a shorter name"),
    errno.ENOTDIR: (StorageError, "part of the path is a file where a folder is needed"),
    errno.ELOOP: (StorageError, "a symbolic link is in the way, or leads to itself; remove it"),
    errno.EISDIR: (StorageError, "a folder is in the way; choose another name"),
    errno.EFBIG: (StorageError, "a limit on file sizes (ulimit -f, file system) is in the way"),
    errno.EMFILE: (StorageError, "raise the limit on open files (ulimit -n)"),
    errno.EIO: (StorageError, "the disk reports a fault; see dmesg and do not trust this disk"),
    errno.ESTALE: (StorageError, "the network file system was remounted; try again"),
}


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Translate every OSError inside; our own errors are OSErrors too and pass unchanged."""
    try:
        yield
    except CkptkitError:
        raise
    except OSError as error:
        raise refusal(error, where) from error


def refusal(error: OSError, where: str) -> CkptkitError:
    """The error to raise for what the operating system refused."""
    default = (StorageError, "see what the system says about this path (dmesg, mount, df)")
    kind, hint = _KINDS.get(error.errno or 0, default)
    return kind(error.strerror or str(error), where=where, hint=hint)


def link_in_the_way(path: object) -> StorageError:
    """The error of what would change something behind a symbolic link."""
    return StorageError(
        "a symbolic link: nothing is written or deleted through one",
        where=str(path),
        hint="remove the link (what it leads to stays), "
        "or name the run that the folder itself is in",
    )


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
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            with suppress(FileNotFoundError):
                status = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    raise link_in_the_way(path) from error
        raise


def where_folders_vanish(make: Callable[[], T]) -> T:
    """What `make` returns, which makes a file and the folders above it: asked again where one of
    these is gone, because another writer that ends removes what it finds empty.
    """
    for _ in range(_TRIES - 1):
        with suppress(FileNotFoundError):
            return make()
    return make()


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


def sync_file(path: Path) -> None:
    """Make the bytes of one file durable, whoever wrote them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def sync_nearest(folder: Path) -> None:
    """Make the entries of a folder durable, or its absence where it is gone."""
    try:
        sync_folder(folder)
    except FileNotFoundError:
        sync_nearest(folder.parent)


def sync_above(folder: Path, root: Path, made: list[Path]) -> None:
    """Make the way to `folder` durable: the folders above it, up to the one that holds the root.

    Not only those that we made something in: another writer that made a folder which we use may
    die before it makes that durable.
    """
    chain = []
    while folder not in (root, folder.parent):
        folder = folder.parent
        chain.append(folder)
    changed = [path.parent for path in made]
    for path in dict.fromkeys([*chain, *changed, root.parent]):
        try:
            sync_folder(path)
        except PermissionError:
            # A folder that may be passed but not read, and that we did not change.
            if path in changed:
                raise


def remove_empty(folder: Path, root: Path, *, bare: bool = False) -> None:
    """Remove `folder` and what becomes empty above it, below the root.

    Names the store made for its own use do not count: whoever still needs one starts over. With
    `bare` only folders go that have nothing at all in them, not even what another still writes.
    """
    while root in folder.parents:
        try:
            with entered(root, folder.parent) as parent:
                if not bare and not _cleared(folder.name, parent):
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


class DirectFile:
    """A new file, written past the page cache where the file system allows it.

    While `direct` is true it takes whole blocks only, at offsets and from addresses that are
    multiples of a block; otherwise it takes anything.
    """

    def __init__(self, path: Path | str, folder: int | None = None) -> None:
        """Make a new file, by a path or by its name in an open folder."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666, dir_fd=folder)
        self.direct = self._set_direct(wanted=True)

    def write(self, pieces: list[memoryview], offset: int) -> None:
        """Write the pieces one after another from `offset` on, all of them."""
        while pieces:
            was_direct = self.direct  # another thread may give up direct writes meanwhile
            try:
                count = os.pwritev(self._descriptor, pieces, offset)
            except OSError as error:
                # Some file systems refuse direct writes only now.
                if error.errno != errno.EINVAL or not was_direct:
                    raise
                self.direct = self._set_direct(wanted=False)
                continue
            if self.direct:
                # What follows must begin with a block again.
                if count < BLOCK:
                    # To go on would ask for the same bytes for ever.
                    raise OSError(errno.EIO, f"the system wrote {count} bytes of a block")
                count = count // BLOCK * BLOCK
            offset += count
            pieces = left_of(pieces, count)

    def reserve(self, size: int) -> None:
        """Take the space now, so that a full disk shows before any data is written; with six
        threads direct writes into it are a tenth to a quarter faster, too (a virtual disk).
        """
        # Only on a device of its own: in memory, taking space is most of the work, and would be
        # that of one thread; on a network or copied on write it promises little.
        on_device = os.major(os.fstat(self._descriptor).st_dev) != 0
        if not size or (on_device and _fallocate(self._descriptor, size)):
            return
        # Where it cannot be taken, at least look.
        if size > free_bytes(self._descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def seal(self, size: int) -> None:
        """Cut the file to its size and make it durable."""
        os.ftruncate(self._descriptor, size)
        getattr(os, "fdatasync", os.fsync)(self._descriptor)

    def is_at(self, name: str, folder: int) -> bool:
        """Whether a name in an open folder still is that of this file."""
        try:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            return os.path.samestat(os.fstat(self._descriptor), there)
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Close the descriptor, once."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _set_direct(self, *, wanted: bool) -> bool:
        # Not a flag to open: where it is refused, open leaves an empty file behind.
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        flags = flags | O_DIRECT if wanted else flags & ~O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return wanted and bool(O_DIRECT)


def left_of(views: list[memoryview], count: int) -> list[memoryview]:
    """What is yet to be read into or written of some views, once so many bytes are."""
    for number, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[number + 1 :]]
        count -= view.nbytes
    return []


def free_bytes(place: Path | int) -> int:
    """The bytes that are free on the file system of a folder, or of an open file."""
    system = os.statvfs(place)
    return system.f_bavail * system.f_frsize


def _fallocate(descriptor: int, size: int) -> bool:
    """Whether the space was taken; not every system and file system can."""
    function = _libc_fallocate()
    if function is None:
        return False
    while function(descriptor, 0, 0, size):
        code = ctypes.get_errno()
        if code in _UNSUPPORTED:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


@cache
def _libc_fallocate() -> Callable[[int, int, int, int], int] | None:
    # Not os.posix_fallocate: where the file system cannot, glibc writes into every block.
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found: Callable[[int, int, int, int], int] = function
    return found
