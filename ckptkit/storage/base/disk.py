"""What the operating system is asked for: the way to folders, files read and written past the
page cache, and its refusals in words that say what to do.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path

from ckptkit.errors import (
    AccessError,
    AlreadyExistsError,
    CkptkitError,
    CorruptionError,
    InvalidNameError,
    NoSpaceError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.base.buffers import default_pool, is_out_of_cache, left_of
from ckptkit.storage.base.store import Closing, as_bytes, checked_range

BLOCK = 4096
DEVICE_BYTES = 4 << 20
"""So much by a request, and few at a time, is what a device reads fastest, into memory that stays
in a cache of the processor: what it brings is copied from there."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_MOST_BUFFERS = 1024  # IOV_MAX: of one request
# MADV_POPULATE_READ, Linux 5.14. A page that cannot be had is an error then, and not the end.
_POPULATE_READ = 22
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# A folder that may be passed but not read can still be gone through.
_PASSED = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
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
    errno.EAGAIN: (StorageError, "another process may have changed the file; read it again"),
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
        with suppress(FileExistsError):  # another writer was faster
            os.mkdir(path.name, dir_fd=descriptor)
            made.append(path)
        return os.open(path.name, _PASSED | os.O_NOFOLLOW, dir_fd=descriptor)
    except OSError as error:
        # Systems differ in what they say of a link.
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            with suppress(FileNotFoundError):
                status = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    raise link_in_the_way(path) from error
        raise


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


def open_regular(path: Path) -> FileIO:
    """A file open for reading; IsADirectoryError for what is none."""
    try:
        # A pipe of that name would make open wait for its writer.
        file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    except BlockingIOError:
        # Another process has a lease on it, and gives it back to those who wait.
        file = FileIO(path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return file


class LocalSource(Closing):
    """A file open for reading, by exact ranges, from any thread: through the page cache, where it
    lies in the cache, and, what the cache does not have, from the device past it.

    To copy rows from the cache takes no call for each. And numpy copies between any two addresses
    alike: the system takes half as long again where they differ modulo 32, as the files of other
    programs and the memory of tensors mostly do.

    Mapped memory has a danger. Another process may cut the file, and whoever touches a page that
    the file has no longer is ended by the system (SIGBUS). So it is touched only under a read
    lease: the system lets nobody open the file for writing, or cut it, until the lease is given
    back. A writer waits as long as it takes to copy a few MiB.

    - Of files that somebody has open for writing there are no leases, nor of those of other users.
    - On a network they would not stop other machines. File systems there have no device.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._file = open_regular(path)
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        self._is_on_device = sys.platform == "linux" and os.major(status.st_dev) != 0
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._borrowers = 0
        self._direct: int | None = None
        """What is read past the cache; -1 where the file system does not allow it."""

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        if len(buffers) == 1 and offset >= 0:
            # Nearly always that is all, and of rows of a few KiB all else would take longer.
            # `suppress` alone takes as long as a small read.
            try:
                if os.preadv(self._file.fileno(), buffers, offset) == buffers[0].nbytes > 0:
                    return
            except (OSError, BufferError, TypeError, ValueError):
                pass  # what is wrong is said below
        left = [view for buffer in buffers if len(view := as_bytes(self._path, buffer))]
        checked_range(self._path, self.size, offset, sum(map(len, left)))
        with refusals(self._path):
            descriptor = self._file.fileno()
            while left:
                count = os.preadv(descriptor, left[:_MOST_BUFFERS], offset)
                if not count:
                    raise CorruptionError(
                        f"the file ends at byte {offset}, it had {self.size}",
                        where=self._path,
                        hint="another process cut it while it was read",
                    )
                offset += count
                left = left_of(left, count)

    def fetch(self, offset: int, length: int) -> memoryview:
        return memoryview(self.read(offset, length))

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """Exactly these bytes."""
        count = checked_range(self._path, self.size, start, length)
        with refusals(self._path):
            data = os.pread(self._file.fileno(), count, start)
        if len(data) == count:
            return data
        whole = bytearray(count)
        self.read_into(start, memoryview(whole))
        return bytes(whole)

    def is_at_hand(self, offset: int) -> bool:
        """Whether a byte is in the cache; from now on it is. So who asks for the same again is told
        of a file that is read more than once, whose place is in the cache.

        True too of what is on no device, such as a network: it may have caches of its own.
        """
        if not self._is_on_device:
            return True
        file = self._file.fileno()
        # A read that may not wait does begin one, and finds the byte where the device was quick: so
        # first a look that brings nothing. It says little of other people's files.
        try:
            if not is_out_of_cache(file, offset, 1) and os.preadv(
                file, [bytearray(1)], offset, os.RWF_NOWAIT
            ):
                return True
        except BlockingIOError:
            pass
        except OSError:
            return True  # this file system does not tell
        with suppress(OSError):
            os.pread(file, 1, offset)
        return False

    def lend(
        self, offset: int, length: int, *, past_cache: bool = False
    ) -> AbstractContextManager[memoryview | None]:
        """A view of some bytes, let go of before the block ends; None where there is no lease, or
        they are not in the cache: requests bring them sooner from a device than touching pages.
        With `past_cache` what the device has, by whole blocks; None where it does not give all.
        """
        return self._brought(offset, length) if past_cache else self._looked_at(offset, length)

    def close(self) -> None:
        """Close the file, and free what is mapped once nobody looks at it any more."""
        with self._lock:
            memory, self._memory = self._memory, None
            direct, self._direct = self._direct, -1
        if memory is not None:
            with suppress(BufferError):
                memory.close()
        if direct is not None and direct >= 0:
            os.close(direct)
        self._file.close()

    # Where it lies in the page cache

    @contextmanager
    def _looked_at(self, offset: int, length: int) -> Iterator[memoryview | None]:
        memory = self._borrowed()
        if memory is None:
            yield None
            return
        first = offset // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            if self._has_at_hand(memory, first, offset, length):
                yield memoryview(memory)[offset : offset + length]
                # Else all of the file would count as memory of this process in the end.
                try:
                    memory.madvise(mmap.MADV_DONTNEED, first, offset + length - first)
                except OSError:
                    return  # what is locked into memory stays there
            else:
                yield None
        finally:
            with self._lock:
                self._borrowers -= 1
                if not self._borrowers:
                    try:
                        fcntl.fcntl(self._file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)
                    except OSError as error:
                        raise refusal(error, self._path) from error

    def _borrowed(self) -> mmap.mmap | None:
        """The file as memory, once there is a lease."""
        if not self._is_on_device:
            return None
        file = self._file.fileno()
        with self._lock:
            try:
                if self._memory is None:
                    # A writer who waits is told of by a signal, by default one that ends a process.
                    fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
                    self._memory = mmap.mmap(file, self.size, mmap.MAP_SHARED, mmap.PROT_READ)
                if not self._borrowers:
                    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                elif fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                    return None  # a writer waits: until all have given back
            except (OSError, ValueError):
                return None
            self._borrowers += 1
            return self._memory

    def _has_at_hand(self, memory: mmap.mmap, first: int, offset: int, length: int) -> bool:
        """Whether the file has these bytes and, by their ends, the cache; then they are mapped."""
        try:
            for place in (offset, offset + length - 1):
                if not os.preadv(self._file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT):
                    return False
            memory.madvise(_POPULATE_READ, first, offset + length - first)
        except OSError:
            return False
        return True

    # Past it

    @contextmanager
    def _brought(self, offset: int, length: int) -> Iterator[memoryview | None]:
        first = offset // BLOCK * BLOCK
        begin, end = offset - first, offset - first + length
        blocks = -(-end // BLOCK) * BLOCK
        # Always as much, so that loans find each other again.
        with default_pool().take(max(blocks, DEVICE_BYTES + 2 * BLOCK)) as memory:
            is_whole = self._bring(memory[:blocks], first) >= end
            yield memory[begin:end] if is_whole else None

    def _bring(self, memory: memoryview, offset: int) -> int:
        """How many bytes from `offset` on have come into memory; both begin with a block, and
        memory is whole blocks. Fewer come at the end of the file, and where the system refuses.

        A process that forks meanwhile gets the bytes as long as nobody writes into the same pages
        while they come (open(2)): memory to read into is whole pages that have one user.
        """
        # Not the flag of the open file, through which others read; nor the name, which may be
        # another file's by now.
        with self._lock:
            if self._direct is None:
                self._direct = -1
                with suppress(OSError):
                    flags = os.O_RDONLY | os.O_CLOEXEC | O_DIRECT
                    self._direct = os.open(f"/proc/self/fd/{self._file.fileno()}", flags)
            direct, done = self._direct, 0
        try:
            while done < len(memory) and not done % BLOCK and direct >= 0:
                count = os.preadv(direct, [memory[done:]], offset + done)
                if not count:
                    break
                done += count
        except OSError:
            pass  # a read through the cache says what is wrong, or succeeds
        return done


class DirectFile:
    """A new file, written past the page cache where the file system allows it.

    While `direct` is true it takes whole blocks only, at offsets and from addresses that are
    multiples of a block; otherwise it takes anything.
    """

    def __init__(self, path: Path | str, folder: int | None = None, *, lock: bool = False) -> None:
        """Make a new file, by a path or by its name in an open folder; with a lock where it can."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666, dir_fd=folder)
        if lock:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        allocate = _libc_fallocate() if on_device and size else None
        while allocate is not None:
            if not allocate(self._descriptor, 0, 0, size):
                return
            code = ctypes.get_errno()
            if code in _UNSUPPORTED:
                break  # not every file system can
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        # Where it cannot be taken, at least look.
        if size > free_bytes(self._descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def seal(self, size: int) -> None:
        """Cut the file to its size and make it durable."""
        os.ftruncate(self._descriptor, size)
        getattr(os, "fdatasync", os.fsync)(self._descriptor)

    def is_at(self, path: Path | str, folder: int | None = None) -> bool:
        """Whether a path, or a name in an open folder, still is that of this file."""
        with suppress(FileNotFoundError):
            there = os.stat(path, dir_fd=folder, follow_symlinks=False)
            return os.path.samestat(os.fstat(self._descriptor), there)
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
        with suppress(OSError):
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)
            return wanted and bool(O_DIRECT)
        return False


def free_bytes(place: Path | int) -> int:
    """The bytes that are free on the file system of a folder, or of an open file."""
    system = os.statvfs(place)
    return system.f_bavail * system.f_frsize


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
