"""One pack, from what it will hold to the bytes in a store: laid out before there are bytes, then
filled and written in segments by any threads, then finished.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any, NamedTuple, TypeAlias

import msgpack
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.places import StepFolder
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.checkpoint.write.plan import (
    PackedArray,
    PackPlan,
    chunk_view,
    documents_of,
    place_in,
)
from ckptkit.errors import LayoutError
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import (
    Alias,
    ArrayInfo,
)
from ckptkit.format.manifest import SaveInfo, pack_name, record_bytes
from ckptkit.format.objects import ObjectInfo, objects_to_docs
from ckptkit.format.pack import (
    Entry,
    data_offset,
    directory_length,
    local_header,
    put_checksums,
    record_name,
)
from ckptkit.model import Assigned, Layout, Part, Strategy
from ckptkit.plan.chunks import Owned, chunks_to_write
from ckptkit.plan.read import batches
from ckptkit.storage import AlignedBuffer, BufferPool, Sink
from ckptkit.storage.base.buffers import copy_bytes, copy_elements

_STAGED_SEGMENT = 8 << 20
# To copy fewer bytes takes no longer than letting other threads go on meanwhile.
_SMALL = 32 << 10


class Slot(NamedTuple):
    """Memory that a chunk is to be put into, as it is stored; `array` is its place among those of
    the pack.
    """

    entry: int
    array: int
    chunk: int
    memory: memoryview


Fill: TypeAlias = Callable[[Iterable[Slot]], Iterable[Slot]]
"""Puts chunks into their slots, and gives each slot back once it is full: at once where it can, for
its bytes are still in the processor's cache then. Any thread calls it."""


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


class Pack:
    """What one writer writes of a step, in three phases: perhaps `stage`, then `begin`, which opens
    the file, and `write_segment` for each segment, from any thread; the last one finishes it.
    """

    def __init__(
        self,
        rank: int,
        plan: PackPlan,
        objects: Iterable[ObjectInfo],
        fill: Fill,
        data: list[npt.NDArray[Any] | None] | None = None,
    ) -> None:
        """`data` is where `fill` has the arrays from, if it may be staged."""
        self.plan = plan
        self.segments: Sequence[Segment] = ()
        self.is_finished = False
        self.size = 0
        """The bytes of the whole pack, once it is begun."""
        self._rank = rank
        self._packed_objects = msgpack.packb(objects_to_docs(tuple(objects)))
        self._fill = fill
        self._data = [] if data is None else data
        self._staged: AlignedBuffer | None = None
        self._whole: set[int] = set()
        self._crcs = plan.crcs.copy()

    def stage(self, pool: BufferPool, threads: int) -> None:
        """Copy all data into memory of the pool, so that what it came from may change.

        - A chunk is copied to where it will be in the pack.
        - An array that is `scattered` is copied whole, to where its chunks will be: gathering its
          rows takes twice as long. `write_segment` does that, when nobody waits for it.

        Checksums and headers are left to `write_segment` too.
        """
        self._staged = staged = pool.take(self.plan.end)
        copies: list[partial[None]] = []
        kept: list[npt.NDArray[Any] | None] = [None] * len(self._data)
        for number, start in self.plan.scattered.items():
            held = self._data[number]
            if held is None or not held.flags.c_contiguous:
                continue
            self._whole.add(number)
            source, memory = held.data.cast("B"), staged.view[start : start + held.nbytes]
            kept[number] = np.frombuffer(memory, held.dtype).reshape(held.shape)
            for begin in range(0, held.nbytes, _STAGED_SEGMENT):
                piece = slice(begin, begin + _STAGED_SEGMENT)
                copies.append(partial(copy_bytes, source[piece], memory[piece]))

        def copy_chunks(segment: Segment) -> None:
            memory = staged.view[segment.start : segment.stop]
            self._put_documents(segment, memory)
            slots = self._slots(segment, memory)
            for _ in self._fill(slot for slot in slots if slot.array not in self._whole):
                pass

        chunks = [partial(copy_chunks, each) for each in self.segments_of(_STAGED_SEGMENT)]
        share_out([*chunks, *copies], call, threads)
        # `fill` reads only the copy from here on.
        self._data[:] = kept

    def begin(
        self,
        folder: StepFolder,
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
        self._store = folder.store
        self._key = folder.pack(save.save_id, pack_name(self._rank))
        self._progress = progress
        self._left = len(segments)
        self._writing = threading.Lock()
        # An empty table says nothing of the strategy, so each record has its own.
        self._refers = refers and len(self.plan.table.names) > 0
        name, record, plan = record_name(self._rank), len(self._record()), self.plan
        offset = data_offset(name, record, plan.end)
        # The last header is where the data ends, and the directory begins where the record ends.
        lengths, headers = np.append(plan.lengths, record), np.append(0, plan.ends)
        closing = directory_length(plan.name_bytes + len(name), lengths, headers, offset + record)
        extents = [segment.stop - segment.start for segment in segments]
        extents.append(offset + record + closing - plan.end)
        self.size = sum(extents)
        self._sink: Sink = self._store.create(self._key, extents, memory=memory)
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
        segment, staged = self.segments[number], self._staged
        first, last = (
            max(row - len(self.plan.documents), 0) for row in (segment.first, segment.last)
        )
        # Chunks of arrays that were copied whole are not where they will be in the pack.
        if staged is not None and self._whole.isdisjoint(self.plan.array[first:last].tolist()):
            memory = staged.view[segment.start : segment.stop]
            self._note_checksums(self._slots(segment, memory))
            self._put_headers(segment, memory)
            self._sink.write(number, memory)
        else:
            fill = self._fill if staged is None else partial(self._fill_from, staged)
            with self._sink.filling(number) as memory:
                self._put_documents(segment, memory)
                self._note_checksums(fill(self._slots(segment, memory)))
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
        tail = local_header(entry, self.plan.end) + record
        tail += self.plan.directory(self._crcs, entry)
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
        self._data[:] = [None] * len(self._data)  # memory still looked at is not used again
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

    def _put_documents(self, segment: Segment, memory: memoryview) -> None:
        plan, span = self.plan, slice(segment.first, segment.last)
        documents = plan.documents[span]
        begins = (plan.offsets[span][: len(documents)] - segment.start).tolist()
        for begin, (_, data) in zip(begins, documents, strict=True):
            memory[begin : begin + len(data)] = data

    def _slots(self, segment: Segment, memory: memoryview) -> Iterator[Slot]:
        """The places of a segment's chunks in its memory, one after another: where thousands are
        there at once Python looks for garbage among all objects of the job.
        """
        plan, rows = self.plan, len(self.plan.documents)
        first = max(segment.first, rows)
        last = max(first, segment.last)
        entries, chunks = slice(first, last), slice(first - rows, last - rows)
        return (
            Slot(entry, number, chunk, memory[begin:end])
            for entry, number, chunk, begin, end in zip(
                range(first, last),
                plan.array[chunks].tolist(),
                plan.chunk[chunks].tolist(),
                (plan.offsets[entries] - segment.start).tolist(),
                (plan.ends[entries] - segment.start).tolist(),
                strict=True,
            )
        )

    def _fill_from(self, staged: AlignedBuffer, slots: Iterable[Slot]) -> Iterator[Slot]:
        for slot in slots:
            if slot.array in self._whole:
                yield from self._fill([slot])
            else:
                start = int(self.plan.offsets[slot.entry])
                copy_bytes(staged.view[start : start + len(slot.memory)], slot.memory)
                yield slot

    def _note_checksums(self, slots: Iterable[Slot]) -> None:
        """Of each slot as soon as it is full, while its bytes are in the processor's cache."""
        for slot in slots:
            self._crcs[slot.entry] = isal_zlib.crc32(slot.memory)

    def _put_headers(self, segment: Segment, memory: memoryview) -> None:
        first, last = segment.first, segment.last
        starts = np.append(segment.start, self.plan.ends[first : last - 1]) - segment.start
        headers = self.plan.headers(first, last)
        for at, header in zip(starts.tolist(), headers, strict=True):
            memory[at : at + len(header)] = header
        put_checksums(memory, starts, self._crcs[first:last])

    def _record(self) -> bytes:
        """What the pack says of itself; its length is the same before there are checksums."""
        plan = self.plan
        count = len(plan.documents)
        return record_bytes(
            self._save,
            self._rank,
            plan.table,
            plan.packed_documents,
            {
                "array": plan.array_in_table,
                "chunk": plan.chunk.astype(np.uint64),
                "offset": plan.offsets[count:].astype(np.uint64),
                "length": plan.lengths[count:].astype(np.uint64),
                "crc32": self._crcs[count:],
            },
            self._packed_objects,
            refers=self._refers,
        )


class Holding(NamedTuple):
    """One array as its rank added it; `data` is the part, None where there is none."""

    info: ArrayInfo
    layout: Layout | Assigned
    part: Part
    data: npt.NDArray[Any] | None


def plan_of(
    rank: int,
    strategy: Strategy,
    arrays: Mapping[str, Holding],
    aliases: Iterable[Alias] = (),
    like: PackPlan | None = None,
) -> PackPlan:
    """The plan of a saving rank's pack, which takes its share of the chunks out of what it holds.
    Where another pack was made for the same, its plan holds here too.
    """
    order, aliases = list(arrays.values()), tuple(aliases)
    # What a plan is made of: `Holding.layout` follows from the strategy and what the infos say.
    made_for = rank, strategy, [holding.info for holding in order], aliases
    if like is not None and like.made_for == made_for:
        return like
    # Shared out in the order of names, the same on all ranks however they were added.
    names = sorted(arrays)
    infos = [arrays[name].info for name in names]
    owned = [Owned(i.name, arrays[i.name].layout, i.grid, i.dtype.itemsize) for i in infos]
    writes = chunks_to_write(owned, rank)
    chunks = dict(zip(names, writes, strict=True))
    return PackPlan(
        ArrayTable.of(infos, aliases),
        documents_of(list(zip(owned, infos, strict=True)), writes, rank),
        [PackedArray(holding.info, chunks[name]) for name, holding in arrays.items()],
        [holding.part for holding in order],
        made_for,
    )


def pack_of(
    rank: int,
    plan: PackPlan,
    holds: Sequence[npt.NDArray[Any] | None],
    objects: Iterable[ObjectInfo] = (),
) -> Pack:
    """The pack of a saving rank that holds this of each array of the plan."""
    begins, first, data = plan.begins, len(plan.documents), list(holds)

    def fill(slots: Iterable[Slot]) -> Iterator[Slot]:
        # One by one, so that each is still in the processor's cache when it is given back.
        for slot in slots:
            entry, number, chunk, memory = slot
            held, begin = data[number], begins[entry - first]
            is_run = begin >= 0 and number not in plan.scattered
            if is_run and held is not None and held.flags.c_contiguous:
                source = held.data.cast("B")[begin : begin + len(memory)]
                if len(memory) > _SMALL:
                    copy_bytes(source, memory)
                else:
                    memory[:] = source
            else:
                info = plan.arrays[number].info
                box, stored = chunk_view(info, chunk, memory)
                at = place_in(plan.parts[number], box)
                if at is None or held is None:
                    raise LayoutError(
                        "this rank does not hold the chunk", where=info.name, value=box
                    )
                copy_elements(held[at], stored)
            yield slot

    return Pack(rank, plan, objects, fill, data)
