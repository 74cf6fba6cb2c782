"""Which pieces of which chunks fill a box, and in which requests they are read (DESIGN section
6).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

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
        return all(
            s.start == 0 and s.stop == n
            for s, n in zip(self.source, self.stored_shape, strict=True)
        )

    def element_span(self) -> tuple[int, int]:
        """The first element needed and the one after the last, in stored order."""
        first = last = 0
        for piece, extent in zip(self.source, self.stored_shape, strict=True):
            first = first * extent + piece.start
            last = last * extent + piece.stop - 1
        return first, last + 1


def pieces_of(grid: Grid, box: Box) -> Iterator[Piece]:
    """The pieces that fill a box, in chunk order."""
    dims = [_along(grid, dim, span, box) for dim, span in enumerate(grid.span(box))]
    for combination in product(*dims):
        number = 0
        for count, (index, *_) in zip(grid.counts, combination, strict=True):
            number = number * count + index
        yield Piece(
            number,
            tuple(part[1] for part in combination),
            tuple(part[2] for part in combination),
            tuple(part[3] for part in combination),
        )


def _along(grid: Grid, dim: int, span: range, box: Box) -> list[tuple[int, int, slice, slice]]:
    """Along one dim: (chunk index, its stored extent, slice of the chunk, slice of the box)."""
    low, high = box.offset[dim], box.offset[dim] + box.shape[dim]
    result = []
    for index in span:
        start, stop, stored = grid.interval(dim, index)
        begin, end = max(start, low), min(stop, high)
        source, target = slice(begin - start, end - start), slice(begin - low, end - low)
        result.append((index, stored, source, target))
    return result


def coalesce(
    pack: npt.NDArray[np.uint32], start: I64, stop: I64, *, gap: int, limit: int
) -> list[tuple[int, int]]:
    """Cut extents that are sorted by (pack, start) into runs [i, j) that one request reads.

    Neighbours join when at most `gap` bytes lie between them and the request stays within `limit`.
    """
    if not len(pack):
        return []
    apart = (pack[1:] != pack[:-1]) | (start[1:] - stop[:-1] > gap)
    borders = [0, *(np.flatnonzero(apart) + 1).tolist(), len(pack)]
    runs = []
    for first, end in pairwise(borders):
        begin = first
        while begin < end:
            fitting = int(np.searchsorted(stop[begin:end], start[begin] + limit, side="right"))
            runs.append((begin, begin + max(1, fitting)))
            begin = runs[-1][1]
    return runs
