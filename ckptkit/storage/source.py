"""A file of this machine, open for reading: by exact ranges; where it lies in the page cache; and,
what the cache does not have, brought from the device past it.

To copy rows from the cache takes no call for each. And numpy copies between any two addresses
alike: the system takes half as long again where they differ modulo 32, as the files of other
programs and the memory of tensors mostly do.

Mapped memory has a danger. Another process may cut the file, and whoever touches a page that the
file has no longer is ended by the system (SIGBUS). So it is touched only under a read lease: the
system lets nobody open the file for writing, or cut it, until the lease is given back. A writer
waits as long as it takes to copy a few MiB.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from io import FileIO
from pathlib import Path

from ckptkit.errors import CorruptionError
from ckptkit.storage.base.buffers import PAGE, default_pool
from ckptkit.storage.base.disk import BLOCK, DEVICE_BYTES, O_DIRECT, left_of, refusals
from ckptkit.storage.base.store import Closing, as_bytes, checked_range

_MOST_BUFFERS = 1024  # IOV_MAX: of one request
# MADV_POPULATE_READ, Linux 5.14. A page that cannot be had is an error then, and not the end.
_POPULATE_READ = 22


class LocalSource(Closing):
    """A file open for reading, by exact ranges, from any thread.

    - Of files that somebody has open for writing there are no leases, nor of those of other users.
    - On a network they would not stop other machines. File systems there have no device.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        # A pipe of that name would make open wait for its writer.
        self._file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self._file.close()
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
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
        try:
            if os.preadv(self._file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT):
                return True
        except BlockingIOError:
            pass
        except OSError:
            return True  # this file system does not tell
        with suppress(OSError):
            os.pread(self._file.fileno(), 1, offset)
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
        first = offset // PAGE * PAGE
        try:
            if self._has_at_hand(memory, offset, length):
                yield memoryview(memory)[offset : offset + length]
                # Else all of the file would count as memory of this process in the end.
                memory.madvise(mmap.MADV_DONTNEED, first, offset + length - first)
            else:
                yield None
        finally:
            with self._lock:
                self._borrowers -= 1
                if not self._borrowers:
                    fcntl.fcntl(self._file.fileno(), fcntl.F_SETLEASE, fcntl.F_UNLCK)

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

    def _has_at_hand(self, memory: mmap.mmap, offset: int, length: int) -> bool:
        """Whether these bytes are in the file and, by their ends, in the cache; then they are
        mapped.
        """
        first = offset // PAGE * PAGE
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
