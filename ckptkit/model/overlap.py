"""Who holds what of a dim in which parts overlap.

That is a fused tensor (query, key, value) whose key heads are shared by more ranks than its query
heads: rare enough for a table of all coordinates on the axes that cut the dim.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

from ckptkit.model.cut import DimCut, Intervals, merged

# The coordinates on the axes that cut the dim, by position in the mesh.
Coords: TypeAlias = tuple[int, ...]
# Per axis: its position, who holds the same along it, and which of these this rank is.
Digit: TypeAlias = tuple[int, Sequence[object], int]


@dataclass(frozen=True, slots=True)
class Tangle:
    """All that the coordinates of one tangled dim hold, and who shares each stretch of it."""

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
        axes = tuple(dim.cuts[i].axis for i in order)
        return cls(axes, held, dict(by_part), borders, _holders(borders, held))

    def part_digits(self, coords: tuple[int, ...]) -> list[Digit]:
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
        # No product of coordinates per axis: the first axis stands for all of them.
        first = (self.axes[0], tuple(holders), list(holders).index(own))
        return [first, *((axis, ((),), 0) for axis in self.axes[1:])]


def _holders(borders: list[int], held: dict[Coords, Intervals]) -> list[tuple[Coords, ...]]:
    place = {border: i for i, border in enumerate(borders)}
    holders: list[list[Coords]] = [[] for _ in borders[1:]]
    for coords, intervals in held.items():
        for start, stop in intervals:
            for i in range(place[start], place[stop]):
                holders[i].append(coords)
    return [tuple(who) for who in holders]


def _as_range(members: tuple[int, ...]) -> Sequence[int]:
    whole = range(members[0], members[-1] + 1)
    return whole if len(whole) == len(members) else members
