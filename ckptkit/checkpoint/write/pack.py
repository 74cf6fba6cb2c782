"""One pack, from what it will hold to the bytes in a store: laid out before there are bytes, then
filled and written in segments by any threads, then finished.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.places import data_prefix
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.errors import LayoutError
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import (
    Alias,
    ArrayInfo,
    array_document,
    chunk_key,
    group_document,
    key_of,
)
from ckptkit.format.manifest import pack_name
from ckptkit.format.names import ancestors
from ckptkit.format.objects import ObjectInfo
from ckptkit.format.pack import (
    Entry,
    data_offset,
    directory,
    directory_length,
    local_header,
    record_name,
)
from ckptkit.format.record import Record, SaveInfo
from ckptkit.model import Box, Grid, Layout, Part
from ckptkit.plan.read import batches
from ckptkit.plan.write import Owned, chunks_to_write, writes_document
from ckptkit.storage import AlignedBuffer, BufferPool, Sink, Store
from ckptkit.storage.base.buffers import copy_elements

I64 = npt.NDArray[np.int64]

_STAGED_SEGMENT = 8 << 20
# Places of chunks: as many as a few layers have.
_KEPT = 4096


class PackedArray(NamedTuple):
    """One array, and the chunks of it that a pack has."""

    info: ArrayInfo
    chunks: I64


class Slot(NamedTuple):
    """Memory that a chunk is to be put into, as it is stored; `array` is its place among those of
    the pack.
    """

    entry: int
    array: int
    chunk: int
    memory: memoryview


Fill: TypeAlias = Callable[[Sequence[Slot]], Iterable[Slot]]
"""Puts chunks into their slots, and gives each slot back as soon as it is full; any thread calls
it."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The entries [first, last) and the bytes of the pack they take, headers included.

    Entries are never cut, so that a header's CRC is known when it is written. Segment n is part n
    of the store's sink, whose last part is the record and the directory.
    """

    first: int
    last: int
    start: int
    stop: int


class PackPlan:
    """Where each byte of a pack will be. Documents come first, then the chunks array by array, then
    the record of them.

    What one save of a job has found out here, the next one uses again where it holds the same.
    """

    def __init__(
        self,
        table: ArrayTable,
        documents: Sequence[tuple[str, bytes]],
        arrays: Sequence[PackedArray],
        made_for: object = None,
    ) -> None:
        """`made_for` is all that it follows from, where it may be used again."""
        self.table = table
        self.documents = documents
        self.arrays = arrays
        self.made_for = made_for
        counts = [len(array.chunks) for array in arrays]
        nothing = np.zeros(0, dtype=np.int64)
        self.array = np.repeat(np.arange(len(arrays), dtype=np.uint32), counts)
        self.chunk: I64 = np.concatenate([nothing, *(array.chunks for array in arrays)])
        # Kept, because each name is needed three times: here, in its header and in the directory.
        self.names = [name for name, _ in documents]
        lengths = [len(data) for _, data in documents]
        for info, chunks in arrays:
            grid, elements = info.grid, info.grid.chunk_elements
            for chunk in chunks.tolist():
                index = grid.index(chunk)
                self.names.append(chunk_key(info.name, index))
                if not grid.is_regular:
                    elements = math.prod(grid.stored_shape(index))
                lengths.append(elements * info.dtype.itemsize)
        offsets = []
        self.end = 0
        for name, length in zip(self.names, lengths, strict=True):
            offsets.append(data_offset(name, length, self.end))
            self.end = offsets[-1] + length
        self.offsets: I64 = np.array(offsets, dtype=np.int64)
        self.lengths: I64 = np.array(lengths, dtype=np.int64)
        self.ends = self.offsets + self.lengths
        # Known before they are written, because the length of the record depends on them.
        self.crcs: npt.NDArray[np.uint32] = np.zeros(len(lengths), dtype=np.uint32)
        self.crcs[: len(documents)] = [isal_zlib.crc32(data) for _, data in documents]
        # Arrays are sorted by name in the record, and in the order they were added in the pack.
        place = {array.name: index for index, array in enumerate(table.arrays)}
        in_table = np.array([place[array.info.name] for array in arrays], dtype=np.uint32)
        self.array_in_table = in_table[self.array]


class Pack:
    """What one writer writes of a step: perhaps staged, then begun, and written segment by segment,
    as its plan says.
    """

    def __init__(
        self, rank: int, plan: PackPlan, objects: Iterable[ObjectInfo], fill: Fill
    ) -> None:
        self.plan = plan
        self.segments: Sequence[Segment] = ()
        self.is_finished = False
        self.size = 0
        """The bytes of the whole pack, once it is begun."""
        self._rank = rank
        self._objects = tuple(objects)
        self._fill = fill
        self._staged: AlignedBuffer | None = None
        self._crcs = plan.crcs.copy()

    def stage(self, pool: BufferPool, threads: int) -> None:
        """Copy all data into memory of the pool, so that what it came from may change. Checksums
        and headers are left to `write_segment`, when nobody waits for them.
        """
        self._staged = staged = pool.take(self.plan.end)

        def copy(segment: Segment) -> None:
            for _ in self._fill(self._slots(segment, staged.view[segment.start : segment.stop])):
                pass

        share_out(self.segments_of(_STAGED_SEGMENT), copy, threads)

    def begin(
        self,
        store: Store,
        prefix: str,
        save: SaveInfo,
        segments: Sequence[Segment],
        *,
        refers: bool,
        memory: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Begin to write these segments, which any threads write then.

        `memory` is how much the store's sink may have. With `refers` the record refers to rank 0's
        for the arrays, which are the same.
        """
        self.segments = segments
        self._save = save
        self._store = store
        self._key = f"{data_prefix(prefix, save.save_id)}/{pack_name(self._rank)}"
        self._progress = progress
        self._left = len(segments)
        self._writing = threading.Lock()
        # Of no arrays the tables are the same for any strategies: these have to be compared then.
        self._refers = refers and len(self.plan.table.arrays) > 0
        name, record, plan = record_name(self._rank), len(self._record()), self.plan
        offset = data_offset(name, record, plan.end)
        # The last header is where the data ends, and the directory begins where the record ends.
        names = sum(map(len, plan.names)) + len(name)
        lengths = [*plan.lengths.tolist(), record]
        closing = directory_length(names, lengths, [0, *plan.ends.tolist()], offset + record)
        extents = [segment.stop - segment.start for segment in segments]
        extents.append(offset + record + closing - plan.end)
        self.size = sum(extents)
        self._sink: Sink = store.create(self._key, extents, memory=memory)
        if not segments:
            # Nobody will write a last one, who would finish the pack.
            try:
                self._finish()
            except BaseException:
                self.abort()
                raise

    def write_segment(self, number: int) -> None:
        """Fill and write one segment, from any thread. Who writes the last one finishes the pack:
        on return that is complete and durable.
        """
        segment = self.segments[number]
        if self._staged is not None:
            memory = self._staged.view[segment.start : segment.stop]
            self._note_checksums(self._slots(segment, memory))
            self._put_headers(segment, memory)
            self._sink.write(number, memory)
        else:
            with self._sink.filling(number) as memory:
                self._note_checksums(self._fill(self._slots(segment, memory)))
                self._put_headers(segment, memory)
        with self._writing:
            self._left -= 1
            is_last = not self._left
        if is_last:
            # While it is made durable other threads go on, perhaps with the next pack.
            self._finish()
        if self._progress:
            self._progress(segment.stop - segment.start)

    def _finish(self) -> None:
        """Write the record and the directory, and make the pack durable."""
        name, record = record_name(self._rank), self._record()
        offset = data_offset(name, len(record), self.plan.end)
        entry = Entry(name, offset, len(record), int(isal_zlib.crc32(record)))
        # An object for each of millions of chunks would fill the memory.
        entries = self._entries(0, len(self.plan.names))
        tail = local_header(entry, self.plan.end) + record + directory(chain(entries, [entry]))
        self._sink.write(len(self.segments), memoryview(tail))
        self._sink.finish()
        self.is_finished = True

    def abort(self) -> None:
        """Leave nothing behind in the store."""
        self._sink.abort()
        if self.is_finished:
            # Ctrl-C came when a thread was at the very end of it.
            self._store.delete([self._key])

    def release(self) -> None:
        """Free the staged copy."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.give_back()

    def segments_of(self, size: int) -> list[Segment]:
        """Segments of about so many bytes."""
        sizes = np.diff(self.plan.ends, prepend=0)
        return self.segments_at([last for _, last in batches(sizes, size)])

    def segments_at(self, lasts: Sequence[int]) -> list[Segment]:
        """Segments that end before these entries."""
        ends = self.plan.ends.tolist()
        segments: list[Segment] = []
        first = start = 0
        for last in lasts:
            segments.append(Segment(first, last, start, ends[last - 1]))
            first, start = last, ends[last - 1]
        return segments

    def _slots(self, segment: Segment, memory: memoryview) -> list[Slot]:
        """Put the documents of a segment into its memory; the places of its chunks there."""
        plan, span = self.plan, slice(segment.first, segment.last)
        offsets, lengths = plan.offsets[span].tolist(), plan.lengths[span].tolist()
        slots: list[Slot] = []
        for entry, (offset, length) in enumerate(zip(offsets, lengths, strict=True), segment.first):
            begin = offset - segment.start
            data = memory[begin : begin + length]
            row = entry - len(plan.documents)
            if row < 0:
                data[:] = plan.documents[entry][1]
            else:
                slots.append(Slot(entry, int(plan.array[row]), int(plan.chunk[row]), data))
        return slots

    def _note_checksums(self, slots: Iterable[Slot]) -> None:
        """Of each slot as soon as it is full, while its bytes are in the processor's cache."""
        for slot in slots:
            self._crcs[slot.entry] = isal_zlib.crc32(slot.memory)

    def _put_headers(self, segment: Segment, memory: memoryview) -> None:
        header = segment.start
        for entry in self._entries(segment.first, segment.last):
            at = header - segment.start
            memory[at : entry.offset - segment.start] = local_header(entry, header)
            header = entry.offset + entry.length

    def _entries(self, first: int, last: int) -> Iterator[Entry]:
        """Some entries; the CRC of each is right once it has been filled."""
        plan, span = self.plan, slice(first, last)
        columns = (column[span].tolist() for column in (plan.offsets, plan.lengths, self._crcs))
        return map(Entry, plan.names[span], *columns)

    def _record(self) -> bytes:
        """What the pack says of itself; its length is the same before there are checksums."""
        plan = self.plan
        count = len(plan.documents)
        return Record(
            save=self._save,
            rank=self._rank,
            table=plan.table,
            documents=tuple(self._entries(0, count)),
            array=plan.array_in_table,
            chunk=plan.chunk.astype(np.uint64),
            offset=plan.offsets[count:].astype(np.uint64),
            length=plan.lengths[count:].astype(np.uint64),
            crc32=self._crcs[count:],
            objects=self._objects,
            refers=self._refers,
        ).to_bytes()


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """One array as its rank added it; `data` is the part, None where there is none."""

    info: ArrayInfo
    layout: Layout
    part: Part
    data: npt.NDArray[Any] | None


def pack_of(
    rank: int,
    arrays: Mapping[str, Holding],
    aliases: Iterable[Alias] = (),
    objects: Iterable[ObjectInfo] = (),
    like: PackPlan | None = None,
) -> Pack:
    """The pack of a saving rank, which takes its share of the chunks out of what it holds. Where
    another pack was made for the same, its plan holds here too.
    """
    order, aliases = list(arrays.values()), tuple(aliases)
    # What a plan is made of: `Holding.layout` follows from the strategy and what the infos say.
    made_for = rank, order[0].layout.strategy if order else None, [h.info for h in order], aliases
    plan = like
    if plan is None or plan.made_for != made_for:
        # Shared out in the order of names, the same on all ranks however they were added.
        named = [arrays[name] for name in sorted(arrays)]
        known = [Owned(h.info.name, h.layout, h.info.grid, h.info.dtype.itemsize) for h in named]
        writes = dict(zip(sorted(arrays), chunks_to_write(known, rank), strict=True))
        plan = PackPlan(
            ArrayTable.of([holding.info for holding in named], aliases),
            documents_of([(each, arrays[each.name].info) for each in known], writes, rank),
            [PackedArray(holding.info, writes[holding.info.name]) for holding in order],
            made_for,
        )

    def fill(slots: Sequence[Slot]) -> Iterator[Slot]:
        # One by one, so that each is still in the processor's cache when it is given back.
        for slot in slots:
            holding = order[slot.array]
            box, stored = chunk_view(holding.info, slot.chunk, slot.memory)
            at = _place_in(holding.part, box)
            if at is None or holding.data is None:
                raise LayoutError(
                    "this rank does not hold the chunk", where=holding.info.name, value=box
                )
            copy_elements(holding.data[at], stored)
            yield slot

    return Pack(rank, plan, objects, fill)


def documents_of(
    known: Sequence[tuple[Owned, ArrayInfo]], writes: Mapping[str, I64], rank: int
) -> list[tuple[str, bytes]]:
    """The Zarr documents in the pack of a rank that writes these chunks."""
    documents: dict[str, bytes] = {}
    if rank == 0:
        names = {group for held, _ in known for group in ancestors(held.name)} | {""}
        documents = {key_of(name): group_document() for name in sorted(names)}
    for held, info in known:
        if writes_document(held, writes[held.name], rank):
            documents[key_of(held.name)] = array_document(info)
    return list(documents.items())


def groups_pack(groups: Iterable[str]) -> bytes:
    """The pack of group documents alone, which has no record."""
    data, entries, document = bytearray(), list[Entry](), group_document()
    for name in map(key_of, groups):
        offset = data_offset(name, len(document), len(data))
        entry = Entry(name, offset, len(document), int(isal_zlib.crc32(document)))
        data += local_header(entry, len(data)) + document
        entries.append(entry)
    return bytes(data) + directory(entries)


def chunk_view(info: ArrayInfo, chunk: int, memory: memoryview) -> tuple[Box, npt.NDArray[Any]]:
    """The box of a chunk, and its place in the memory that the chunk is stored as; what the box
    leaves of that is zero.
    """
    box, stored_shape = _box_of(info.grid, chunk)
    stored = np.frombuffer(memory, dtype=info.dtype.bits).reshape(stored_shape)
    if box.shape != stored_shape:
        stored.fill(0)
        stored = stored[tuple(slice(0, extent) for extent in box.shape)]
    return box, stored


# Cached, because layers are alike: what one has found out holds for all.
@lru_cache(_KEPT)
def _box_of(grid: Grid, chunk: int) -> tuple[Box, tuple[int, ...]]:
    index = grid.index(chunk)
    return grid.box(index), grid.stored_shape(index)


@lru_cache(_KEPT)
def _place_in(part: Part, box: Box) -> tuple[Any, ...] | None:
    """The index of a box in the memory of a part, a view also where there are no dims; None where
    the part does not hold it.
    """
    for held, place in zip(part.boxes, part.places, strict=True):
        if held.contains(box):
            inner = zip(box.within(held), place.offset, strict=True)
            return (*(slice(s.start + first, s.stop + first) for s, first in inner), ...)
    return None
