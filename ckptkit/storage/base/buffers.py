"""Page-aligned memory, used again: the first touch of fresh memory costs more than a copy.

Who owns memory that native code works on, since Python cannot see that it is in use:
- Calls of the system, checksums and numpy's copies use it until they return, and hold a view.
- obstore holds a view of a block until its last piece was sent; `upload` waits for that.
- A collective of torch holds its tensors itself, also one that nobody waits for any longer.
- MPI holds nothing: `mpi_group` keeps the memory of all that is not over, however it ends.
- `torch.frombuffer` gives its view back at once, and keeps the object alive only. So it is never
  used on memory of a pool, whose next user would write into the tensor.

Memory of a pool is mapped, not malloc's, and views are bounded: what writes into it cannot reach
the lists of the allocator.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import UsageError

PAGE = 4096
_HUGE = 2 << 20
_MANY_ROWS = 500
# From here on a loop of vector loads and stores is faster than the C library's copy of a row.
_LONG_ROW = 16 << 10
_LIBC = ctypes.CDLL(None)


def address_of(view: memoryview) -> int:
    """Where a non-empty buffer begins in memory."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy as many bytes while other threads go on: a memoryview would keep the interpreter."""
    # Not `target[...] = source`, which is the C library's memmove: on large runs that takes a sixth
    # longer than a plain loop of vector loads and stores, which this is.
    np.positive(np.frombuffer(source, np.uint8), out=np.frombuffer(target, np.uint8))


def copy_elements(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy an array into another of its shape and dtype.

    - Where both lie in one run of memory, as bytes, while other threads go on.
    - Long rows as bytes, in the same way, whatever their addresses.
    - Many short rows as one element each, which numpy does a fifth faster. Not few rows: with 500
      elements or less numpy keeps the interpreter to itself.
    - All else element by element.
    """
    if source.flags.c_contiguous and target.flags.c_contiguous:
        # As in `copy_bytes`.
        np.positive(source.reshape(-1).view(np.uint8), out=target.reshape(-1).view(np.uint8))
        return
    size = source.itemsize
    if source.ndim > 1 and source.strides[-1] == target.strides[-1] == size:
        if source.shape[-1] * size >= _LONG_ROW:
            np.positive(source.view(np.uint8), out=target.view(np.uint8))
            return
        if source.size > _MANY_ROWS * source.shape[-1]:
            row = np.dtype((np.void, source.shape[-1] * size))
            source, target = source.view(row), target.view(row)
    target[...] = source


def left_of(views: list[memoryview], count: int) -> list[memoryview]:
    """What is yet to be read into or written of some views, once so many bytes are."""
    for number, view in enumerate(views):
        if count < view.nbytes:
            return [view[count:], *views[number + 1 :]]
        count -= view.nbytes
    return []


def is_out_of_cache(file: int, offset: int, length: int) -> bool:
    """Whether the system has nothing of these bytes of an open file in memory, by a look that
    brings none. False where it does not tell: of a file that this user may not write it says that
    all is there.
    """
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    size = offset + length - first
    pages = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    # ValueError: the file has no such bytes. AttributeError: the C library has no such function.
    with (
        suppress(OSError, ValueError, AttributeError),
        mmap.mmap(file, size, prot=mmap.PROT_READ, offset=first) as memory,
        memoryview(memory) as view,
    ):
        begin = ctypes.c_void_p(address_of(view))
        refused = _LIBC.mincore(begin, ctypes.c_size_t(size), pages.ctypes)
        return not refused and not np.any(pages & 1)
    return False


class AlignedBuffer:
    """A writable view of `size` bytes on loan from a pool; give it back, or use it in a `with`."""

    __slots__ = ("_memory", "_pool", "view")

    def __init__(self, pool: BufferPool, memory: mmap.mmap, start: int, size: int) -> None:
        self._pool = pool
        self._memory: mmap.mmap | None = memory
        self.view = memoryview(memory)[start : start + size]

    def give_back(self) -> None:
        """Let the pool use the memory again, unless a slice or an array still shows it."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        with suppress(BufferError):
            self.view.release()
            # To its own size: that changes nothing, but it is refused while any view is alive,
            # which cannot be asked for.
            with suppress(SystemError):
                memory.resize(len(memory))
            self._pool.keep(memory)

    def __enter__(self) -> memoryview:
        return self.view

    def __exit__(self, *_: object) -> None:
        self.give_back()


class BufferPool:
    """Lends page-aligned buffers and keeps at most `limit` bytes of them for reuse."""

    def __init__(self, limit: int = 512 << 20) -> None:
        self._limit = limit
        self._kept: dict[int, list[mmap.mmap]] = {}
        self.kept_bytes = 0
        self._lock = threading.Lock()

    def take(self, size: int, *, congruent_to: int = 0) -> AlignedBuffer:
        """A buffer of `size` bytes whose address equals `congruent_to` modulo the page size.

        Its content is whatever its last user left there.
        """
        if size < 0:
            raise UsageError("a buffer cannot have a negative size", value=size)
        start = congruent_to % PAGE
        length = _rounded(start + size)
        with self._lock:
            kept = self._kept.get(length)
            memory = kept.pop() if kept else None
            self.kept_bytes -= length if memory is not None else 0
        if memory is None:
            memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if length >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel may have none
                    memory.madvise(mmap.MADV_HUGEPAGE)
        return AlignedBuffer(self, memory, start, size)

    def has(self, size: int, *, congruent_to: int = 0) -> bool:
        """Whether a buffer that `take` would lend is kept."""
        with self._lock:
            return bool(self._kept.get(_rounded(congruent_to % PAGE + size)))

    def keep(self, memory: mmap.mmap) -> None:
        """Keep memory that was lent; what waits longest makes room for it."""
        length = len(memory)
        if length > self._limit:
            return
        with self._lock:
            while self.kept_bytes + length > self._limit:
                oldest, waiting = next(iter(self._kept.items()))
                if waiting:
                    waiting.pop()
                    self.kept_bytes -= oldest
                else:
                    del self._kept[oldest]
            # Sizes that come back move to the end, where they are dropped last.
            kept = self._kept.pop(length, [])
            kept.append(memory)
            self._kept[length] = kept
            self.kept_bytes += length

    def clear(self) -> None:
        """Free what waits for reuse."""
        with self._lock:
            self._kept.clear()
            self.kept_bytes = 0


@cache
def default_pool() -> BufferPool:
    return BufferPool()


def _rounded(size: int) -> int:
    """The next of few lengths, at most an eighth above, so that like loans find each other; of
    large ones whole huge pages, where the system begins with one then (Linux 6.7).
    """
    # A device fills small pages by more and smaller requests: at half the speed, where a mapping
    # of 9 MiB begins anywhere and has three or four huge pages only.
    least = PAGE if size < _HUGE else _HUGE
    step = max(least, 1 << max(0, size.bit_length() - 4))
    return max(PAGE, -(-size // step) * step)
