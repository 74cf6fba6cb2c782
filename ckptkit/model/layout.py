"""What each rank holds of one tensor, and who else holds the same.

A `Layout` comes of a shape, a strategy and a placement for each axis of its mesh. All it says it
computes from the cuts of single dims (`model.cut`): nothing walks over all ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import Any, TypeAlias

from ckptkit.errors import LayoutError
from ckptkit.model.box import Box
from ckptkit.model.cut import AxisCut, Digit, DimCut, Intervals, Tangle
from ckptkit.model.strategy import (
    Axis,
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
)

# Per dim: start in the tensor, length, start in what the rank holds.
_Run: TypeAlias = tuple[int, int, int]

_PARTS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor of one shape lies on the ranks of a strategy; made by `layout_of`."""

    shape: tuple[int, ...]
    strategy: Strategy
    placements: tuple[Placement, ...]
    _dims: tuple[DimCut, ...] = field(init=False, compare=False, repr=False)
    _holder: dict[int, int] = field(init=False, compare=False, repr=False)
    _strides: tuple[int, ...] = field(init=False, compare=False, repr=False)
    # Filled when they are asked for: a frozen value can fill what it holds. `_edges` gets one item.
    _parts: dict[int, Part] = field(init=False, compare=False, repr=False)
    _edges: list[tuple[tuple[int, ...], ...]] = field(init=False, compare=False, repr=False)
    _tangles: dict[int, Tangle] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        Box.whole(self.shape)  # refuses a shape that is none
        axes = self.strategy.mesh.axes
        _check_placements(self.shape, axes, self.placements)
        sizes = [axis.size for axis in axes]
        values = {
            "_dims": tuple(
                DimCut(length, _cuts(dim, axes, self.placements))
                for dim, length in enumerate(self.shape)
            ),
            "_holder": {
                i: placement.coord
                for i, placement in enumerate(self.placements)
                if isinstance(placement, Owner | Stage)
            },
            "_strides": tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes))),
            "_parts": {},
            "_edges": [],
            "_tangles": {},
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Without what is derived or cached: a layout travels to worker processes.
        return (layout_of, (self.shape, self.strategy, self.placements))

    def part(self, rank: int) -> Part:
        part = self._parts.get(rank)
        if part is not None:
            return part
        coords = self.strategy.mesh.coords(rank)
        runs = [_runs(dim.intervals(coords)) for dim in self._dims]
        shape = tuple(sum(length for _, length, _ in run) for run in runs)
        if any(coords[axis] != coord for axis, coord in self._holder.items()):
            # Another rank owns it: here it has no rows, of the width that they would have.
            part = Part((0, *shape[1:]) if shape else (), (), ())
        else:
            part = Part(shape, *_boxes(runs))
        if len(self._parts) >= _PARTS_KEPT:
            self._parts.clear()
        self._parts[rank] = part
        return part

    def replicas(self, rank: int) -> Replicas:
        """The ranks that hold exactly the part this rank holds."""
        if self.part(rank).is_empty:
            return Replicas((), 0, 0)
        coords = self.strategy.mesh.coords(rank)
        digits: list[Digit] = []
        for d, dim in enumerate(self._dims):
            known = self._tangle(d) if dim.is_tangled else dim
            digits += known.sharers(coords)
        return self._replicas(coords, digits)

    def shares(self, rank: int) -> tuple[Share, ...]:
        """The part of a rank by who else holds it: over all ranks, the shares of index 0 cover the
        tensor exactly once.

        It is one share, unless blocks of a fused dim are shared by different numbers of ranks:
        then ranks hold different parts that overlap.
        """
        part = self.part(rank)
        if part.is_empty:
            return ()
        if not self.is_tangled:
            return (Share(part.boxes, part.places, self.replicas(rank)),)
        coords = self.strategy.mesh.coords(rank)
        shares = []
        for groups in product(*(self._groups(d, coords) for d in range(len(self._dims)))):
            boxes, places = _boxes([runs for runs, _ in groups])
            digits = [digit for _, found in groups for digit in found]
            shares.append(Share(boxes, places, self._replicas(coords, digits)))
        return tuple(shares)

    @property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """Per dim the interior coordinates at which the part of any rank begins or ends."""
        if not self._edges:
            nothing = 0 in self.shape
            self._edges.append(tuple(() if nothing else dim.edges() for dim in self._dims))
        return self._edges[0]

    @property
    def is_tangled(self) -> bool:
        """Whether ranks hold different parts that overlap."""
        return any(dim.is_tangled for dim in self._dims)

    @property
    def first_rank(self) -> int:
        """The lowest rank that holds the tensor, or would if it had elements."""
        return sum(coord * self._strides[axis] for axis, coord in self._holder.items())

    def distinct_ranks(self) -> Iterator[int]:
        """The lowest rank of every distinct part that is not empty."""
        for offsets in product(*(self._offsets(d) for d in range(len(self._dims)))):
            yield self.first_rank + sum(offsets)

    def _groups(self, d: int, coords: tuple[int, ...]) -> list[tuple[list[_Run], list[Digit]]]:
        dim = self._dims[d]
        runs = _runs(dim.intervals(coords))
        if not dim.is_tangled:
            return [(runs, dim.sharers(coords))]
        return [
            ([_local(runs, start, stop) for start, stop in intervals], digits)
            for intervals, digits in self._tangle(d).groups(coords)
        ]

    def _replicas(self, coords: tuple[int, ...], digits: list[Digit]) -> Replicas:
        """The ranks that the digits of all dims, the owners and the replicated axes leave."""
        axes = self.strategy.mesh.axes
        members: list[Sequence[object]] = [range(axis.size) for axis in axes]
        places = list(coords)
        for axis, coord in self._holder.items():
            members[axis], places[axis] = range(coord, coord + 1), 0
        for axis, held, place in digits:
            members[axis], places[axis] = held, place
        # The places along the axes are the digits of one number: this rank's, of all these ranks.
        index, count = 0, 1
        for held, place in zip(members, places, strict=True):
            index = index * len(held) + place
            count *= len(held)
        return Replicas(tuple(members), index, count)

    def _offsets(self, d: int) -> list[int]:
        """Per distinct piece of a dim, what its lowest coordinates add to a rank."""
        dim = self._dims[d]
        if dim.is_tangled:
            tangle = self._tangle(d)
            axes = tangle.axes
            found = [held[0] for held in tangle.by_part.values()]
        else:
            axes = tuple(cut.axis for cut in dim.cuts)
            found = [tuple(r.start for r in ranges) for ranges, _ in dim.pieces(len(axes))]
        strides = [self._strides[axis] for axis in axes]
        return [sum(c * s for c, s in zip(coords, strides, strict=True)) for coords in found]

    def _tangle(self, d: int) -> Tangle:
        if d not in self._tangles:
            self._tangles[d] = Tangle.of(self._dims[d])
        return self._tangles[d]


def layout_of(
    shape: Sequence[int], strategy: Strategy | str, placements: Sequence[Placement]
) -> Layout:
    """The layout of a tensor, given one placement per mesh axis, in the order of the mesh."""
    return _layout_of(tuple(map(operator.index, shape)), Strategy.of(strategy), tuple(placements))


_layout_of = lru_cache(maxsize=8192)(Layout)


def _check_placements(
    shape: tuple[int, ...], axes: tuple[Axis, ...], placements: tuple[Placement, ...]
) -> None:
    if len(placements) != len(axes):
        raise LayoutError(
            f"a mesh of {len(axes)} axes needs as many placements", value=len(placements)
        )
    for axis, placement in zip(axes, placements, strict=True):
        where = f"axis {axis.name}"
        match placement:
            case Shard(dim=dim) | Strided(dim=dim) if dim >= len(shape):
                what = f"a tensor of {len(shape)} dims cannot be cut along this one"
                hint = "" if shape else "a 0-d tensor is replicated, owned or staged"
                raise LayoutError(what, where=where, value=dim, hint=hint)
            case Owner(coord=coord) | Stage(coord=coord) if coord >= axis.size:
                raise LayoutError(f"the axis has {axis.size} ranks", where=where, value=coord)
            case Replicate() | Shard() | Strided() | Owner() | Stage():
                pass
            case _:
                raise LayoutError("not a placement", where=where, value=placement)


def _cuts(
    dim: int, axes: tuple[Axis, ...], placements: tuple[Placement, ...]
) -> tuple[AxisCut, ...]:
    """The axes that cut a dim, in mesh order, but a strided one behind all those to its right."""
    order: list[AxisCut] = []
    # From the right: when a strided axis comes, all that cut before it are there.
    for i in reversed(range(len(axes))):
        axis, placement = axes[i], placements[i]
        if isinstance(placement, Shard) and placement.dim == dim:
            cut = AxisCut(i, axis.name, axis.size, placement.blocks, placement.unit)
            order.insert(0, cut)
        elif isinstance(placement, Strided) and placement.dim == dim:
            order.append(AxisCut(i, axis.name, axis.size, None, placement.unit))
    return tuple(order)


def _runs(intervals: Intervals) -> list[_Run]:
    runs, place = [], 0
    for start, stop in intervals:
        runs.append((start, stop - start, place))
        place += stop - start
    return runs


def _local(runs: list[_Run], start: int, stop: int) -> _Run:
    """The run of a stretch that lies inside one of the runs."""
    return next(
        (start, stop - start, place + start - first)
        for first, length, place in runs
        if first <= start and stop <= first + length
    )


def _boxes(runs: list[list[_Run]]) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
    """The boxes of all combinations of runs, row-major, in the tensor and in the part."""
    boxes, places = [], []
    for chosen in product(*runs):
        shape = tuple(length for _, length, _ in chosen)
        boxes.append(Box(tuple(start for start, _, _ in chosen), shape))
        places.append(Box(tuple(place for _, _, place in chosen), shape))
    return tuple(boxes), tuple(places)


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: boxes in global coordinates, in the order of its memory.

    `shape` is that of the local tensor, `places` are the same boxes within it. A rank that holds
    nothing has no boxes.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    places: tuple[Box, ...]

    @property
    def is_empty(self) -> bool:
        return not self.boxes


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same: equal keys are equal sets of ranks, also across tensors.

    `index` is this rank's place among the `count` of them. Of nothing, nobody is a replica: the
    key is then empty and the count 0.
    """

    key: tuple[Hashable, ...]
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """Boxes of a part that the very same ranks hold."""

    boxes: tuple[Box, ...]
    places: tuple[Box, ...]
    replicas: Replicas


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """The boxes of a tensor that one rank alone writes, where not its layout says so but somebody
    else's plan, which has given each element to one rank.
    """

    strategy: Strategy
    part: Part
    first_rank: int
    """Who writes what is said of the tensor where it has no elements."""

    def shares(self, _: int) -> tuple[Share, ...]:
        """As those of a `Layout`, of the rank that it was assigned to."""
        if self.part.is_empty:
            return ()
        return (Share(self.part.boxes, self.part.places, Replicas((), 0, 1)),)
