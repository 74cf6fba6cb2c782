"""Whether boxes cover a region exactly once, by the corners of the boxes: in another way than grids
and layouts are made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.errors import LayoutError
from ckptkit.model import Box

_Rows: TypeAlias = npt.NDArray[np.int64]

# How much the work may grow. Boxes that cut four dims at will stay below, and so does a grid of any
# rank; boxes of very many dims that agree in none of them would double it per dim without end.
_GROWTH, _ALWAYS_FINE = 16, 2**22


@dataclass(frozen=True, slots=True)
class Gap:
    """A point that a set of boxes does not cover exactly once."""

    kind: Literal["hole", "overlap", "outside"]
    at: tuple[int, ...]


def check_cover(region: Box, boxes: Iterable[Box]) -> Gap | None:
    """A point of the region that the boxes do not cover exactly once, or None: they do.

    Write f for how many boxes cover a point, less one inside the region. The mixed derivative of
    f is a signed sum of box corners, and f is zero everywhere exactly if these cancel. f at a point
    is the sum of the corners not beyond it in any dim, and those all come before it in
    lexicographic order: so at the first corner that is left, f is its sign, overlap or hole.
    """
    filled = [box for box in boxes if not box.is_empty]
    for box in filled:
        if not region.contains(box):
            return Gap("outside", _outside_point(region, box))
    if region.is_empty:
        return None
    filled.append(region)
    # Dims in which all boxes run from end to end tell nothing apart.
    dims = [
        dim
        for dim, span in enumerate(zip(region.offset, region.shape, strict=True))
        if any((box.offset[dim], box.shape[dim]) != span for box in filled)
    ]
    left = _residue(filled, dims)
    if left is None:
        return None
    excess, corner = left
    at = list(region.offset)
    for dim, coordinate in zip(dims, corner, strict=True):
        at[dim] = coordinate
    return Gap("overlap" if excess > 0 else "hole", tuple(at))


def _outside_point(region: Box, box: Box) -> tuple[int, ...]:
    at = list(box.offset)
    for dim, (start, stop) in enumerate(zip(region.offset, region.stop, strict=True)):
        if at[dim] < start:
            break
        if box.stop[dim] > stop:
            at[dim] = max(at[dim], stop)
            break
    return tuple(at)


def _residue(boxes: list[Box], dims: list[int]) -> tuple[int, tuple[int, ...]] | None:
    """The first corner that does not cancel, with its sign; the last box counts negative.

    Corners are taken dim by dim, and what cancels is dropped at once: boxes that lie side by side
    vanish in pairs, so that the work stays near the number of boxes and not 2**dims times it.
    """
    weights = np.ones(len(boxes), np.int64)
    weights[-1] = -1
    starts = np.array([[box.offset[dim] for dim in dims] for box in boxes], np.int64)
    lengths = np.array([[box.shape[dim] for dim in dims] for box in boxes], np.int64)
    starts, stops = (table.reshape(len(boxes), len(dims)) for table in (starts, starts + lengths))
    # Columns: the corner so far, then the starts and the stops of the dims still to come.
    rows = np.concatenate([starts, stops], axis=1)
    limit = max(_GROWTH * rows.size, _ALWAYS_FINE)
    for dim in range(len(dims)):
        if 2 * rows.size > limit:
            raise LayoutError("the boxes are too irregular to be checked", value=len(boxes))
        # Each corner becomes two: one at the start of this dim, and one of the other sign at its
        # stop, whose column is taken out.
        stop = rows.shape[1] - (len(dims) - dim)
        high = rows.copy()
        high[:, dim] = rows[:, stop]
        rows = np.delete(np.concatenate([rows, high]), stop, axis=1)
        rows, weights = _summed(rows, np.concatenate([weights, -weights]))
    rows, weights = _summed(rows, weights)
    if not len(rows):
        return None
    return int(weights[0]), tuple(rows[0].tolist())


def _summed(rows: _Rows, weights: npt.NDArray[Any]) -> tuple[_Rows, npt.NDArray[Any]]:
    """The distinct rows in lexicographic order with their summed weights, zeros left out."""
    if not len(rows):
        return rows, weights
    if rows.shape[1]:
        order = np.lexsort(rows.T[::-1])
        rows, weights = rows[order], weights[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    firsts = np.flatnonzero(is_first)
    sums = np.add.reduceat(weights, firsts)
    kept = sums != 0
    return rows[firsts[kept]], sums[kept]
