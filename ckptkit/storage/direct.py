"""A new file written past the page cache where the file system allows it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

BLOCK = 4096

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class DirectFile:
    """A descriptor that wants blocks while `direct` is true, and takes anything otherwise."""

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
            count = self._usable(count)
            offset += count
            pieces = _rest(pieces, count)

    def reserve(self, size: int) -> None:
        """Take the space now, so that a full disk shows before any data is written; with six
        threads direct writes into it are a tenth to a quarter faster, too (a virtual disk).
        """
        if not size or (_is_on_device(self._descriptor) and _fallocate(self._descriptor, size)):
            return
        # Where it cannot be taken, at least look.
        if size > _room(self._descriptor):
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
        flags = flags | _O_DIRECT if wanted else flags & ~_O_DIRECT
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
        except OSError:
            return False
        return wanted and bool(_O_DIRECT)

    def _usable(self, count: int) -> int:
        if not self.direct:
            return count
        whole = count // BLOCK * BLOCK
        if not whole:
            # To go on would ask for the same bytes for ever.
            raise OSError(errno.EIO, f"the system wrote {count} bytes of a block")
        return whole


def _is_on_device(descriptor: int) -> bool:
    """Whether the file is on a device of its own: in memory, taking space is most of the work, and
    would be that of one thread; on a network or copied on write it promises little.
    """
    return os.major(os.fstat(descriptor).st_dev) != 0


def _room(descriptor: int) -> int:
    """The bytes that are free on the file system of a file."""
    system = os.fstatvfs(descriptor)
    return system.f_bavail * system.f_frsize


def _rest(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the pieces after their first `count` bytes."""
    for number, piece in enumerate(pieces):
        if count < piece.nbytes:
            return [piece[count:], *pieces[number + 1 :]]
        count -= piece.nbytes
    return []


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
