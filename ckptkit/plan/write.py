"""Who writes which chunks: the same answer on every rank, without a word between them."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptkit.errors import LayoutError
from ckptkit.model import Box, Grid, Layout, Replicas, Share
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
    """Chunks of one array that the same ranks hold."""

    array: int
    chunks: I64
    replicas: Replicas


def chunks_to_write(arrays: Sequence[Owned], rank: int) -> list[I64]:
    """For each array the chunks that this rank writes, in file order.

    What several ranks hold is one stream of chunks for each set of such ranks, cut into equal
    shares by bytes. All members of a set know all arrays of it, so they agree; ranks outside of
    it (other pipeline stages) need not know any.
    """
    streams: dict[Hashable, list[_Stretch]] = {}
    mine: list[list[I64]] = [[] for _ in arrays]
    for index, array in enumerate(arrays):
        for share in array.layout.shares(rank):
            stretch = _Stretch(index, _chunks_held(array, share), share.replicas)
            if share.replicas.count == 1:  # nobody to share it with: no sizes need to be summed
                mine[index].append(stretch.chunks)
            else:
                streams.setdefault(share.replicas.key, []).append(stretch)
    for stream in streams.values():
        for stretch, chunks in zip(stream, _shares(arrays, stream), strict=True):
            mine[stretch.array].append(chunks)
    nothing = np.zeros(0, dtype=np.int64)
    return [np.concatenate(parts) if parts else nothing for parts in mine]


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


def _chunks_held(array: Owned, share: Share) -> I64:
    parts = [np.zeros(0, dtype=np.int64)]
    for box in share.boxes:
        if not array.grid.is_whole(box):
            raise LayoutError(
                "the grid has chunks that reach beyond what one rank holds",
                where=array.name,
                value=box,
            )
        parts.append(chunks_in(array.grid, box))
    return np.concatenate(parts)


def _shares(arrays: Sequence[Owned], stream: Sequence[_Stretch]) -> Iterator[I64]:
    """The chunks of each stretch whose middle lies in this rank's share of the stream."""
    sizes = []
    for stretch in stream:
        array = arrays[stretch.array]
        sizes.append(array.grid.stored_elements(stretch.chunks) * array.itemsize)
    total = sum(int(size.sum()) for size in sizes)
    begin = 0
    for stretch, size in zip(stream, sizes, strict=True):
        ends = begin + np.cumsum(size)
        count = stretch.replicas.count
        # Twice the middle of each chunk, so that integers decide alike on every machine.
        middles = (2 * ends - size).astype(object if total * count >= 1 << 61 else np.int64)
        yield stretch.chunks[middles * count // (2 * total) == stretch.replicas.index]
        begin += int(size.sum())


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
