"""What of an object is on its way to a server: filled in any order, handed over in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain

import numpy as np

from ckptkit.storage.buffers import AlignedBuffer, copy_bytes, default_pool

_LEAST_PIECES = 2


class Stopped(Exception):  # noqa: N818 — tells an engine to stop, and is never seen elsewhere
    """The upload was aborted."""


class Window:
    """The blocks of an object, which take about `most` bytes of memory at a time.

    A block is a part, or a piece of one that is longer than the `piece_size` bytes which a server
    is sent at a time. Engines read a block from this very memory while they send it, and may keep
    it to send it again: it is used for another one only once nothing refers to it any more. The
    last block waits for `seal`, for with it the object is complete. `seen` looks at each one that
    leaves.
    """

    def __init__(
        self,
        extents: Sequence[int],
        piece_size: int,
        most: int,
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self._piece_size = piece_size
        self._most = max(_LEAST_PIECES * piece_size, most)
        self._seen = seen
        counts = [-(-extent // piece_size) for extent in extents]
        # The blocks of part n are those from first n to first n + 1.
        self._firsts = list(accumulate(counts, initial=0))
        self._sizes = [
            min(piece_size, extent - begin)
            for extent in extents
            for begin in range(0, extent, piece_size)
        ]
        self._ends = list(accumulate(self._sizes))
        self._largest = max(self._sizes, default=0)
        # Who has something in hand, and does not wait.
        self._busy = 0
        self._whole: dict[int, AlignedBuffer] = {}
        self._lent: dict[int, int] = {}
        self._waiting: set[int] = set()
        self._used = 0
        # By length: what is freed is used again.
        self._free: dict[int, list[AlignedBuffer]] = {}
        self._free_bytes = 0
        self._next = 0
        self._sealed = False
        self._stopped = False
        # Reentrant: a block may be let go of by whoever holds the lock.
        self._changed = threading.Condition()

    def is_one_block(self, part: int) -> bool:
        """Whether a part can be filled in place."""
        return self._firsts[part + 1] - self._firsts[part] == 1

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        """The memory of a part that is one block. Waits while memory is used up."""
        with self._block(self._firsts[part]) as memory:
            yield memory

    @contextmanager
    def coming(self) -> Iterator[None]:
        """While a part that will be written is put together elsewhere: others may wait for it."""
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def write(self, part: int, data: memoryview) -> None:
        """Copy a part to its blocks. Waits while memory is used up."""
        first, last = self._firsts[part], self._firsts[part + 1]
        for block in range(first, last):
            with self._block(block) as memory:
                copy_bytes(data[: memory.nbytes], memory)
                data = data[memory.nbytes :]

    @property
    def is_empty(self) -> bool:
        """Whether every block was handed over."""
        return self._next == len(self._sizes)

    @property
    def under_way(self) -> tuple[int, int]:
        """How many blocks were handed over, and how many of them the engine could let go of, but
        has not yet.
        """
        with self._changed:
            return self._next, self._sendable()

    def blocks(self) -> Iterator[memoryview]:
        """Each block in turn, once it is whole; `Stopped` after `stop`."""
        for number in range(len(self._sizes)):
            # No name may hold the block: it could not be let go of while the next one is awaited.
            yield self._handed_over(number)

    def seal(self) -> None:
        """Let the last block go, too."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Whoever fills, waits for or takes blocks gets `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back; nobody may use the window any more."""
        with self._changed:
            buffers = [*chain.from_iterable(self._free.values()), *self._whole.values()]
            self._free.clear()
            self._whole.clear()
        for buffer in buffers:
            buffer.give_back()

    @contextmanager
    def _block(self, number: int) -> Iterator[memoryview]:
        buffer = self._taken(number)
        is_whole = False
        try:
            with buffer.view[: self._sizes[number]] as memory:
                yield memory
            is_whole = True
        finally:
            with self._changed:
                self._busy -= 1
                if is_whole:
                    self._whole[number] = buffer
                else:
                    self._put_back(number, buffer)
                self._changed.notify_all()

    def _taken(self, number: int) -> AlignedBuffer:
        length = self._length(number)
        with self._changed:
            self._waiting.add(number)
            try:
                self._changed.wait_for(lambda: self._stopped or self._may_take(number))
            finally:
                self._waiting.remove(number)
                # Others may go beyond the limit as soon as nobody waits for the next block.
                self._changed.notify_all()
            self._refuse_if_stopped()
            if free := self._free.get(length):
                self._free_bytes -= length
                buffer = free.pop()
            else:
                if self._used + self._free_bytes + length > self._most:
                    # Of other lengths.
                    self._free.clear()
                    self._free_bytes = 0
                buffer = default_pool().take(length)
            self._used += length
            self._busy += 1
            return buffer

    def _may_take(self, number: int) -> bool:
        if self._used + self._length(number) <= self._most:
            return True
        # Beyond, so that waiting ends; for the block that all the others wait for, if there is
        # somebody who has it.
        is_next = number == self._next or self._next not in self._waiting
        return is_next and not self._can_move()

    def _length(self, number: int) -> int:
        """Of the memory for a block: most are about as long, and use it by turns."""
        size = self._sizes[number]
        return self._largest if 2 * size > self._largest else size

    def _put_back(self, number: int, buffer: AlignedBuffer) -> None:
        length = self._length(number)
        self._used -= length
        self._free.setdefault(length, []).append(buffer)
        self._free_bytes += length

    def _can_move(self) -> bool:
        """Whether memory will come free without another block: else waiting would never end."""
        return bool(self._sendable() or self._may_leave(self._next) or self._busy)

    def _sendable(self) -> int:
        """How many blocks were handed over whose pieces are complete: an engine may wait for the
        rest of the others.
        """
        complete = self._end(self._next) // self._piece_size * self._piece_size
        return sum(end <= complete or self.is_empty for end in list(self._lent.values()))

    def _handed_over(self, number: int) -> memoryview:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._may_leave(number))
            self._refuse_if_stopped()
            buffer = self._whole.pop(number)
            self._next = number + 1
            self._lent[number] = self._ends[number]
            # An array, because a memoryview cannot tell when the last of its users is gone.
            array = np.frombuffer(buffer.view[: self._sizes[number]], np.uint8)
            weakref.finalize(array, self._take_back, number, buffer).atexit = False
            self._changed.notify_all()
        if self._seen is not None:
            self._seen(array.data)
        return array.data

    def _take_back(self, number: int, buffer: AlignedBuffer) -> None:
        with self._changed:
            del self._lent[number]
            self._put_back(number, buffer)
            self._changed.notify_all()

    def _may_leave(self, number: int) -> bool:
        is_last = number == len(self._sizes) - 1
        return number in self._whole and (self._sealed or not is_last)

    def _end(self, number: int) -> int:
        """Where the blocks before this one end."""
        return self._ends[number - 1] if number else 0

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise Stopped


def pieces_of(blocks: Iterator[memoryview], size: int) -> Iterator[bytes]:
    """Copies of all bytes, in pieces of `size`."""
    held: list[memoryview] = []
    missing = size
    # Nothing may be held of what the next block is waited for.
    while (block := next(blocks, None)) is not None:
        while block is not None:
            count = min(missing, block.nbytes)
            held.append(block[:count])
            block = block[count:] if count < block.nbytes else None
            missing -= count
            if not missing:
                piece = b"".join(held)
                held.clear()
                missing = size
                yield piece
                del piece
    if held:
        yield b"".join(held)
