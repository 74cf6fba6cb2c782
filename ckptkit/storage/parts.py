"""The bookkeeping of a sink: where each part lies, and that each is written once and whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import index

from ckptkit.errors import StorageError, UsageError
from ckptkit.storage.buffers import default_pool
from ckptkit.storage.ranges import as_bytes


class Parts:
    """Which parts of one object are written, being written, or missing."""

    def __init__(self, where: str, extents: Sequence[int]) -> None:
        sizes = [index(extent) for extent in extents]
        if sizes and min(sizes) < 0:
            raise UsageError("a part cannot have a negative length", where=where, value=min(sizes))
        self.total = sum(sizes)
        self._where = where
        self._sizes = sizes
        self._offsets = list(accumulate(sizes, initial=0))
        self._largest = max(sizes, default=0)
        self._claimed = bytearray(len(sizes))
        self._missing = sum(1 for size in sizes if size)
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextmanager
    def writing(self, part: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Claim a part: yields its offset and its bytes; an error inside spoils the object."""
        view = as_bytes(self._where, data)
        with self.claiming(part, view.nbytes) as offset:
            yield offset, view

    @contextmanager
    def claiming(self, part: int, size: int) -> Iterator[int]:
        """Claim a part of so many bytes: yields its offset; an error inside spoils the object."""
        self._claim(part, size)
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

    @property
    def sizes(self) -> Sequence[int]:
        """The number of bytes of each part."""
        return self._sizes

    def size(self, part: int) -> int:
        """The number of bytes of a part."""
        if not 0 <= part < len(self._sizes):
            raise self._misuse(f"there is no part {part} of {len(self._sizes)}")
        return self._sizes[part]

    def complete(self) -> None:
        """Take no more parts, wait for those being written, and make sure that none is missing."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._missing:
                raise self._misuse(f"{self._missing} of {len(self._sizes)} parts were not written")
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

    def _claim(self, part: int, size: int) -> None:
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._error is not None:
                raise self._spoiled() from self._error
            if size != self.size(part):
                raise self._misuse(f"part {part} has {self._sizes[part]} bytes, not {size}")
            if self._claimed[part]:
                raise self._misuse(f"part {part} was written before")
            self._claimed[part] = 1
            self._missing -= size > 0
            self._running += 1

    def _misuse(self, what: str) -> UsageError:
        return UsageError(what, where=self._where, hint="write every part once, whole, then finish")

    def _spoiled(self) -> StorageError:
        return StorageError(
            "an earlier write to this object failed", where=self._where, hint="abort and start over"
        )
