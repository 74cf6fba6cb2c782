"""A pack's image: laid out before there are bytes, then filled and written in segments by a few
threads (DESIGN section 6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.threads import DEFAULT_THREADS, Progress, run_threads
from ckptkit.format.pack import (
    Entry,
    data_offset,
    directory,
    directory_length,
    local_header,
)
from ckptkit.storage import AlignedBuffer, BufferPool, Sink, Store, default_pool

I64 = npt.NDArray[np.int64]

_STAGED_SEGMENT = 8 << 20


class Content(Protocol):
    """What a pack will hold, entry by entry; `fill` may be called from any thread."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The entry's name."""

    def length(self, index: int) -> int:
        """The entry's number of bytes."""

    def fill(self, index: int, target: memoryview) -> None:
        """Write the entry's bytes into `target`, which has its length."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The entries [first, last) and the bytes of the pack they take, headers included."""

    first: int
    last: int
    start: int
    stop: int


class PackImage:
    """The offsets of all entries of one pack, and the CRCs once they are filled."""

    def __init__(self, content: Content) -> None:
        self._content = content
        count = len(content)
        # Kept, because each is needed three times: here, in its header and in the directory.
        self._names = [content.name(index) for index in range(count)]
        lengths = [content.length(index) for index in range(count)]
        offsets = []
        position = 0
        for name, length in zip(self._names, lengths, strict=True):
            offsets.append(data_offset(name, length, position))
            position = offsets[-1] + length
        self.offsets: I64 = np.array(offsets, dtype=np.int64)
        self.lengths: I64 = np.array(lengths, dtype=np.int64)
        self.crcs: npt.NDArray[np.uint32] = np.zeros(count, dtype=np.uint32)
        self.end = position

    def entry(self, index: int) -> Entry:
        """One entry; its CRC is right once it has been filled."""
        return Entry(
            self._names[index],
            int(self.offsets[index]),
            int(self.lengths[index]),
            int(self.crcs[index]),
        )

    def segments(self, size: int) -> list[Segment]:
        """Runs of whole entries of about `size` bytes, so that a header's CRC is known when it
        is written.
        """
        ends = self.offsets + self.lengths
        segments: list[Segment] = []
        first = start = 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, start + size, side="right")))
            stop = int(ends[last - 1])
            segments.append(Segment(first, last, start, stop))
            first, start = last, stop
        return segments

    def fill(self, segment: Segment, target: memoryview) -> None:
        """Write headers and data of a segment into `target`, and note the CRCs."""
        for index, data in self._data(segment, target):
            self._content.fill(index, data)
            # At once, while the bytes are in the processor's cache.
            self.crcs[index] = isal_zlib.crc32(data)
        self._head(segment, target)

    def copy(self, segment: Segment, target: memoryview) -> None:
        """Write the data of a segment only; `close` does the rest, when nobody waits for it."""
        for index, data in self._data(segment, target):
            self._content.fill(index, data)

    def close(self, segment: Segment, target: memoryview) -> None:
        """Note the CRCs of data that was copied, and write the headers."""
        for index, data in self._data(segment, target):
            self.crcs[index] = isal_zlib.crc32(data)
        self._head(segment, target)

    def _data(self, segment: Segment, target: memoryview) -> Iterator[tuple[int, memoryview]]:
        for index in range(segment.first, segment.last):
            begin = int(self.offsets[index]) - segment.start
            yield index, target[begin : begin + int(self.lengths[index])]

    def _head(self, segment: Segment, target: memoryview) -> None:
        header = segment.start
        for index in range(segment.first, segment.last):
            offset, length = int(self.offsets[index]), int(self.lengths[index])
            target[header - segment.start : offset - segment.start] = local_header(
                self.entry(index), header
            )
            header = offset + length

    def tail_length(self, record_name: str, record_length: int) -> int:
        """The length of `tail` for a record of this length, before there are any bytes."""
        offset = data_offset(record_name, record_length, self.end)
        ends = (self.offsets + self.lengths).tolist()
        names = sum(map(len, self._names)) + len(record_name)
        lengths = [*self.lengths.tolist(), record_length]
        # The last header is at the image's end, and the directory begins where the record ends.
        closing = directory_length(names, lengths, [0, *ends], offset + record_length)
        return offset - self.end + record_length + closing

    def tail(self, record_name: str, record: bytes) -> tuple[bytes, Entry]:
        """The bytes after the last entry: the record's entry, the directory and the end; and
        that entry.
        """
        offset = data_offset(record_name, len(record), self.end)
        entry = Entry(record_name, offset, len(record), int(isal_zlib.crc32(record)))
        closing = directory(self._entries(entry))
        return local_header(entry, self.end) + record + closing, entry

    def _entries(self, last: Entry) -> Iterator[Entry]:
        yield from map(self.entry, range(len(self._content)))
        yield last


def stage_image(
    image: PackImage, pool: BufferPool, *, threads: int = DEFAULT_THREADS
) -> AlignedBuffer:
    """The data of the whole pack in one piece of memory, which `write_image` can write from."""
    staged = pool.take(image.end)
    pending = iter(image.segments(_STAGED_SEGMENT))
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                segment = next(pending, None)
            if segment is None:
                return
            image.copy(segment, staged.view[segment.start : segment.stop])

    run_threads(work, threads, stopped)
    return staged


def write_image(
    store: Store,
    key: str,
    image: PackImage,
    tail_length: int,
    make_tail: Callable[[], bytes],
    *,
    staged: AlignedBuffer | None = None,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> int:
    """Fill and write a whole pack; returns its size. Nothing is left behind when it fails.

    `make_tail` is called when all entries are filled, for what comes after them.
    """
    segments = image.segments(store.abilities.part_size)
    extents = [segment.stop - segment.start for segment in segments] + [tail_length]
    sink = store.create(key, extents)
    try:
        if staged is None:
            produce = partial(_filled, image, max(extents))
        else:
            produce = partial(_cut, image, staged)
        _write_segments(sink, segments, produce, threads, progress)
        sink.write(len(segments), memoryview(make_tail()))
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return sum(extents)


@contextmanager
def _filled(image: PackImage, largest: int, segment: Segment) -> Iterator[memoryview]:
    """A segment's bytes, put together in memory that the next one uses again."""
    size = segment.stop - segment.start
    loan = default_pool().take(largest, congruent_to=segment.start)
    # The slice is released before the loan ends: memory still looked at is not used again.
    with loan as memory, memory[:size] as data:
        image.fill(segment, data)
        yield data


@contextmanager
def _cut(image: PackImage, staged: AlignedBuffer, segment: Segment) -> Iterator[memoryview]:
    """A segment's bytes out of the image that was staged."""
    data = staged.view[segment.start : segment.stop]
    image.close(segment, data)
    yield data


def _write_segments(
    sink: Sink,
    segments: Sequence[Segment],
    produce: Callable[[Segment], AbstractContextManager[memoryview]],
    threads: int,
    progress: Progress | None,
) -> None:
    pending = iter(enumerate(segments))
    lock = threading.Lock()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                number, segment = next(pending, (-1, None))
            if segment is None:
                return
            with produce(segment) as data:
                sink.write(number, data)
            if progress:
                progress(segment.stop - segment.start)

    run_threads(work, min(threads, len(segments)), stopped)
