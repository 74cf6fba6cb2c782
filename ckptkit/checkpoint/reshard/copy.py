"""Copying packs: each chunk of the target is filled straight from the source's, some neighbours at
a time, within a budget of memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import call
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import step_name
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.reader import BAND_BYTES, Wanted, plan_read
from ckptkit.checkpoint.read.stream import check_chunk
from ckptkit.checkpoint.reshard.selection import objects_of
from ckptkit.checkpoint.reshard.small_chunks import SmallChunks
from ckptkit.checkpoint.reshard.target import ReshardTarget, TargetArray
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Pace, Progress, share_out
from ckptkit.checkpoint.write.pack import Pack, Slot
from ckptkit.checkpoint.write.plan import PackedArray, PackPlan, chunk_view, documents_of
from ckptkit.errors import AlreadyExistsError, CkptkitError, PeerError, UsageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box, DType
from ckptkit.plan.read import Piece, Pieces, batches, pieces_within
from ckptkit.storage import Store
from ckptkit.storage.base.buffers import copy_elements
from ckptkit.storage.base.sink import piece_size

# Two: threads that write one file through the page cache wait for each other. With many at once few
# would be complete when a run is cut off.
PACKS_AT_ONCE = 2
# As the parts of local files are when a job writes them: larger ones are no faster to write, and
# leave less for other threads to take over.
_USUAL = 8 << 20

_MIB = 1 << 20
_LARGEST_BATCH, _SMALLEST_BATCH = 64 * _MIB, 4 * _MIB
_LARGEST_CHUNK = 16 * _MIB
# Threads, buffers of the storage, and what allocators keep.
_PER_WORKER = 6 * _MIB
_SPARE = 24 * _MIB
# What a worker in a process of its own has in memory before it does anything.
_PROCESS_BYTES = 96 * _MIB
# Of all memory, what may be on its way from a store that is asked over a network, and to one.
_ON_ITS_WAY = 4
# Of all memory, what may be kept of chunks that several packs need, where reading costs more.
_KEPT_CHUNKS = 16
# A sink that holds fewer parts waits for each.
_LEAST_PARTS = 2


def copy_packs(
    target: ReshardTarget,
    ranks: Iterable[int],
    source: Checkpoint,
    destination: Store,
    budget: Budget,
    progress: Progress | None = None,
) -> None:
    """Write the packs of some ranks, each segment by the thread that comes to it: who writes the
    last one of a pack finishes that.

    Where one fails, those packs that are not finished are removed, and those that are stay.
    """
    begun: list[Pack] = []

    def read(wanted: Sequence[Wanted]) -> None:
        plan_read(source.packs, wanted, budget.pace, verify=True).run()

    room = budget.shared_bytes
    shared = SharedChunks(source.manifest.arrays, read, room) if room else None
    # Chunks of a foreign checkpoint have no checksums, and may overlap.
    is_ours = source.manifest.is_checked and not budget.source.waits_for_answers
    copier = ChunkCopier(source, budget, shared, SmallChunks(source) if is_ours else None)

    def segments_of(rank: int) -> Iterator[Callable[[], None]]:
        pack = _begin_pack(target, rank, destination, copier, progress)
        # Those that are finished are let go of: each holds the names of all its chunks.
        begun[:] = [each for each in begun if not each.is_finished]
        begun.append(pack)
        for number in range(len(pack.segments)):
            yield partial(pack.write_segment, number)

    def segments() -> Iterator[Callable[[], None]]:
        """By turns from a few packs, which are begun as threads ask for work."""
        waiting = iter(ranks)
        turns: deque[Iterator[Callable[[], None]]] = deque()
        while True:
            turns.extend(map(segments_of, islice(waiting, budget.packs - len(turns))))
            if not turns:
                return
            turn = turns.popleft()
            segment = next(turn, None)
            if segment is not None:
                turns.append(turn)
                yield segment

    try:
        share_out(segments(), call, budget.workers)
    except BaseException:
        for pack in begun:
            if not pack.is_finished:
                with suppress(CkptkitError):
                    pack.abort()
        raise


def check_huge_chunks(arrays: Iterable[Chosen], source: Checkpoint, budget: Budget) -> None:
    """Compare the chunks that are too large to be read whole with their checksums, a little of each
    at a time: when they are copied they are only read, some bytes here and there.
    """
    starts, rows = source.manifest.starts, list[int]()
    for number, info in {n: info for array in arrays for n, info in array.origins}.items():
        if budget.is_huge(info):
            rows += range(*starts[number:][:2].tolist())
    share_out(rows, partial(check_chunk, source), budget.workers)


def _begin_pack(
    target: ReshardTarget,
    rank: int,
    destination: Store,
    copier: ChunkCopier,
    progress: Progress | None,
) -> Pack:
    """Begin the pack of a rank; every segment of it can be written by any thread."""
    writes = target.chunks_of(rank)
    known = [(owned, a.info) for owned, a in zip(target.owned, target.arrays, strict=True)]
    mine = [(a, chunks) for a, chunks in zip(target.arrays, writes, strict=True) if len(chunks)]
    origins = [array for array, _ in mine]
    pack = Pack(
        rank,
        PackPlan(
            target.table,
            documents_of(known, writes, rank),
            [PackedArray(array.info, chunks) for array, chunks in mine],
        ),
        objects_of(target.choice.objects, rank, target.world_size),
        partial(copier.fill, origins),
    )
    try:
        pack.begin(
            destination,
            step_name(target.save.step),
            target.save,
            pack.segments_at(_lasts(pack.plan, origins, copier.budget)),
            refers=rank > 0,
            memory=copier.budget.sink_bytes,
            progress=progress,
        )
    except AlreadyExistsError as error:
        raise at_work(error.where) from error
    return pack


def at_work(where: str) -> PeerError:
    """The error where another run writes the same packs."""
    return PeerError(
        "another reshard of the same step is writing here",
        where=where,
        hint="wait for it; the same command again goes on with what it leaves, should it fail",
    )


def _lasts(plan: PackPlan, origins: Sequence[TargetArray], budget: Budget) -> list[int]:
    """Where segments end: each array's chunks in batches as the plan has them, small ones together.

    The batches of chunks that go over as they are need not be large: no chunk of the source is
    needed by two.
    """
    end = len(plan.documents)
    lasts: list[int] = []
    usual = min(_USUAL, budget.batch_bytes)
    held = sum(len(data) for _, data in plan.documents)
    ends: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for (info, chunks), origin in zip(plan.arrays, origins, strict=True):
        kind = id(origin.source.kind), id(info.kind), id(chunks)
        if kind not in ends:
            sizes = info.grid.stored_elements(chunks) * origin.itemsize
            limit = usual if origin.is_kept else budget.batch_bytes
            ends[kind] = [(last, int(sizes[i:last].sum())) for i, last in batches(sizes, limit)]
        base = end
        for last, nbytes in ends[kind]:
            if held and held + nbytes > usual:
                lasts.append(end)
                held = 0
            end, held = base + last, held + nbytes
    return [*lasts, end] if end else []


@dataclass(frozen=True, slots=True, eq=False)
class ChunkCopier:
    """Fills chunks of the target's packs from those of the source."""

    source: Checkpoint
    budget: Budget
    shared: SharedChunks | None
    small: SmallChunks | None

    def fill(self, origins: Sequence[TargetArray], slots: Iterable[Slot]) -> Sequence[Slot]:
        """Fill some chunks of a pack together: each chunk of the source is read, and checked, once
        for all. Slots number the arrays of the pack, which are made of `origins`.
        """
        slots = list(slots)
        left = slots if self.small is None else self.small.fill(origins, slots)
        self.fill_boxes(
            (origins[slot.array], *chunk_view(origins[slot.array].info, slot.chunk, slot.memory))
            for slot in left
        )
        return slots

    def fill_boxes(self, boxes: Iterable[tuple[Chosen, Box, npt.NDArray[Any]]]) -> None:
        """Fill memory with boxes of arrays, as the raw elements that the target has."""
        whole: list[Wanted] = []
        exact: list[Wanted] = []
        casts: list[tuple[Chosen, npt.NDArray[Any], npt.NDArray[Any]]] = []
        for array, box, stored in boxes:
            values = stored
            if array.is_cast:
                values = np.empty(box.shape, array.source.dtype.bits)
                casts.append((array, values, stored))
            for number, source, part, there in array.parts(box, values):
                wanted = Wanted(number, part, there)
                if self.budget.is_huge(source):
                    # Some at a time whose bytes lie close: the chunk is not in memory whole. It was
                    # compared with its checksum before (`check_huge_chunks`).
                    size = source.dtype.itemsize
                    pieces = pieces_within(source.grid, part, size, self.budget.chunk_bytes)
                    exact += [_part(wanted, each.within(part)) for each in pieces]
                else:
                    whole.append(wanted)
        if self.shared is not None:
            self.shared.read(whole)
            whole = []
        for some, verify in ((whole, True), (exact, False)):
            if some:
                plan_read(self.source.packs, some, self.budget.pace, verify=verify).run()
        for array, values, stored in casts:
            cast(array.name, values, stored, (array.source.dtype, array.info.dtype))


def _part(wanted: Wanted, inside: tuple[slice, ...]) -> Wanted:
    """A part of what is wanted, as slices of its box."""
    offset = zip(wanted.box.offset, inside, strict=True)
    box = Box(tuple(at + s.start for at, s in offset), tuple(s.stop - s.start for s in inside))
    index: Any = (*inside, ...)
    return Wanted(wanted.array, box, wanted.target[index])


def cast(
    name: str, values: npt.NDArray[Any], stored: npt.NDArray[Any], dtypes: tuple[DType, DType]
) -> None:
    """Convert raw elements from the first type to the second; numbers that it lacks are refused."""
    source, target = dtypes
    given = values.view(source.numpy)
    with np.errstate(all="ignore"):
        found = given.astype(target.numpy)
        lost = ~np.isfinite(found) & np.isfinite(given)
        # Some types have no infinity, and make it a NaN.
        lost |= np.isinf(given) & ~np.isinf(found)
    if lost.any():
        raise UsageError(
            f"{int(lost.sum())} values of one chunk are beyond {target.name}",
            where=name,
            value=float(given[lost][0]),
            hint="leave the array out of --cast, or cast to a type with a larger range",
        )
    stored[...] = found.view(target.bits)


@dataclass(slots=True, eq=False)
class SharedChunk:
    """The elements of a chunk, once it is `there`, and how many work with it now."""

    values: npt.NDArray[Any]
    there: threading.Event = field(default_factory=threading.Event)
    users: int = 0
    failed: bool = False


class SharedChunks:
    """Chunks of the source of which several packs need a part: read once, by whoever comes first,
    and kept within `nbytes`, those that were used last.
    """

    def __init__(
        self, arrays: Sequence[ArrayInfo], read: Callable[[Sequence[Wanted]], None], nbytes: int
    ) -> None:
        """Chunks of these arrays of the source, which `read` reads whole and checks."""
        self._arrays = arrays
        self._read = read
        self._room = nbytes
        # By the number of an array of the source, and that of a chunk.
        self._kept: OrderedDict[tuple[int, int], SharedChunk] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, boxes: Iterable[Wanted]) -> None:
        """Fill what is wanted. A thread reads the chunks that nobody has read yet, then waits for
        the others, whose readers wait for nobody meanwhile.
        """
        direct: list[Wanted] = []
        parts: list[tuple[SharedChunk, Piece, Wanted]] = []
        mine: list[SharedChunk] = []
        try:
            for wanted in boxes:
                grid = self._arrays[wanted.array].grid
                pieces = Pieces(grid, wanted.box)
                if all(piece.is_whole for piece in pieces):
                    direct.append(wanted)
                    continue
                for piece in pieces:
                    part, chunk, is_mine = _part(wanted, piece.target), None, False
                    if not piece.is_whole:
                        chunk, is_mine = self._claim(wanted.array, piece.chunk)
                    if chunk is None:
                        direct.append(part)
                        continue
                    parts.append((chunk, piece, part))
                    if is_mine:
                        mine.append(chunk)
                        box = grid.box(grid.index(piece.chunk))
                        direct.append(Wanted(wanted.array, box, chunk.values))
            if direct:
                self._read(direct)
            while mine:
                mine.pop().there.set()
            left = []
            for chunk, piece, part in parts:
                chunk.there.wait()
                if chunk.failed:
                    left.append(part)
                else:
                    copy_elements(chunk.values[piece.source], part.target)
            if left:
                self._read(left)
        finally:
            # Whoever waits for what was not read reads it for himself.
            for chunk in mine:
                chunk.failed = True
                chunk.there.set()
            with self._lock:
                for chunk, _, _ in parts:
                    chunk.users -= 1
                for key in [key for key, it in self._kept.items() if it.failed and not it.users]:
                    self._forget(key)

    def _claim(self, array: int, chunk: int) -> tuple[SharedChunk | None, bool]:
        """A chunk to work with, and whether the caller is to read it; None where there is no room
        for it.
        """
        with self._lock:
            key = array, chunk
            if found := self._kept.get(key):
                self._kept.move_to_end(key)
                found.users += 1
                return found, False
            info = self._arrays[array]
            shape = info.grid.box(info.grid.index(chunk)).shape
            nbytes = math.prod(shape) * info.dtype.itemsize
            for idle in [key for key, it in self._kept.items() if not it.users]:
                if self._room >= nbytes:
                    break
                self._forget(idle)
            if self._room < nbytes:
                return None, False
            made = self._kept[key] = SharedChunk(np.empty(shape, info.dtype.bits), users=1)
            self._room -= nbytes
            return made, True

    def _forget(self, key: tuple[int, int]) -> None:
        self._room += self._kept.pop(key).values.nbytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What each of some workers may hold: a batch of the target's chunks, and the chunks of the
    source that it is filled from, one at a time; and what is under way to and from the stores.
    """

    workers: int
    batch_bytes: int
    chunk_bytes: int
    source: Pace
    """How the source is read by all workers together."""
    sink_bytes: int | None
    """What the sink of one pack may keep; None where it keeps nothing."""
    packs: int
    """How many packs are written at a time."""
    shared_bytes: int
    """What may be kept of chunks of the source that several of these need a part of."""

    @classmethod
    def of(
        cls,
        memory: int,
        workers: int,
        source: Store,
        destination: Store,
        *,
        largest: int,
        pack_bytes: int = 0,
        fixed: int = 0,
        is_here: bool = True,
    ) -> Budget:
        """The largest batches with which `memory` is never exceeded; `largest` is the largest
        chunk of the target, `pack_bytes` about how large the largest pack will be, and `fixed`
        what is in use besides. Unless it is here, each worker has a process and a pack of its own.
        """
        share, can = memory // _ON_ITS_WAY, destination.abilities
        is_far = source.abilities.waits_for_answers
        kept = memory // _KEPT_CHUNKS if is_far and is_here else 0
        sink_bytes, packs = None, PACKS_AT_ONCE if is_here else workers
        if can.waits_for_answers:
            part = piece_size(pack_bytes, can.part_size)
            least, most = _LEAST_PARTS * part, (can.concurrency + 2) * part
            packs = max(1, min(packs, share // least))
            sink_bytes = max(least, min(most, share // packs))
        if not is_here:
            workers = packs
        pace, shared = Pace.of(source, share - kept), kept if packs > 1 else 0
        found = cls(workers, 0, 0, pace, sink_bytes, packs, shared)
        fixed += found.under_way + _SPARE
        each = _PER_WORKER + (0 if is_here else _PROCESS_BYTES)
        for count in range(workers, 0, -1):
            # A batch, one chunk of the source, and as much again where values are converted.
            batch = min(_LARGEST_BATCH, ((memory - fixed) // count - each - BAND_BYTES) // 3)
            if batch >= max(_SMALLEST_BATCH, largest):
                chunk_bytes = max(BAND_BYTES, min(_LARGEST_CHUNK, batch))
                return replace(found, workers=count, batch_bytes=batch, chunk_bytes=chunk_bytes)
        least = fixed + each + BAND_BYTES + 3 * max(_SMALLEST_BATCH, largest)
        raise UsageError(
            f"that is too little memory: this checkpoint takes {-(-least // _MIB)} MiB at least",
            value=memory,
            hint="most of it is for the list of chunks and for one chunk at a time",
        )

    @property
    def under_way(self) -> int:
        """The most that is kept besides what the workers hold."""
        return self.source.nbytes + (self.sink_bytes or 0) * self.packs + self.shared_bytes

    @property
    def peak(self) -> int:
        """The most that is in memory."""
        each = 3 * self.batch_bytes + max(BAND_BYTES, self.chunk_bytes) + _PER_WORKER
        return self.workers * each + _SPARE + self.under_way

    @property
    def pace(self) -> Pace:
        """How each worker reads the source."""
        return self.source.shared(self.workers)

    def alone(self) -> Budget:
        """That of one of the workers, who writes one pack in a process of its own."""
        return replace(self, workers=1, source=self.pace, packs=1, shared_bytes=0)

    def is_huge(self, array: ArrayInfo) -> bool:
        """Whether the chunks of an array of the source are too large to be read whole."""
        size = array.grid.chunk_elements * array.dtype.itemsize
        return array.grid.chunk_count > 0 and size > self.chunk_bytes


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
