"""What the system has of a file in its page cache, looked at where it lies; and what it does not
have, brought from the device past it.

To copy rows from there takes no call for each. And numpy copies between any two addresses alike:
the system takes half as long again where they differ modulo 32, as the files of other programs and
the memory of tensors mostly do.

Mapped memory has a danger. Another process may cut the file, and whoever touches a page that the
file has no longer is ended by the system (SIGBUS). So it is touched only under a read lease: the
system lets nobody open the file for writing, or cut it, until the lease is given back. A writer
waits as long as it takes to copy a few MiB.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from ckptkit.storage.base.buffers import PAGE, default_pool
from ckptkit.storage.base.disk import BLOCK, DEVICE_BYTES, DirectReads

# MADV_POPULATE_READ, Linux 5.14. A page that cannot be had is an error then, and not the end.
_POPULATE_READ = 22


class CachedFile:
    """An open file, whose bytes are lent to any thread, from the cache or past it.

    - Of files that somebody has open for writing there are no leases, nor of those of other users.
    - On a network they would not stop other machines. File systems there have no device.
    """

    def __init__(self, file: int, status: os.stat_result) -> None:
        self._file = file
        self._size = status.st_size
        self._is_on_device = sys.platform == "linux" and os.major(status.st_dev) != 0
        self._memory: mmap.mmap | None = None
        self._borrowers = 0
        self._lock = threading.Lock()
        self._direct = DirectReads(file)

    def has(self, offset: int) -> bool:
        """Whether a byte is in the cache; from now on it is. So who asks for the same again is told
        of a file that is read more than once, whose place is in the cache.

        True too of what is on no device, such as a network: it may have caches of its own.
        """
        if not self._is_on_device:
            return True
        try:
            if os.preadv(self._file, [bytearray(1)], offset, os.RWF_NOWAIT):
                return True
        except BlockingIOError:
            pass
        except OSError:
            return True  # this file system does not tell
        with suppress(OSError):
            os.pread(self._file, 1, offset)
        return False

    def lend(
        self, offset: int, length: int, *, past_cache: bool = False
    ) -> AbstractContextManager[memoryview | None]:
        """A view of some bytes, let go of before the block ends; None where there is no lease, or
        they are not in the cache: requests bring them sooner from a device than touching pages.
        With `past_cache` what the device has, by whole blocks; None where it does not give all.
        """
        return self._brought(offset, length) if past_cache else self._looked_at(offset, length)

    @contextmanager
    def _brought(self, offset: int, length: int) -> Iterator[memoryview | None]:
        first = offset // BLOCK * BLOCK
        begin, end = offset - first, offset - first + length
        blocks = -(-end // BLOCK) * BLOCK
        # Always as much, so that loans find each other again.
        with default_pool().take(max(blocks, DEVICE_BYTES + 2 * BLOCK)) as memory:
            is_whole = self._direct.read(memory[:blocks], first) >= end
            yield memory[begin:end] if is_whole else None

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
            self._give_back()

    def close(self) -> None:
        """Free what is mapped, once nobody looks at it any more."""
        self._direct.close()
        memory, self._memory = self._memory, None
        if memory is not None:
            with suppress(BufferError):
                memory.close()

    def _borrowed(self) -> mmap.mmap | None:
        if not self._is_on_device:
            return None
        with self._lock:
            try:
                if self._memory is None:
                    # A writer who waits is told of by a signal, by default one that ends a process.
                    fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)
                    self._memory = mmap.mmap(
                        self._file, self._size, mmap.MAP_SHARED, mmap.PROT_READ
                    )
                if not self._borrowers:
                    fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                elif fcntl.fcntl(self._file, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                    return None  # a writer waits: until all have given back
            except (OSError, ValueError):
                return None
            self._borrowers += 1
            return self._memory

    def _give_back(self) -> None:
        with self._lock:
            self._borrowers -= 1
            if not self._borrowers:
                fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def _has_at_hand(self, memory: mmap.mmap, offset: int, length: int) -> bool:
        """Whether these bytes are in the file and, by their ends, in the cache; then they are
        mapped.
        """
        first = offset // PAGE * PAGE
        try:
            for place in (offset, offset + length - 1):
                if not os.preadv(self._file, [bytearray(1)], place, os.RWF_NOWAIT):
                    return False
            memory.madvise(_POPULATE_READ, first, offset + length - first)
        except OSError:
            return False
        return True
