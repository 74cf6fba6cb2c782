"""Chunks of the target, each filled straight from those of the source, some neighbours at a time:
what several of them need is read once.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.plan import plan_read
from ckptkit.checkpoint.read.reader import BAND_BYTES, Wanted
from ckptkit.checkpoint.read.stream import check_chunk
from ckptkit.checkpoint.reshard.target import Budget, TargetArray
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import share_out
from ckptkit.checkpoint.write.pack import Slot
from ckptkit.checkpoint.write.plan import chunk_view
from ckptkit.errors import UsageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box, DType
from ckptkit.plan.read import Piece, Pieces, coalesce, pieces_within
from ckptkit.storage import default_pool
from ckptkit.storage.base.buffers import PAGE, copy_elements

# Above that the bytes take longer than what is done for each chunk, and threads should copy at the
# same time.
_SMALL = 128 << 10
# So many bytes between two chunks are read along: another read would take as long.
READ_ALONG = 32 << 10


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
        left = slots = list(slots)
        if self.small is not None:
            moves, left = self.small.moves(origins, slots)
            self.small.copy(moves)
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
                read_boxes(self.source, self.budget, some, verify=verify)
        for array, values, stored in casts:
            cast(array.name, values, stored, (array.source.dtype, array.info.dtype))


def read_boxes(
    source: Checkpoint, budget: Budget, wanted: Sequence[Wanted], *, verify: bool = True
) -> None:
    """Fill what is wanted, as fast as the budget allows."""
    plan = plan_read(source.packs, wanted, budget.pace, verify=verify)
    share_out(plan.runs, plan.read, plan.pace.requests)


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


def check_huge_chunks(arrays: Iterable[Chosen], source: Checkpoint, budget: Budget) -> None:
    """Compare the chunks that are too large to be read whole with their checksums, a little of each
    at a time: when they are copied they are only read, some bytes here and there.
    """
    starts, rows = source.manifest.starts, list[int]()
    for number, info in {n: info for array in arrays for n, info in array.origins}.items():
        if budget.is_huge(info):
            rows += range(*starts[number:][:2].tolist())
    share_out(rows, partial(check_chunk, source), budget.workers)


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


_Moves: TypeAlias = tuple[list[int], list[tuple[memoryview, _Move]]]
"""Rows of the manifest, and where their chunks go: in which memory, and how."""


class _Filling(NamedTuple):
    """What fills a chunk of the target; the rest of one that is `padded` is zero."""

    moves: list[_Move]
    padded: bool


class SmallChunks:
    """Fills chunks of the target from small ones of a source that is read without waiting; any
    thread calls it.
    """

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._starts: list[int] = source.manifest.starts.tolist()
        # By what an array is here and there, and the number of a chunk; None where that is filled
        # in another way.
        self._known: dict[tuple[int, int, int], _Filling | None] = {}

    def moves(
        self, origins: Sequence[TargetArray], slots: Iterable[Slot]
    ) -> tuple[_Moves, list[Slot]]:
        """What fills slots, whose arrays are made of `origins`, and the slots that it leaves."""
        left: list[Slot] = []
        rows: list[int] = []
        jobs: list[tuple[memoryview, _Move]] = []
        for slot in slots:
            _, number, chunk, memory = slot
            array = origins[number]
            key = id(array.source.kind), id(array.info.kind), chunk
            if key not in self._known:
                self._known[key] = _filling(array, chunk)
            filling = self._known[key]
            if filling is None:
                left.append(slot)
                continue
            if filling.padded:
                memory[:] = bytes(len(memory))
            first = self._starts[array.number]
            for move in filling.moves:
                rows.append(first + move.chunk)
                jobs.append((memory, move))
        return (rows, jobs), left

    def copy(self, moves: _Moves) -> None:
        """Read the chunks of some rows of the manifest, check each once, copy what is wanted."""
        rows, jobs = moves
        if not rows:
            return
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


def _filling(array: TargetArray, chunk: int) -> _Filling | None:
    """What fills a chunk of an array; None where values are converted, or
    made of rows of several arrays, or chunks are not small.
    """
    source, info = array.source, array.info
    grids, size = (source.grid, info.grid), info.dtype.itemsize
    if array.is_cast or array.rows or any(grid.chunk_elements * size > _SMALL for grid in grids):
        return None
    index = info.grid.index(chunk)
    box, stored = info.grid.box(index), info.grid.stored_shape(index)
    pieces = Pieces(source.grid, box)
    return _Filling([_move(piece, stored, size) for piece in pieces], box.shape != stored)


def _move(piece: Piece, stored: tuple[int, ...], itemsize: int) -> _Move:
    """A piece as bytes, in a chunk of the target that is stored in this shape."""
    inside, there, run = 0, 0, itemsize
    counts, from_steps, to_steps = list[int](), list[int](), list[int]()
    for dim, (source, target) in reversed(
        list(enumerate(zip(piece.source, piece.target, strict=True)))
    ):
        count = source.stop - source.start
        from_step = itemsize * math.prod(piece.stored_shape[dim + 1 :])
        to_step = itemsize * math.prod(stored[dim + 1 :])
        inside, there = inside + source.start * from_step, there + target.start * to_step
        if count == 1:
            continue
        if not counts and from_step == to_step == run:
            run *= count  # they lie side by side in both
        else:
            counts.insert(0, count)
            from_steps.insert(0, from_step)
            to_steps.insert(0, to_step)
    steps = tuple(from_steps), tuple(to_steps)
    return _Move(piece.chunk, inside, there, np.dtype((np.void, run)), tuple(counts), *steps)
