"""Regions of tensors, and whether some of them cover one exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.errors import LayoutError

# Coordinates stay below this, so that sums and differences of two fit int64 everywhere.
MAX_COORDINATE = 2**62


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor, in global coordinates."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise LayoutError("offset and shape of a box differ in the number of dims", value=self)
        for start, length in zip(self.offset, self.shape, strict=True):
            if start < 0 or length < 0:
                raise LayoutError("a box cannot have negative numbers", value=self)
            if start + length > MAX_COORDINATE:
                raise LayoutError("a box cannot reach beyond 2**62", value=self)

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The first coordinate behind the box, per dim."""
        return tuple(a + n for a, n in zip(self.offset, self.shape, strict=True))

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    def intersect(self, other: Box) -> Box | None:
        """The region both boxes cover, or None when they only touch or are apart."""
        self._check_ndim(other)
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offset.append(start)
            shape.append(stop - start)
        return Box(tuple(offset), tuple(shape))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The slices that select the box in an array that holds exactly `outer`."""
        if not outer.contains(self):
            raise LayoutError(f"the box is not inside {outer}", value=self)
        return tuple(
            slice(a - b, a - b + n)
            for a, n, b in zip(self.offset, self.shape, outer.offset, strict=True)
        )

    def contains(self, other: Box) -> bool:
        """Whether the other box, borders included, lies inside this one."""
        self._check_ndim(other)
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def split(self, dim: int, at: int) -> tuple[Box, Box]:
        """The parts before and from the global coordinate `at` of a dim; one may be empty."""
        if not 0 <= dim < self.ndim:
            raise LayoutError(f"a box of {self.ndim} dims has no such dim", value=dim)
        start, length = self.offset[dim], self.shape[dim]
        if not start <= at <= start + length:
            raise LayoutError(f"{self} cannot be split outside itself", value=at)
        return (
            Box(self.offset, _replaced(self.shape, dim, at - start)),
            Box(
                _replaced(self.offset, dim, at),
                _replaced(self.shape, dim, start + length - at),
            ),
        )

    def _check_ndim(self, other: Box) -> None:
        if len(self.shape) != len(other.shape):
            raise LayoutError(f"the box has not the rank of {self}", value=other)


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of a range of elements in C order, themselves in C order: at most 2n-1."""
    size = Box.whole(shape).size
    if not 0 <= start <= stop <= size:
        raise LayoutError(f"not a range of the {size} elements of {shape}", value=(start, stop))
    return [] if start == stop else _flat_boxes(shape, (), start, stop)


def _flat_boxes(shape: tuple[int, ...], above: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """The boxes of a non-empty range below the fixed leading coordinates `above`."""
    dim = len(above)
    if dim == len(shape):
        return [Box(above, (1,) * dim)]
    row = math.prod(shape[dim + 1 :])
    # The whole rows: before `first` and from `last` on the range has a piece of one at most.
    first, last = -(-start // row), stop // row
    if first > last:  # all of it lies inside of one row
        return _flat_boxes(shape, (*above, last), start - last * row, stop - last * row)
    boxes: list[Box] = []
    if start < first * row:
        boxes += _flat_boxes(shape, (*above, first - 1), start - (first - 1) * row, row)
    if first < last:
        offset = (*above, first, *(0,) * (len(shape) - dim - 1))
        boxes.append(Box(offset, (*(1,) * dim, last - first, *shape[dim + 1 :])))
    if last * row < stop:
        boxes += _flat_boxes(shape, (*above, last), 0, stop - last * row)
    return boxes


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


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
