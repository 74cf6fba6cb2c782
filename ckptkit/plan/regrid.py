"""The grid of an array under another strategy, and what it takes to fill that from the old one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from ckptkit.model import Box, Grid, Layout, Replicas
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, choose_grid
from ckptkit.plan.read import batches
from ckptkit.plan.write import chunks_in

I64 = npt.NDArray[np.int64]

# What copying chunks unread saves is worth up to this many of them, with a request and a row of the
# manifest each, where a new grid would have one.
_MUCH_SMALLER = 4
# As far as `choose_grid` itself may miss what is asked for, so that a grid it made is kept.
_MUCH_LARGER = 4


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read to fill some chunks: at most so many requests, and so many bytes."""

    requests: int
    nbytes: int


def target_grid(
    source: Grid,
    itemsize: int,
    edges: tuple[tuple[int, ...], ...],
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Grid:
    """The source's own grid, so that chunks go over as they are, where it has a border at every
    edge and its chunks are neither much smaller nor much larger than a new grid's.

    Of chunks that are much smaller, whole ones are joined.
    """
    chosen = choose_grid(source.shape, itemsize, edges, chunk_bytes)
    is_large = source.chunk_elements * itemsize > _MUCH_LARGER * chunk_bytes
    if is_large or not _has_borders(source, edges):
        return chosen
    for grid in (source, _joined(source, chosen, edges)):
        if grid.chunk_elements * _MUCH_SMALLER >= chosen.chunk_elements:
            return grid
    return chosen


@lru_cache(maxsize=65536)
def reading_of(
    source: Grid, target: Grid, boxes: tuple[Box, ...], itemsizes: tuple[int, int], limit: int
) -> Reading:
    """What is read, chunks of the source whole, to fill the target's chunks of some boxes in
    batches of at most `limit` bytes, of whichever item is larger; itemsizes are the source's and
    the target's.
    """
    parts = [np.zeros(0, dtype=np.int64), *(chunks_in(target, box) for box in boxes)]
    chunks = np.concatenate(parts)
    if source == target:
        return Reading(len(chunks), int(source.stored_elements(chunks).sum()) * itemsizes[0])
    sizes = target.stored_elements(chunks) * max(itemsizes)
    runs = batches(sizes, limit)
    batch = np.repeat(np.arange(len(runs)), [last - first for first, last in runs])
    needed, owner = _overlapping(source, target, chunks)
    # Once in a batch, however many of its chunks need it.
    keys = np.unique(batch[owner] * np.int64(source.chunk_count) + needed)
    return Reading(
        len(keys),
        int(source.stored_elements(keys % source.chunk_count).sum()) * itemsizes[0],
    )


def _joined(source: Grid, like: Grid, edges: tuple[tuple[int, ...], ...]) -> Grid:
    """The grid of whole chunks of the source that comes closest to another, with a border at every
    edge.
    """
    if not source.is_regular:
        return source
    shape = []
    for dim, own in enumerate(source.chunk_shape):
        count = max(1, _longest(like, dim) // own)
        if edges[dim]:
            most = math.gcd(*edges[dim]) // own
            count = next(n for n in range(min(count, most), 0, -1) if most % n == 0)
        shape.append(own * count)
    return Grid.regular(source.shape, tuple(shape))


def _longest(grid: Grid, dim: int) -> int:
    return int(np.diff(_borders(grid, dim)).max(initial=1))


def _overlapping(source: Grid, target: Grid, chunks: I64) -> tuple[I64, I64]:
    """For every pair of overlapping chunks: the source's number, and the place of the target's in
    `chunks`.
    """
    number = np.zeros(len(chunks), dtype=np.int64)
    place = np.arange(len(chunks))
    if not source.shape:
        return number, place
    index = np.unravel_index(chunks, target.counts)
    for dim, at in enumerate(index):
        first, last = _spans(source, target, dim)
        low, count = first[at][place], (last - first)[at][place]
        repeat = np.repeat(np.arange(len(place)), count)
        within = np.arange(len(repeat)) - np.repeat(np.cumsum(count) - count, count)
        number = number[repeat] * source.counts[dim] + low[repeat] + within
        place = place[repeat]
    return number, place


def _spans(source: Grid, target: Grid, dim: int) -> tuple[I64, I64]:
    """For each index of the target along a dim the first source index that overlaps it, and the
    one after the last.
    """
    inner, outer = _borders(source, dim), _borders(target, dim)
    first = np.searchsorted(inner, outer[:-1], side="right") - 1
    return first, np.searchsorted(inner, outer[1:], side="left")


def _borders(grid: Grid, dim: int) -> I64:
    extent = grid.shape[dim]
    if grid.is_regular:
        inner: Sequence[int] = range(0, extent, grid.chunk_shape[dim])
        return np.array([*inner, extent], dtype=np.int64)
    return np.array([0, *grid.edges[dim], extent], dtype=np.int64)


def _has_borders(grid: Grid, edges: tuple[tuple[int, ...], ...]) -> bool:
    for dim, cuts in enumerate(edges):
        if not cuts:
            continue
        if grid.is_regular:
            if any(cut % grid.chunk_shape[dim] for cut in cuts):
                return False
        elif not set(cuts) <= set(grid.edges[dim]):
            return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """What each rank's pack has of an array, and what is read for all of them together."""

    nbytes: npt.NDArray[np.float64]
    reading: Reading


@lru_cache(maxsize=16384)
def spread(
    layout: Layout, source: Grid, target: Grid, itemsizes: tuple[int, int], limit: int
) -> Spread:
    """How an array goes from one grid into the packs of a layout; itemsizes are the source's and
    the target's. What ranks hold alike is in equal shares.
    """
    nbytes = np.zeros(layout.strategy.world_size)
    requests = read = 0
    # Parts that overlap have holders of each stretch of their own: no part stands for others then.
    every = range(len(nbytes)) if layout.is_tangled else layout.distinct_ranks()
    for rank in every:
        first: tuple[Box, ...] = ()
        for share in layout.shares(rank):
            stored = sum(
                int(target.stored_elements(chunks_in(target, box)).sum()) * itemsizes[1]
                for box in share.boxes
            )
            ranks = [rank] if layout.is_tangled else _members(layout, share.replicas)
            nbytes[ranks] += stored / share.replicas.count
            # What ranks hold alike is read once, by whichever of them writes it.
            first += share.boxes if share.replicas.index == 0 else ()
        reading = reading_of(source, target, first, itemsizes, limit)
        requests, read = requests + reading.requests, read + reading.nbytes
    return Spread(nbytes, Reading(requests, read))


def _members(layout: Layout, replicas: Replicas) -> list[int]:
    """The ranks that hold the same: along each axis some, in all combinations."""
    sizes = layout.strategy.mesh.sizes
    ranks = np.zeros(1, dtype=np.int64)
    for axis, along in enumerate(replicas.key):
        members = np.array(list(cast("Iterable[int]", along)), dtype=np.int64)
        stride = math.prod(sizes[axis + 1 :])
        ranks = (ranks[:, None] + stride * members[None, :]).reshape(-1)
    found: list[int] = ranks.tolist()
    return found
