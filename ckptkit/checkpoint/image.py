"""A pack's image: laid out before there are bytes, then filled and written in segments by a few
threads (DESIGN section 6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.threads import DEFAULT_THREADS, Progress, share_out
from ckptkit.format.pack import (
    Entry,
    data_offset,
    directory,
    directory_length,
    local_header,
)
from ckptkit.storage import AlignedBuffer, BufferPool, Store

I64 = npt.NDArray[np.int64]

_STAGED_SEGMENT = 8 << 20


class Content(Protocol):
    """What a pack will hold, entry by entry; `filled` may be called from any thread."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The entry's name."""

    def length(self, index: int) -> int:
        """The entry's number of bytes."""

    def filled(self, targets: Mapping[int, memoryview]) -> Iterator[int]:
        """Write entries' bytes into memory of their lengths; yields each that is done."""


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
        lasts: list[int] = []
        first = start = 0
        while first < len(ends):
            first = max(first + 1, int(np.searchsorted(ends, start + size, side="right")))
            start = int(ends[first - 1])
            lasts.append(first)
        return self.segments_at(lasts)

    def segments_at(self, lasts: Sequence[int]) -> list[Segment]:
        """Runs of entries that end where the caller wants."""
        ends = (self.offsets + self.lengths).tolist()
        segments: list[Segment] = []
        first = start = 0
        for last in lasts:
            segments.append(Segment(first, last, start, ends[last - 1]))
            first, start = last, ends[last - 1]
        return segments

    def fill(self, segment: Segment, target: memoryview) -> None:
        """Write headers and data of a segment into `target`, and note the CRCs."""
        data = dict(self._data(segment, target))
        for index in self._content.filled(data):
            # At once, while the bytes are in the processor's cache.
            self.crcs[index] = isal_zlib.crc32(data[index])
        self._head(segment, target)

    def copy(self, segment: Segment, target: memoryview) -> None:
        """Write the data of a segment only; `close` does the rest, when nobody waits for it."""
        for _ in self._content.filled(dict(self._data(segment, target))):
            pass

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

    def copy(segment: Segment) -> None:
        image.copy(segment, staged.view[segment.start : segment.stop])

    share_out(image.segments(_STAGED_SEGMENT), copy, threads)
    return staged


class ImageWriting:
    """A pack on its way into the store: any thread writes any segment, then one finishes it.

    `make_tail` is called when all entries are filled, for what comes after them.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        image: PackImage,
        segments: Sequence[Segment],
        tail: tuple[int, Callable[[], bytes]],
        staged: AlignedBuffer | None = None,
        memory: int | None = None,
    ) -> None:
        tail_length, self._make_tail = tail
        self.segments = segments
        extents = [segment.stop - segment.start for segment in segments] + [tail_length]
        self.nbytes = sum(extents)
        self._image = image
        self._staged = staged
        self._sink = store.create(key, extents, memory=memory)

    def write(self, number: int) -> int:
        """Fill and write one segment; returns its size."""
        segment = self.segments[number]
        size = segment.stop - segment.start
        if self._staged is not None:
            data = self._staged.view[segment.start : segment.stop]
            self._image.close(segment, data)
            self._sink.write(number, data)
        else:
            with self._sink.filling(number) as data:
                self._image.fill(segment, data)
        return size

    def finish(self) -> None:
        """Write the tail and make the pack durable."""
        self._sink.write(len(self.segments), memoryview(self._make_tail()))
        self._sink.finish()

    def abort(self) -> None:
        """Leave nothing behind."""
        self._sink.abort()


def write_image(
    writing: ImageWriting,
    *,
    threads: int = DEFAULT_THREADS,
    progress: Progress | None = None,
) -> None:
    """Write a whole pack by a few threads; nothing is left behind when it fails."""

    def write(number: int) -> None:
        size = writing.write(number)
        if progress:
            progress(size)

    count = len(writing.segments)
    try:
        share_out(range(count), write, min(threads, count))
        writing.finish()
    except BaseException:
        writing.abort()
        raise
