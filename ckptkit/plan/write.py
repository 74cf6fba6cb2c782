"""Who writes which chunks: the same answer on every rank, without a word between them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.errors import LayoutError
from ckptkit.model import Box, Grid, Layout, Replicas
from ckptkit.model.grid import I64


@dataclass(frozen=True, slots=True)
class Owned:
    """What has to be known of an array to decide who writes its chunks."""

    name: str
    layout: Layout
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


def chunks_to_write(arrays: Sequence[Owned], rank: int) -> list[I64]:
    """For each array the chunks that this rank writes, in file order.

    What several ranks hold is one stream of chunks for each set of such ranks, cut into equal
    shares by bytes. All members of a set know all arrays of it, so they agree; ranks outside of
    it (other pipeline stages) need not know any.
    """
    streams: dict[Hashable, list[tuple[int, _Stretch]]] = {}
    mine: list[list[I64]] = [[] for _ in arrays]
    # By layout and grid, which layers that are alike share: 100,000 arrays have a few dozen.
    kinds: dict[tuple[int, int], list[_Stretch]] = {}
    for index, array in enumerate(arrays):
        kind = id(array.layout), id(array.grid)
        if kind not in kinds:
            kinds[kind] = _stretches(array, rank)
        for stretch in kinds[kind]:
            if stretch.replicas.count == 1:  # nobody to share it with
                mine[index].append(stretch.chunks)
            else:
                streams.setdefault(stretch.replicas.key, []).append((index, stretch))
    for stream in streams.values():
        total = sum(stretch.total * arrays[index].itemsize for index, stretch in stream)
        begin = 0
        for index, stretch in stream:
            size, replicas = arrays[index].itemsize, stretch.replicas
            # Integers, so that all machines decide alike; beyond 64 bits those of Python.
            wide = object if total * replicas.count >= 1 << 61 else np.int64
            middles = stretch.middles.astype(wide) * size + 2 * begin
            chosen = middles * replicas.count // max(1, 2 * total) == replicas.index
            mine[index].append(stretch.chunks[chosen])
            begin += stretch.total * size
    nothing = np.zeros(0, dtype=np.int64)
    return [parts[0] if len(parts) == 1 else np.concatenate([nothing, *parts]) for parts in mine]


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
        found.append(_Stretch(chunks, int(elements.sum()), middles, share.replicas))
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
