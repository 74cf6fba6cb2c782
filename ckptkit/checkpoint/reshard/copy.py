"""Copying packs: a few at a time, each by all threads, and each chunk straight from those of the
source. What several chunks need is read once.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from operator import call
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.places import StepFolder, step_name
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.reader import BAND_BYTES, Wanted, plan_read
from ckptkit.checkpoint.read.stream import check_chunk
from ckptkit.checkpoint.reshard.selection import objects_of
from ckptkit.checkpoint.reshard.target import Budget, ReshardTarget, TargetArray
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.checkpoint.write.pack import Pack, Slot
from ckptkit.checkpoint.write.plan import PackedArray, PackPlan, chunk_view, documents_of
from ckptkit.errors import AlreadyExistsError, CkptkitError, PeerError, UsageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box
from ckptkit.plan.chunks import chunks_in, chunks_to_write
from ckptkit.plan.read import Piece, Pieces, batches, coalesce, pieces_within
from ckptkit.storage import Store, default_pool
from ckptkit.storage.base.buffers import PAGE, copy_elements

# As the parts of local files are when a job writes them: larger ones are no faster to write, and
# leave less for other threads to take over.
_USUAL = 8 << 20
# Above that the bytes take longer than what is done for each chunk, and threads should copy at the
# same time.
_SMALL = 128 << 10
# So many bytes between two chunks are read along: another read would take as long.
READ_ALONG = 32 << 10


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
    room, read = budget.shared_bytes, partial(read_boxes, source, budget)
    shared = SharedChunks(source.manifest.arrays, read, room) if room else None
    # Chunks of a foreign checkpoint have no checksums, and may overlap; what is read by requests is
    # not read chunk by chunk.
    reads_small = source.manifest.is_checked and not budget.whole_pace.by_request
    copier = ChunkCopier(source, budget, shared, SmallChunks(source) if reads_small else None)

    def segments_of(rank: int) -> Iterator[Callable[[], None]]:
        pack = _begin_pack(target, rank, destination, copier, progress)
        begun.append(pack)
        for number in range(len(pack.segments)):
            yield partial(pack.write_segment, number)

    def segments() -> Iterator[Callable[[], None]]:
        """By turns from a few packs, which are begun as threads ask for work."""
        waiting = iter(ranks)
        turns: deque[Iterator[Callable[[], None]]] = deque()
        while True:
            # Those that are finished are let go of: each holds the names of all its chunks. Those
            # of which only the end is being written take memory as all others do.
            begun[:] = [pack for pack in begun if not pack.is_finished]
            if len(begun) < budget.packs or not turns:
                turns.extendleft(map(segments_of, islice(waiting, 1)))
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


def _begin_pack(
    target: ReshardTarget,
    rank: int,
    destination: Store,
    copier: ChunkCopier,
    progress: Progress | None,
) -> Pack:
    """Begin the pack of a rank; every segment of it can be written by any thread."""
    writes = chunks_to_write(target.owned, rank)
    known = [(owned, a.info) for owned, a in zip(target.owned, target.arrays, strict=True)]
    mine = [(a, chunks) for a, chunks in zip(target.arrays, writes, strict=True) if len(chunks)]
    arrays = [array for array, _ in mine]
    packed = [PackedArray(array.info, chunks) for array, chunks in mine]
    plan = PackPlan(target.table, documents_of(known, writes, rank), packed)
    objects = objects_of(target.choice.objects, rank, target.world_size)
    pack = Pack(rank, plan, objects, partial(copier.fill, arrays))
    try:
        pack.begin(
            StepFolder(destination, step_name(target.save.step)),
            target.save,
            pack.segments_at(_segment_ends(plan, arrays, copier.budget)),
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


def _segment_ends(plan: PackPlan, arrays: Sequence[TargetArray], budget: Budget) -> list[int]:
    """Where segments end: each array's chunks in batches as the plan has them, small ones together.

    The batches of chunks that go over as they are need not be large: no chunk of the source is
    needed by two.
    """
    end = len(plan.documents)
    lasts: list[int] = []
    usual = min(_USUAL, budget.batch_bytes)
    held = sum(len(data) for _, data in plan.documents)
    ends: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for (info, chunks), array in zip(plan.arrays, arrays, strict=True):
        kind = id(array.source.kind), id(info.kind), id(chunks)
        if kind not in ends:
            sizes = info.grid.stored_elements(chunks) * array.itemsize
            limit = usual if array.is_kept else budget.batch_bytes
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
    shared: SharedChunks | None = None
    small: SmallChunks | None = None

    def fill(self, arrays: Sequence[TargetArray], slots: Iterable[Slot]) -> Sequence[Slot]:
        """Fill some chunks of a pack, and read each chunk of the source once for all of them. Slots
        number the arrays of the pack, which are `arrays`.
        """
        left = slots = list(slots)
        if self.small is not None:
            left = self.small.fill(arrays, slots)
        self.fill_boxes(
            (arrays[slot.array], *chunk_view(arrays[slot.array].info, slot.chunk, slot.memory))
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
        else:
            read_boxes(self.source, self.budget, whole)
        read_boxes(self.source, self.budget, exact, verify=False)
        for each in casts:
            cast(*each)


def read_boxes(
    source: Checkpoint, budget: Budget, wanted: Sequence[Wanted], *, verify: bool = True
) -> None:
    """Fill what is wanted, as fast as the budget allows."""
    if wanted:
        plan = plan_read(source.packs, wanted, budget.pace, verify=verify)
        share_out(plan.runs, plan.read, plan.pace.requests)


def _part(wanted: Wanted, inside: tuple[slice, ...]) -> Wanted:
    """A part of what is wanted, as slices of its box."""
    index: Any = (*inside, ...)
    target = wanted.target[index]
    offset = tuple(at + s.start for at, s in zip(wanted.box.offset, inside, strict=True))
    return Wanted(wanted.array, Box(offset, target.shape), target)


def cast(array: Chosen, values: npt.NDArray[Any], stored: npt.NDArray[Any]) -> None:
    """Convert raw elements to what an array is cast to; numbers that this lacks are refused."""
    target = array.info.dtype
    given = values.view(array.source.dtype.numpy)
    with np.errstate(all="ignore"):
        found = given.astype(target.numpy)
        lost = ~np.isfinite(found) & np.isfinite(given)
        # Some types have no infinity, and make it a NaN.
        lost |= np.isinf(given) & ~np.isinf(found)
    if lost.any():
        raise UsageError(
            f"{int(lost.sum())} values of one chunk are beyond {target.name}",
            where=array.name,
            value=float(given[lost][0]),
            hint="leave the array out of --cast, or cast to a type with a larger range",
        )
    stored[...] = found.view(target.bits)


def check_huge_chunks(
    boxes: Iterable[tuple[Chosen, Box]], source: Checkpoint, budget: Budget
) -> None:
    """Compare the chunks that boxes are read from with their checksums, where these are too large
    to be read whole, a little of each at a time: when they are copied they are only read, some
    bytes here and there.
    """
    starts, rows = source.manifest.starts, set[int]()
    for array, box in boxes:
        for number, info, part, _ in array.parts(box, np.broadcast_to(0, box.shape)):
            if budget.is_huge(info):
                rows.update((starts[number] + chunks_in(info.grid, part)).tolist())
    share_out(sorted(rows), partial(check_chunk, source), budget.workers)


@dataclass(slots=True, eq=False)
class SharedChunk:
    """The elements of a chunk, once it is `there`, and how many work with it now."""

    values: npt.NDArray[Any]
    there: threading.Event = field(default_factory=threading.Event)
    users: int = 0
    failed: bool = False


@dataclass(slots=True, eq=False)
class SharedChunks:
    """Chunks of the source of which several packs need a part: read once, by whoever comes first,
    and kept as long as there is room, those that were used last.
    """

    _arrays: Sequence[ArrayInfo]
    _read: Callable[[Sequence[Wanted]], None]
    """Reads chunks of these arrays whole, and checks them."""
    _room: int
    """How many bytes more may be kept."""
    _kept: OrderedDict[tuple[int, int], SharedChunk] = field(default_factory=OrderedDict)
    """By the number of an array of the source, and that of a chunk."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

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
                    self._room += self._kept.pop(key).values.nbytes

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
                self._room += self._kept.pop(idle).values.nbytes
            if self._room < nbytes:
                return None, False
            made = self._kept[key] = SharedChunk(np.empty(shape, info.dtype.bits), users=1)
            self._room -= nbytes
            return made, True


# Small chunks, of which there may be a million: which bytes of which chunk of the source go where
# is found once for all arrays that are cut alike, and what lies side by side is read by one read.


class _Move(NamedTuple):
    """Runs of bytes of a chunk of the source, and where they go in a chunk of the target. Without
    `counts` it is one run; else so many along each dim, at distances of `source_steps` and
    `target_steps`.
    """

    chunk: int
    source: int
    target: int
    run: np.dtype[Any]
    """So many bytes as one element."""
    counts: tuple[int, ...]
    source_steps: tuple[int, ...]
    target_steps: tuple[int, ...]


class SmallChunks:
    """Fills chunks of the target from small ones of a source that is read without waiting; any
    thread calls it.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._starts: list[int] = source.manifest.starts.tolist()
        # By what an array is here and there, and the number of a chunk; None where that is filled
        # in another way. The rest of a chunk that has padding is zero.
        self._known: dict[tuple[int, int, int], tuple[list[_Move], bool] | None] = {}

    def fill(self, arrays: Sequence[TargetArray], slots: Iterable[Slot]) -> list[Slot]:
        """Fill the slots that it can, of a pack of these arrays; returns those that it leaves."""
        left: list[Slot] = []
        rows: list[int] = []
        jobs: list[tuple[memoryview, _Move]] = []
        for slot in slots:
            _, number, chunk, memory = slot
            array = arrays[number]
            key = id(array.source.kind), id(array.info.kind), chunk
            if key not in self._known:
                self._known[key] = _moves(array, chunk)
            filling = self._known[key]
            if filling is None:
                left.append(slot)
                continue
            moves, is_padded = filling
            if is_padded:
                memory[:] = bytes(len(memory))
            first = self._starts[array.number]
            for move in moves:
                rows.append(first + move.chunk)
                jobs.append((memory, move))
        if rows:
            self._copy(rows, jobs)
        return left

    def _copy(self, rows: list[int], jobs: Sequence[tuple[memoryview, _Move]]) -> None:
        """Read the chunks of some rows of the manifest, check each once, and copy from each what is
        wanted into the memory beside it.
        """
        manifest, packs = self._source.manifest, self._source.packs
        pack, offset = manifest.pack[rows], manifest.offset[rows].astype(np.int64)
        order = np.lexsort((offset, pack))
        pack, start = pack[order], offset[order]
        stop = start + manifest.length[rows].astype(np.int64)[order]
        runs = coalesce(pack, start, stop, gap=READ_ALONG, limit=BAND_BYTES)
        starts, stops = start.tolist(), stop.tolist()
        written, places = manifest.crc32[rows][order].tolist(), order.tolist()

        def bring(first: int, last: int, memory: memoryview) -> None:
            begin, at, data = starts[first], -1, memory[:0]
            for i in range(first, last):
                if starts[i] != at:
                    at = starts[i]
                    data = memory[at - begin : stops[i] - begin]
                    found = int(isal_zlib.crc32(data))
                    if found != written[i]:
                        key = manifest.chunk_key(rows[places[i]])
                        raise packs.corrupt(key, found, written[i], int(pack[i]), at)
                target, (_, inside, there, run, counts, from_steps, to_steps) = jobs[places[i]]
                if counts:
                    taken = np.ndarray(counts, run, data, inside, from_steps)
                    np.ndarray(counts, run, target, there, to_steps)[...] = taken
                else:
                    size = run.itemsize
                    target[there : there + size] = data[inside : inside + size]

        # Always as much, so that loans find each other again.
        with default_pool().take(BAND_BYTES + PAGE) as memory:
            for first, last in runs:
                size = stops[last - 1] - starts[first]
                with packs.use(int(pack[first])) as opened:
                    opened.read_into(starts[first], memory[:size])
                bring(first, last, memory)


def _moves(array: TargetArray, chunk: int) -> tuple[list[_Move], bool] | None:
    """What fills a chunk of an array, and whether that has padding; None where values are
    converted, or made of rows of several arrays, or chunks are not small.
    """
    source, info = array.source, array.info
    grids, size = (source.grid, info.grid), info.dtype.itemsize
    if array.is_cast or array.rows or any(grid.chunk_elements * size > _SMALL for grid in grids):
        return None
    index = info.grid.index(chunk)
    box, stored = info.grid.box(index), info.grid.stored_shape(index)
    moves = []
    for piece in Pieces(source.grid, box):
        inside, there, run = 0, 0, size
        counts, from_steps, to_steps = list[int](), list[int](), list[int]()
        for dim in reversed(range(len(stored))):
            from_slice, to_slice = piece.source[dim], piece.target[dim]
            count = from_slice.stop - from_slice.start
            from_step = size * math.prod(piece.stored_shape[dim + 1 :])
            to_step = size * math.prod(stored[dim + 1 :])
            inside += from_slice.start * from_step
            there += to_slice.start * to_step
            if count == 1:
                continue
            if not counts and from_step == to_step == run:
                run *= count  # they lie side by side in both
            else:
                counts.insert(0, count)
                from_steps.insert(0, from_step)
                to_steps.insert(0, to_step)
        element, steps = np.dtype((np.void, run)), (tuple(from_steps), tuple(to_steps))
        moves.append(_Move(piece.chunk, inside, there, element, tuple(counts), *steps))
    return moves, box.shape != stored
