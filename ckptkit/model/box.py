"""Regions of tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
