"""Small chunks, of which there may be a million: which bytes of which chunk of the source go where
is found once for all arrays that are cut alike, and what lies side by side is read by one read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.reader import BAND_BYTES
from ckptkit.checkpoint.reshard.target import TargetArray
from ckptkit.checkpoint.write.pack import Slot
from ckptkit.plan.read import Piece, Pieces, coalesce
from ckptkit.storage import default_pool
from ckptkit.storage.base.buffers import PAGE

# Above that the bytes take longer than what is done for each chunk, and threads should copy at the
# same time.
_SMALL = 128 << 10
# So many bytes between two chunks are read along: another read would take as long.
READ_ALONG = 32 << 10


class _Move(NamedTuple):
    """Runs of bytes of a chunk of the source, and where they go in one of the target: one where
    `counts` is empty, else so many along each dim, so far apart.
    """

    chunk: int
    source: int
    target: int
    run: np.dtype[Any]
    """So many bytes as one element."""
    counts: tuple[int, ...]
    source_steps: tuple[int, ...]
    target_steps: tuple[int, ...]


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

    def fill(self, origins: Sequence[TargetArray], slots: Iterable[Slot]) -> list[Slot]:
        """Fill slots, whose arrays are made of `origins`; gives back those that it leaves."""
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
        if rows:
            self._copy(rows, jobs)
        return left

    def _copy(self, rows: list[int], jobs: list[tuple[memoryview, _Move]]) -> None:
        """Read the chunks of some rows of the manifest, check each once, copy what is wanted."""
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
