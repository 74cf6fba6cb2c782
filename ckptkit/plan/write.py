"""Who writes which chunks: the same answer on every rank, without a word between them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptkit.errors import LayoutError
from ckptkit.model import Assigned, Box, Grid, Layout, Replicas
from ckptkit.model.grid import I64

_NOTHING = np.zeros(0, dtype=np.int64)
_NOTHING.flags.writeable = False  # it is handed out for many arrays


class Owned(NamedTuple):
    """What has to be known of an array to decide who writes its chunks."""

    name: str
    layout: Layout | Assigned
    grid: Grid
    itemsize: int


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Chunks of one array that the same ranks hold; how many elements they are stored as, and
    twice the middle of each among these.
    """

    chunks: I64
    total: int
    middles: I64
    replicas: Replicas
    first: int
    """The first of the middles, and the last; 0 where there are none."""
    last: int


def chunks_to_write(arrays: Sequence[Owned], rank: int) -> list[I64]:
    """For each array the chunks that this rank writes, in file order.

    What several ranks hold is one stream of chunks for each set of such ranks, cut into equal
    shares by bytes. All members of a set know all arrays of it, so they agree; ranks outside of
    it (other pipeline stages) need not know any.
    """
    streams: dict[Hashable, list[tuple[int, _Stretch]]] = {}
    mine: list[I64 | None] = [None] * len(arrays)
    more: dict[int, list[I64]] = {}
    # By layout and grid, which layers that are alike share: 100,000 arrays have a few dozen.
    kinds: dict[tuple[int, int], list[_Stretch]] = {}

    def take(index: int, chunks: I64) -> None:
        known = mine[index]
        if known is None:
            mine[index] = chunks
        else:
            more.setdefault(index, [known]).append(chunks)

    for index, array in enumerate(arrays):
        kind = id(array.layout), id(array.grid)
        if kind not in kinds:
            kinds[kind] = _stretches(array, rank)
        for stretch in kinds[kind]:
            if stretch.replicas.count == 1:  # nobody to share it with
                take(index, stretch.chunks)
            else:
                streams.setdefault(stretch.replicas.key, []).append((index, stretch))
    for stream in streams.values():
        sizes = [arrays[index].itemsize for index, _ in stream]
        total = sum(stretch.total * size for (_, stretch), size in zip(stream, sizes, strict=True))
        begin = 0
        for (index, stretch), size in zip(stream, sizes, strict=True):
            take(index, _share(stretch, size, begin, total))
            begin += stretch.total * size
    for index, parts in more.items():
        mine[index] = np.concatenate(parts)
    return [_NOTHING if chunks is None else chunks for chunks in mine]


def _share(stretch: _Stretch, size: int, begin: int, total: int) -> I64:
    """The chunks of a stretch that a rank writes of a stream of so many bytes, in which it begins
    here.
    """
    count, mine = stretch.replicas.count, stretch.replicas.index

    def writer(middle: int) -> int:
        return (middle * size + 2 * begin) * count // max(1, 2 * total)

    # Mostly all of it is one rank's: the middles rise. Integers, so that all machines decide alike.
    if not len(stretch.chunks):
        return stretch.chunks
    if writer(stretch.first) == writer(stretch.last):
        return stretch.chunks if writer(stretch.first) == mine else _NOTHING
    # Beyond 64 bits those of Python.
    wide = object if total * count >= 1 << 61 else np.int64
    middles = stretch.middles.astype(wide) * size + 2 * begin
    chosen: I64 = stretch.chunks[middles * count // max(1, 2 * total) == mine]
    return chosen


def writes_document(array: Owned, chunks: I64, rank: int) -> bool:
    """Whether this rank writes the array's zarr.json: with chunk 0, or, without chunks, as its
    lowest holder.
    """
    if array.grid.chunk_count:
        return bool(len(chunks)) and int(chunks.min()) == 0
    return array.layout.first_rank == rank


def chunks_in(grid: Grid, box: Box) -> I64:
    """The numbers of the chunks that a box overlaps, in order."""
    numbers = np.zeros(1, dtype=np.int64)
    for span, count in zip(grid.span(box), grid.counts, strict=True):
        along = np.arange(span.start, span.stop, dtype=np.int64)
        numbers = (numbers[:, None] * count + along[None, :]).reshape(-1)
    return numbers


def _stretches(array: Owned, rank: int) -> list[_Stretch]:
    found = []
    for share in array.layout.shares(rank):
        parts = [np.zeros(0, dtype=np.int64)]
        for box in share.boxes:
            if not array.grid.is_whole(box):
                raise LayoutError(
                    "the grid has chunks that reach beyond what one rank holds",
                    where=array.name,
                    value=box,
                )
            parts.append(chunks_in(array.grid, box))
        chunks = np.concatenate(parts)
        chunks.flags.writeable = False  # it is handed out for many arrays
        elements = array.grid.stored_elements(chunks)
        middles = 2 * np.cumsum(elements) - elements
        ends = (int(middles[0]), int(middles[-1])) if len(middles) else (0, 0)
        found.append(_Stretch(chunks, int(elements.sum()), middles, share.replicas, *ends))
    return found


def owners_of(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of each parameter: largest first to the rank with the fewest elements so far, ties
    in their order, as torch's ZeroRedundancyOptimizer does.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners
