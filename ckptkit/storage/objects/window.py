"""The pieces of an object on their way to a server: filled in any order, handed over in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import numpy as np

from ckptkit.storage.buffers import AlignedBuffer, copy_bytes, default_pool


class Stopped(Exception):  # noqa: N818 — tells an engine to stop, and is never seen elsewhere
    """The upload was aborted."""


class _Piece:
    __slots__ = ("buffer", "missing")

    def __init__(self, buffer: AlignedBuffer, size: int) -> None:
        self.buffer = buffer
        self.missing = size


class Window:
    """Pieces of `piece_size` bytes, of which about `most` hold memory at a time.

    Engines read a piece from this very memory while they send it, and may keep it to send it
    again: it is used for another piece only once nothing refers to it any more. The last piece
    waits for `seal`, for with it the object is complete. `seen` looks at each one that leaves.
    """

    def __init__(
        self,
        total: int,
        piece_size: int,
        most: int,
        seen: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.count = -(-total // piece_size)
        self._total = total
        self._size = min(piece_size, total) or 1
        self._seen = seen
        self._sealed = False
        self._most = max(2, most)
        self._pieces: dict[int, _Piece] = {}
        self._free: list[AlignedBuffer] = []
        self._next = 0
        self._lent = 0
        self._copying = 0
        self._stopped = False
        # Reentrant: a piece may be let go of by whoever holds the lock.
        self._changed = threading.Condition()

    def write(self, offset: int, data: memoryview) -> bool:
        """Copy bytes to their pieces; whether one is whole now. Waits while memory is used up."""
        completed = False
        while data.nbytes:
            number, start = divmod(offset, self._size)
            count = min(data.nbytes, self._size - start)
            completed |= self._fill(number, start, data[:count])
            offset, data = offset + count, data[count:]
        return completed

    @property
    def is_empty(self) -> bool:
        """Whether every piece was handed over."""
        return self._next == self.count

    @property
    def under_way(self) -> tuple[int, int]:
        """How many pieces were handed over, and how many of them nobody has let go of yet."""
        return self._next, self._lent

    def pieces(self) -> Iterator[memoryview]:
        """Each piece in turn, once it is whole; `Stopped` after `stop`."""
        for number in range(self.count):
            # No name may hold the piece: it could not be let go of while the next one is awaited.
            yield self._handed_over(number)

    def seal(self) -> None:
        """Let the last piece go, too."""
        with self._changed:
            self._sealed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Whoever fills, waits for or takes pieces gets `Stopped`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Give the memory back; nobody may use the window any more."""
        with self._changed:
            buffers = [*self._free, *(piece.buffer for piece in self._pieces.values())]
            self._free.clear()
            self._pieces.clear()
        for buffer in buffers:
            buffer.give_back()

    def _fill(self, number: int, start: int, data: memoryview) -> bool:
        with self._changed:
            piece = self._piece(number)
            self._copying += 1
        try:
            copy_bytes(data, piece.buffer.view[start : start + data.nbytes])
        finally:
            with self._changed:
                self._copying -= 1
                piece.missing -= data.nbytes
                self._changed.notify_all()
        return piece.missing == 0

    def _piece(self, number: int) -> _Piece:
        while True:
            self._refuse_if_stopped()
            if piece := self._pieces.get(number):
                return piece
            if len(self._pieces) + self._lent < self._most or not self._can_move():
                piece = self._pieces[number] = _Piece(self._buffer(), self._size_of(number))
                return piece
            self._changed.wait()

    def _can_move(self) -> bool:
        """Whether memory will come free without another piece: else waiting would never end."""
        following = self._pieces.get(self._next)
        whole = following is not None and following.missing == 0
        return bool(self._lent or whole or self._copying)

    def _buffer(self) -> AlignedBuffer:
        return self._free.pop() if self._free else default_pool().take(self._size)

    def _handed_over(self, number: int) -> memoryview:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._may_leave(number))
            self._refuse_if_stopped()
            buffer = self._pieces.pop(number).buffer
            self._next = number + 1
            self._lent += 1
            # An array, because a memoryview cannot tell when the last of its users is gone.
            array = np.frombuffer(buffer.view[: self._size_of(number)], np.uint8)
            weakref.finalize(array, self._take_back, buffer).atexit = False
            self._changed.notify_all()
        if self._seen is not None:
            self._seen(array.data)
        return array.data

    def _take_back(self, buffer: AlignedBuffer) -> None:
        with self._changed:
            self._lent -= 1
            self._free.append(buffer)
            self._changed.notify_all()

    def _may_leave(self, number: int) -> bool:
        piece = self._pieces.get(number)
        last = number == self.count - 1
        return piece is not None and piece.missing == 0 and (self._sealed or not last)

    def _size_of(self, number: int) -> int:
        return min(self._size, self._total - number * self._size)

    def _refuse_if_stopped(self) -> None:
        if self._stopped:
            raise Stopped
