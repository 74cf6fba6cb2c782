"""Writing one object in parts: the bookkeeping that all sinks share, and a sink in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from operator import index

from ckptkit.errors import StorageError, UsageError
from ckptkit.storage.base.buffers import copy_bytes, default_pool
from ckptkit.storage.base.store import as_bytes

# S3 takes 10,000 parts.
_MOST_PIECES = 9_000
_PIECE_STEP = 1 << 20


def piece_size(total: int, preferred: int) -> int:
    """The bytes that a server is sent at a time of an object of so many: as preferred, or as many
    as few enough pieces need.
    """
    needed = -(-total // _MOST_PIECES)
    return max(preferred, -(-needed // _PIECE_STEP) * _PIECE_STEP)


class Parts:
    """Which parts of one object are written, being written, or missing: each is written once and
    whole, and both endings wait for those being written.
    """

    def __init__(self, where: str, extents: Sequence[int]) -> None:
        self.sizes = [index(extent) for extent in extents]
        if self.sizes and min(self.sizes) < 0:
            least = min(self.sizes)
            raise UsageError("a part cannot have a negative length", where=where, value=least)
        self.total = sum(self.sizes)
        self.where = where
        self._offsets = list(accumulate(self.sizes, initial=0))
        self._largest = max(self.sizes, default=0)
        self._claimed = bytearray(len(self.sizes))
        self._missing = sum(1 for size in self.sizes if size)
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextmanager
    def claiming(self, part: int, size: int) -> Iterator[int]:
        """Claim a part of so many bytes: yields its offset; an error inside spoils the object."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._error is not None:
                raise self._spoiled() from self._error
            if size != self.size(part):
                raise self._misuse(f"part {part} has {self.sizes[part]} bytes, not {size}")
            if self._claimed[part]:
                raise self._misuse(f"part {part} was written before")
            self._claimed[part] = 1
            # Those of length zero are not missed.
            self._missing -= size > 0
            self._running += 1
        try:
            yield self._offsets[part]
        except BaseException as error:
            if self._error is None:
                self._error = error
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def loan(self, part: int) -> Iterator[memoryview]:
        """Memory for a part, whose address suits its offset; all are of a size, to be used again
        for the next.
        """
        size = self.size(part)
        loan = default_pool().take(self._largest, congruent_to=self._offsets[part])
        # The slice is released before the loan ends: memory still looked at is not used again.
        with loan as memory, memory[:size] as data:
            yield data

    def size(self, part: int) -> int:
        """The number of bytes of a part."""
        if not 0 <= part < len(self.sizes):
            raise self._misuse(f"there is no part {part} of {len(self.sizes)}")
        return self.sizes[part]

    def complete(self) -> None:
        """Take no more parts, wait for those being written, and make sure that none is missing."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._missing:
                raise self._misuse(f"{self._missing} of {len(self.sizes)} parts were not written")
            self._wait()
        if self._error is not None:
            raise self._spoiled() from self._error

    def close(self) -> None:
        """Take no more parts and wait for those being written."""
        with self._changed:
            self._wait()
        # Its traceback knows whoever keeps this.
        self._error = None

    def _wait(self) -> None:
        # A descriptor closed under a running write may by then belong to another file.
        self._closed = True
        self._changed.wait_for(lambda: self._running == 0)

    def _misuse(self, what: str) -> UsageError:
        return UsageError(what, where=self.where, hint="write every part once, whole, then finish")

    def _spoiled(self) -> StorageError:
        return StorageError(
            "an earlier write to this object failed", where=self.where, hint="abort and start over"
        )


@dataclass(frozen=True, eq=False)
class BufferSink:
    """A new object that is in memory until it is finished, and then stored at once."""

    parts: Parts
    memory: memoryview
    publish: Callable[[], None]
    discard: Callable[[], None]

    def write(self, part: int, data: memoryview) -> None:
        view = as_bytes(self.parts.where, data)
        with self.parts.claiming(part, view.nbytes) as offset:
            copy_bytes(view, self.memory[offset : offset + view.nbytes])

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        size = self.parts.size(part)
        with (
            self.parts.claiming(part, size) as offset,
            self.memory[offset : offset + size] as memory,
        ):
            yield memory

    def finish(self) -> None:
        self.parts.complete()
        self.publish()

    def abort(self) -> None:
        self.parts.close()
        self.discard()
