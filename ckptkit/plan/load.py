"""Which pieces of which chunks fill a box, and in which requests they are read (DESIGN section
6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt

from ckptkit.model import Box, Grid

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk gives to a box: slices of the stored chunk, and of an array that holds
    exactly the box.
    """

    chunk: int
    stored_shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the box takes every stored element of the chunk."""
        slices = zip(self.source, self.stored_shape, strict=True)
        return all(s.start == 0 and s.stop == n for s, n in slices)


@dataclass(frozen=True, slots=True)
class _Step:
    """What one chunk index means along one dim."""

    index: int
    stored: int
    source: slice
    target: slice


class Pieces(Sequence[Piece]):
    """The pieces that fill a box, in chunk order; each is made when asked for, so that a plan over
    many chunks is arrays and not objects.
    """

    __slots__ = ("_dims", "_grid", "_length")

    def __init__(self, grid: Grid, box: Box) -> None:
        self._grid = grid
        spans = enumerate(grid.span(box))
        self._dims = [_along(grid, dim, span, box) for dim, span in spans]
        self._length = math.prod(map(len, self._dims))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> list[Piece]: ...
    def __getitem__(self, at: int | slice) -> Piece | list[Piece]:
        if isinstance(at, slice):
            return [self[i] for i in range(self._length)[at]]
        rest = range(self._length)[at]
        steps = []
        for along in reversed(self._dims):
            rest, place = divmod(rest, len(along))
            steps.append(along[place])
        steps.reverse()
        return Piece(
            self._grid.flat(tuple([step.index for step in steps])),
            tuple([step.stored for step in steps]),
            tuple([step.source for step in steps]),
            tuple([step.target for step in steps]),
        )

    def chunks(self) -> I64:
        """The number of each piece's chunk."""
        numbers = np.zeros(1, dtype=np.int64)
        for along, count in zip(self._dims, self._grid.counts, strict=True):
            indices = np.array([step.index for step in along], dtype=np.int64)
            numbers = (numbers[:, None] * count + indices[None, :]).reshape(-1)
        return numbers

    def element_spans(self) -> tuple[I64, I64]:
        """For each piece the first element needed and the one after the last, in stored order."""
        first = last = np.zeros(1, dtype=np.int64)
        for along in self._dims:
            stored = np.array([step.stored for step in along], dtype=np.int64)
            start = np.array([step.source.start for step in along], dtype=np.int64)
            stop = np.array([step.source.stop for step in along], dtype=np.int64)
            first = (first[:, None] * stored[None, :] + start[None, :]).reshape(-1)
            last = (last[:, None] * stored[None, :] + (stop - 1)[None, :]).reshape(-1)
        return first, last + 1


def pieces_of(grid: Grid, box: Box) -> Pieces:
    """The pieces of the chunks of a grid that fill a box."""
    return Pieces(grid, box)


def _along(grid: Grid, dim: int, span: range, box: Box) -> list[_Step]:
    low, high = box.offset[dim], box.offset[dim] + box.shape[dim]
    steps = []
    for index in span:
        start, stop, stored = grid.interval(dim, index)
        begin, end = max(start, low), min(stop, high)
        source, target = slice(begin - start, end - start), slice(begin - low, end - low)
        steps.append(_Step(index, stored, source, target))
    return steps


def coalesce(
    pack: npt.NDArray[np.uint32], start: I64, stop: I64, *, gap: int, limit: int
) -> list[tuple[int, int]]:
    """Cut extents that are sorted by (pack, start) into runs [i, j) that one request reads.

    Neighbours join when at most `gap` bytes lie between them and the request stays within `limit`.
    """
    if not len(pack):
        return []
    other = pack[1:] != pack[:-1]
    # How far the extents so far reach: one may lie inside of an earlier one.
    reach = stop.copy()
    for first, end in pairwise([0, *(np.flatnonzero(other) + 1).tolist(), len(pack)]):
        np.maximum.accumulate(stop[first:end], out=reach[first:end])
    apart = other | (start[1:] - reach[:-1] > gap)
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(pack)]
    runs = []
    for first, end in pairwise(borders):
        begin = first
        while begin < end:
            fitting = int(np.searchsorted(reach[begin:end], start[begin] + limit, side="right"))
            runs.append((begin, begin + max(1, fitting)))
            begin = runs[-1][1]
    return runs
