"""The grid of an array under another strategy, and what it takes to fill that from the old one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ckptkit.model import Box, Grid
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, choose_grid
from ckptkit.plan.save import chunks_in

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


def stored_sizes(grid: Grid, chunks: I64, itemsize: int) -> I64:
    """The bytes that chunks of a grid are stored as."""
    if grid.is_regular:
        return np.full(len(chunks), grid.chunk_elements * itemsize, dtype=np.int64)
    sizes: I64 = grid.stored_elements()[chunks] * itemsize
    return sizes


def batches(sizes: I64, limit: int) -> list[tuple[int, int]]:
    """Runs [i, j) of neighbours that have at most `limit` bytes together, or are one alone."""
    ends = np.cumsum(sizes)
    found, first, begin = list[tuple[int, int]](), 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, begin + limit, side="right")))
        found.append((first, last))
        first, begin = last, int(ends[last - 1])
    return found


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
        return Reading(len(chunks), int(stored_sizes(source, chunks, itemsizes[0]).sum()))
    sizes = stored_sizes(target, chunks, max(itemsizes))
    runs = batches(sizes, limit)
    batch = np.repeat(np.arange(len(runs)), [last - first for first, last in runs])
    needed, owner = _overlapping(source, target, chunks)
    # Once in a batch, however many of its chunks need it.
    keys = np.unique(batch[owner] * np.int64(source.chunk_count) + needed)
    return Reading(
        len(keys), int(stored_sizes(source, keys % source.chunk_count, itemsizes[0]).sum())
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
