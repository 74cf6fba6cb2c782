"""How the axes of a mesh cut one dim: pure arithmetic on intervals, never a loop over ranks."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from ckptkit.errors import LayoutError

# Ascending (start, stop) pairs that neither touch nor overlap.
Intervals: TypeAlias = tuple[tuple[int, int], ...]
# The coordinates on the axes that cut a dim, by position in the mesh.
Coords: TypeAlias = tuple[int, ...]
# Per axis: its position, who holds the same along it, and which of these this rank is.
Digit: TypeAlias = tuple[int, Sequence[object], int]


@dataclass(frozen=True, slots=True)
class AxisCut:
    """One axis that cuts a dim: its position in the mesh, its name and size, and how it cuts."""

    axis: int
    name: str
    size: int
    blocks: tuple[int, ...] | None
    unit: int

    def group(self, length: int) -> int:
        """How many consecutive ranks hold the same piece of one block of this length."""
        # More ranks than heads (GQA): none is cut, some hold the same one.
        units = length // self.unit
        return self.size // units if self.unit > 1 and 0 < units < self.size else 1

    @property
    def is_tangled(self) -> bool:
        """Whether some blocks are shared by more ranks than others, so that parts overlap."""
        return self.blocks is not None and len({self.group(b) for b in self.blocks}) > 1

    def sharers(self, length: int, coord: int) -> range:
        """The coordinates that hold the same non-empty piece as this one; not if tangled."""
        group = self.group(self.blocks[0] if self.blocks else length)
        first = coord - coord % group
        return range(first, first + group)

    def piece(self, intervals: Intervals, coord: int) -> Intervals:
        """What the rank at a coordinate gets of a list of intervals."""
        base, found = 0, list[tuple[int, int]]()
        for block in self.blocks or (length_of(intervals),):
            start, stop = self._span(block, coord)
            found += _taken(intervals, base + start, base + stop)
            base += block
        return merged(found)

    def lengths(self, length: int) -> set[int]:
        """All lengths that pieces of this length can have; refuses a length that does not fit."""
        blocks, where = self.blocks or (length,), f"axis {self.name}"
        if sum(blocks) != length:
            raise LayoutError(f"the blocks must add up to {length}", where=where, value=self.blocks)
        # The length of a piece changes behind the last full piece of a block, and nowhere else.
        coords = {0}
        for block in blocks:
            if block % self.unit:
                raise LayoutError(
                    f"a length of {block} is no multiple of the unit", where=where, value=self.unit
                )
            units = block // self.unit
            if self.unit > 1 and 0 < units < self.size and self.size % units:
                raise LayoutError(
                    f"{units} units cannot be shared evenly by the ranks of the axis",
                    where=where,
                    value=self.size,
                )
            full = block // (self._step(block) or 1)
            coords |= {c for c in (full, full + 1) if c < self.size}
        spans = [[self._span(block, c) for block in blocks] for c in coords]
        return {sum(stop - start for start, stop in pieces) for pieces in spans}

    def points(self, intervals: Intervals) -> Iterator[range]:
        """Where this axis cuts inside the intervals; only for an axis without blocks."""
        step, base = self._step(length_of(intervals)), 0
        for start, stop in intervals:
            # Cuts fall on multiples of the step counted over all intervals, of which `base` lie
            # before this one; where it begins is an edge already.
            first = start + (-base % step or step)
            yield range(first, stop, step)
            base += stop - start

    def _step(self, block: int) -> int:
        # Rounded up, as torch.chunk does it: the last pieces are smaller or empty. Rounded down,
        # with what is left shared out, each rank would have other rows than torch gives it.
        units = block // self.unit
        return self.unit if self.group(block) > 1 else -(-units // self.size) * self.unit

    def _span(self, block: int, coord: int) -> tuple[int, int]:
        step = self._step(block)
        place = coord // self.group(block)
        return min(place * step, block), min((place + 1) * step, block)


@dataclass(frozen=True, slots=True)
class DimCut:
    """A dim and the axes that cut it, in the order in which they cut."""

    length: int
    cuts: tuple[AxisCut, ...]

    def __post_init__(self) -> None:
        # Only to refuse: an outer cut may leave a piece that an inner one cannot cut.
        lengths = {self.length}
        for cut in self.cuts:
            lengths = {piece for length in lengths for piece in cut.lengths(length)}

    @property
    def is_tangled(self) -> bool:
        return any(cut.is_tangled for cut in self.cuts)

    @property
    def whole(self) -> Intervals:
        return ((0, self.length),) if self.length else ()

    def intervals(self, coords: tuple[int, ...]) -> Intervals:
        """What the rank at these coordinates of the mesh holds of the dim."""
        intervals = self.whole
        for cut in self.cuts:
            intervals = cut.piece(intervals, coords[cut.axis])
        return intervals

    def sharers(self, coords: tuple[int, ...]) -> list[Digit]:
        """Who holds what the rank at these coordinates of the mesh holds; not if tangled."""
        intervals, found = self.whole, list[Digit]()
        for cut in self.cuts:
            coord = coords[cut.axis]
            held = cut.sharers(length_of(intervals), coord)
            found.append((cut.axis, held, coord - held.start))
            intervals = cut.piece(intervals, coord)
        return found

    def pieces(self, depth: int) -> Iterator[tuple[tuple[range, ...], Intervals]]:
        """The non-empty pieces the first axes make, with the coordinates that hold each.

        A piece comes once, except behind a tangled axis.
        """
        if depth == 0:
            if self.length:
                yield (), self.whole
            return
        cut = self.cuts[depth - 1]
        for above, intervals in self.pieces(depth - 1):
            coord = 0
            while coord < cut.size:
                piece = cut.piece(intervals, coord)
                if not piece:  # nor do the coordinates behind it get any
                    break
                held = (
                    range(coord, coord + 1)
                    if cut.is_tangled
                    else cut.sharers(length_of(intervals), coord)
                )
                yield (*above, held), piece
                coord = held.stop

    def edges(self) -> tuple[int, ...]:
        """All interior cut coordinates, ascending."""
        found: set[int] = set()
        depth = len(self.cuts)
        # What the last axis cuts out of one interval is a range, and needs no piece each.
        by_range = depth > 0 and self.cuts[-1].blocks is None
        for _, intervals in self.pieces(depth - 1 if by_range else depth):
            for interval in intervals:
                found.update(interval)
            if by_range:
                found.update(*self.cuts[-1].points(intervals))
        return tuple(sorted(found - {0, self.length}))


def length_of(intervals: Intervals) -> int:
    """How much the intervals hold together."""
    return sum(stop - start for start, stop in intervals)


def _taken(intervals: Intervals, start: int, stop: int) -> list[tuple[int, int]]:
    """The intervals between two local positions."""
    found, base = [], 0
    for a, b in intervals:
        low, high = max(start - base, 0), min(stop - base, b - a)
        if low < high:
            found.append((a + low, a + high))
        base += b - a
    return found


def merged(intervals: list[tuple[int, int]]) -> Intervals:
    """The intervals with those that touch made one."""
    found: list[tuple[int, int]] = []
    for start, stop in intervals:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Tangle:
    """All that the coordinates of one tangled dim hold, and who shares each stretch of it.

    Of a fused QKV each rank may have a Q of its own, and a K that it shares with its neighbour: its
    part as a whole is then nobody else's, but each element of K has two holders. So who holds what
    is looked up here, stretch by stretch.
    """

    axes: tuple[int, ...]
    by_coords: dict[Coords, Intervals]
    by_part: dict[Intervals, list[Coords]]
    # The stretch of the dim from borders[i] to borders[i + 1] is held by holders[i].
    borders: list[int]
    holders: list[tuple[Coords, ...]]

    @classmethod
    def of(cls, dim: DimCut) -> Tangle:
        order = sorted(range(len(dim.cuts)), key=lambda i: dim.cuts[i].axis)
        held: dict[Coords, Intervals] = {}
        for ranges, intervals in dim.pieces(len(dim.cuts)):
            for coords in product(*(ranges[i] for i in order)):
                held[coords] = intervals
        held = dict(sorted(held.items()))
        by_part = defaultdict(list)
        for coords, intervals in held.items():
            by_part[intervals].append(coords)
        borders = [0, *dim.edges(), dim.length]
        place = {border: i for i, border in enumerate(borders)}
        holders: list[list[Coords]] = [[] for _ in borders[1:]]
        for coords, intervals in held.items():
            for start, stop in intervals:
                for i in range(place[start], place[stop]):
                    holders[i].append(coords)
        axes = tuple(dim.cuts[i].axis for i in order)
        return cls(axes, held, dict(by_part), borders, list(map(tuple, holders)))

    def sharers(self, coords: tuple[int, ...]) -> list[Digit]:
        """Who holds exactly what the rank at these mesh coordinates holds of the dim."""
        own = self._own(coords)
        return self._digits(self.by_part[self.by_coords[own]], own)

    def groups(self, coords: tuple[int, ...]) -> list[tuple[Intervals, list[Digit]]]:
        """What the rank at these mesh coordinates holds, by who else holds it."""
        own = self._own(coords)
        found: dict[tuple[Coords, ...], list[tuple[int, int]]] = defaultdict(list)
        for start, stop in self.by_coords.get(own, ()):
            for i in range(bisect_left(self.borders, start), bisect_left(self.borders, stop)):
                found[self.holders[i]].append((self.borders[i], self.borders[i + 1]))
        return [(merged(part), self._digits(holders, own)) for holders, part in found.items()]

    def _own(self, coords: tuple[int, ...]) -> Coords:
        return tuple(coords[axis] for axis in self.axes)

    def _digits(self, holders: Sequence[Coords], own: Coords) -> list[Digit]:
        along = [tuple(sorted(set(column))) for column in zip(*holders, strict=True)]
        if math.prod(len(members) for members in along) == len(holders):
            return [
                (axis, _as_range(members), members.index(coord))
                for axis, members, coord in zip(self.axes, along, own, strict=True)
            ]
        # The holders are no product of coordinates per axis: the first axis stands for all.
        first = (self.axes[0], tuple(holders), list(holders).index(own))
        return [first, *((axis, ((),), 0) for axis in self.axes[1:])]


def _as_range(members: tuple[int, ...]) -> Sequence[int]:
    # As dims that are not tangled say it: equal sets of ranks have to be equal keys.
    whole = range(members[0], members[-1] + 1)
    return whole if len(whole) == len(members) else members
