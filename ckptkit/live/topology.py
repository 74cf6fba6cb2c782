"""From groups of ranks to a strategy, and from torch's placements to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptkit.errors import LayoutError, StrategyError
from ckptkit.live.cuts import Run, own_layout, refined
from ckptkit.live.groups import Group, check_upwards, ranks_along
from ckptkit.live.ranks import World
from ckptkit.model import (
    Layout,
    Owner,
    Part,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    layout_of,
)
from ckptkit.model.strategy import Axis, Mesh

# Ranks that differ along these read data of their own, and so do those that experts are spread
# over; ranks along `tp` and `pp` work on the same.
_DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3", "ep")
# Where two wrappers join the same ranks, what cuts says more than what repeats.
_PRECEDENCE = ("pp", "tp", "ep", "fsdp", "zero1", "zero2", "zero3", "ddp")
_KEPT_ALIKE = ("ddp", "zero1")
_PIPELINES = ("pp", "pipe", "pipeline", "stage")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")


def data_rank(strategy: Strategy, rank: int) -> tuple[int, int]:
    """Which share of a job's data a rank reads, and how many shares there are."""
    at, of = 0, 1
    axes = strategy.mesh.axes
    for axis, coord in zip(axes, strategy.mesh.coords(rank), strict=True):
        if axis.kind in _DATA:
            at, of = at * axis.size + coord, of * axis.size
    return at, of


def is_spread_alike(one: Strategy, other: Strategy) -> bool:
    """Whether ranks of one number do the same in two jobs, however they share out parameters."""
    kinds = (
        [("data" if a.kind in _DATA else a.kind, a.size) for a in each.mesh.axes if a.size > 1]
        for each in (one, other)
    )
    return next(kinds) == next(kinds)


@dataclass(frozen=True, slots=True)
class Topology:
    """The strategy of a job and, for each of its axes, how far its ranks are apart."""

    strategy: Strategy
    rank: int
    strides: tuple[int, ...]
    replicas: frozenset[str]
    """The axes whose ranks are known to hold the same parameters."""
    by_rank: frozenset[tuple[int, ...]] = frozenset()
    """Lines of meshes that do not go upwards, as what cuts along them does."""
    _runs_of: dict[DeviceMesh, tuple[Run, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, world: World, groups: Iterable[Group]) -> Topology:
        """The topology that the groups of one rank span: the coarsest mesh of which each of them
        is a line, along one axis or several; ranks between them repeat each other.
        """
        chosen = list(groups)
        sized = [group for group in chosen if group.size > 1]
        axes = _refined(sized, world.size)
        taken = {group.kind for group in axes}
        axes += [g for g in _singles(chosen) if g.kind not in taken]
        named = _named(axes)
        strategy = Strategy(Mesh(tuple(named)))
        kept_alike = [
            axis.name
            for axis, group in zip(named, axes, strict=True)
            if axis.kind in _KEPT_ALIKE and not group.is_assumed
        ]
        strides = tuple(group.stride for group in axes)
        by_rank = frozenset(group.by_mesh for group in chosen)
        return cls(strategy, world.rank, strides, frozenset(kept_alike), by_rank)

    def mesh_axes(self, tensor: torch.Tensor) -> frozenset[str]:
        """The axes of a DTensor's mesh, along which it keeps its replicas alike."""
        if not isinstance(tensor, DTensor):
            return frozenset()
        axes = self.strategy.mesh.axes
        return frozenset(axes[at].name for run in self._runs(tensor.device_mesh) for at in run)

    @property
    def pipeline(self) -> int | None:
        """The place of the pipeline axis, where there is one of more than one rank."""
        axes = enumerate(self.strategy.mesh.axes)
        return next((at for at, axis in axes if axis.kind == "pp" and axis.size > 1), None)

    def coordinate(self, axis: int) -> int:
        """Where this rank is along an axis."""
        return self.strategy.mesh.coords(self.rank)[axis]

    def part(self, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> Part:
        """What this rank holds of a tensor that the axes cut so; replicated along the others."""
        return self.layout(name, shape, placements).part(self.rank)

    def layout(
        self, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]
    ) -> Layout:
        """What each rank holds of such a tensor."""
        axes = self.strategy.mesh.axes
        row = [placements.get(axis.name, Replicate()) for axis in axes]
        try:
            return layout_of(shape, self.strategy, row)
        except LayoutError as error:
            error.where = f"{name}: {error.where}" if error.where else name
            raise

    def placements(
        self, name: str, tensor: torch.Tensor, *, staged: bool
    ) -> Mapping[str, Placement]:
        """How the axes cut a tensor, as it says itself; `staged` if only its stage has it."""
        found: dict[str, Placement] = {}
        if staged and self.pipeline is not None:
            axis = self.strategy.mesh.axes[self.pipeline].name
            found[axis] = Stage(self.coordinate(self.pipeline))
        if isinstance(tensor, DTensor):
            said, _ = self._of_dtensor(name, tensor)
            found |= said
        return found

    def own_part(self, name: str, tensor: torch.Tensor) -> Part | None:
        """What this rank holds of a tensor, where `placements` cannot say it: they are then those
        of the nearest layout that can be said, in which it is saved.
        """
        if not isinstance(tensor, DTensor):
            return None
        _, own = self._of_dtensor(name, tensor)
        if own is None:
            return None
        place = tuple(line.index(self.rank) for line in self._lines(tensor.device_mesh))
        return own.part(own.strategy.mesh.rank(place))

    def _of_dtensor(self, name: str, tensor: DTensor) -> tuple[dict[str, Placement], Layout | None]:
        """How the axes cut it; and how its own mesh does, where the axes cannot do the same."""
        own = own_layout(name, tensor)
        mesh = tensor.device_mesh
        for dim, placement in enumerate(own.placements):
            line = ranks_along(mesh, dim)
            if not isinstance(placement, Replicate) and line not in self.by_rank:
                check_upwards(line, name)
        row, is_exact = refined(own, self._runs(mesh), self.strategy)
        axes = zip(self.strategy.mesh.axes, row, strict=True)
        found: dict[str, Placement] = {
            axis.name: place for axis, place in axes if not isinstance(place, Replicate)
        }
        return found, None if is_exact else own

    def run_of(self, ranks: Sequence[int], where: str = "") -> Run:
        """The axes that some ranks in line lie along; none for a single one."""
        if len(ranks) < 2:
            return ()
        stride = ranks[1] - ranks[0]
        sizes = self.strategy.mesh.sizes
        inside = [
            axis
            for axis, (apart, size) in enumerate(zip(self.strides, sizes, strict=True))
            if size > 1 and stride <= apart < stride * len(ranks)
        ]
        if math.prod(sizes[axis] for axis in inside) != len(ranks):
            raise StrategyError(
                f"{self.strategy} has no axes along which these ranks lie", where=where, value=ranks
            )
        return tuple(inside)

    def rows(self, ranks: Sequence[int], length: int) -> dict[str, Placement]:
        """How the axes cut what some ranks in line hold equal numbers of rows of."""
        run = self.run_of(ranks)
        if len(run) > 1 and length % len(ranks):
            raise LayoutError(
                f"{length} rows over {len(ranks)} ranks, which lie along several axes here",
                value=str(self.strategy),
                hint="rows that go evenly into the ranks can be saved, and DTensors of any number",
            )
        return {self.strategy.mesh.axes[axis].name: Shard(0) for axis in run}

    def owner(self, ranks: Sequence[int], place: int, where: str = "") -> dict[str, Placement]:
        """That only one of some ranks in line holds something."""
        found: dict[str, Placement] = {}
        for axis in reversed(self.run_of(ranks, where)):
            place, coordinate = divmod(place, self.strategy.mesh.sizes[axis])
            found[self.strategy.mesh.axes[axis].name] = Owner(coordinate)
        return found

    def _runs(self, mesh: DeviceMesh) -> tuple[Run, ...]:
        if mesh not in self._runs_of:
            lines = self._lines(mesh)
            self._runs_of[mesh] = tuple(self.run_of(line, str(mesh)) for line in lines)
        return self._runs_of[mesh]

    def _lines(self, mesh: DeviceMesh) -> list[tuple[int, ...]]:
        return [tuple(sorted(ranks_along(mesh, dim))) for dim in range(mesh.ndim)]


def _refined(groups: list[Group], world_size: int) -> list[Group]:
    """The axes that groups lie along, from the widest stride to the narrowest."""
    ends = {end for group in groups for end in (group.stride, group.stride * group.size)}
    bounds = sorted({1, world_size, *ends})
    if any(b % a for a, b in pairwise(bounds)) or not all(group.is_line for group in groups):
        raise _tangled(groups, world_size)
    axes: list[Group] = []
    for stride, end in reversed(list(pairwise(bounds))):
        line = tuple(range(0, end, stride))
        over = [g for g in groups if g.stride <= stride and end <= g.stride * g.size]
        most = min(over, key=_says, default=Group("ddp", line, is_assumed=True))
        exact = [g for g in sorted(over, key=_says) if (g.stride, g.size) == (stride, len(line))]
        name = next((group.name for group in exact if group.name), "")
        axes.append(Group(most.kind, line, name, is_assumed=most.is_assumed))
    return _one_sharder(axes, groups)


def _says(group: Group) -> tuple[int, bool]:
    """The smaller, the more a group says."""
    return _PRECEDENCE.index(group.kind), group.is_assumed


def _one_sharder(axes: list[Group], groups: list[Group]) -> list[Group]:
    """Of several axes that fsdp cuts along, that which most lines have in common; along the others
    some tensors are cut further than others, as experts are.
    """
    cut = [axis for axis in axes if axis.kind == "fsdp"]
    if len(cut) < 2:
        return axes
    lines = [g for g in groups if g.kind == "fsdp"]
    over = [sum(g.stride <= a.stride < g.stride * g.size for g in lines) for a in cut]
    kept = cut[over.index(max(over))]
    return [replace(a, kind="ep") if a in cut and a is not kept else a for a in axes]


def _singles(groups: list[Group]) -> list[Group]:
    """One group for each kind whose group is one rank here, and for all that shard together."""
    singles: dict[str, Group] = {}
    for group in groups:
        if group.size == 1:
            kind = "shard" if group.kind in ("fsdp", "zero1", "zero2", "zero3") else group.kind
            known = singles.get(kind)
            if known is None or _says(group) < _says(known):
                named = group.name or (known.name if known else "")
                singles[kind] = replace(group, name=named)
    return list(singles.values())


def _tangled(groups: list[Group], world_size: int) -> StrategyError:
    shown = [(group.kind, group.name, group.stride, group.size) for group in groups]
    return StrategyError(
        f"the groups of ranks do not span a mesh of {world_size} ranks",
        value=shown,
        hint="(kind, name, stride, size); each group has to be a line of one mesh whose ranks are "
        "numbered row by row, as [[0, 1], [2, 3]] and [[0, 2], [1, 3]] are, and not "
        "[[0, 3], [1, 2]]: make the job's meshes so",
    )


def _named(groups: list[Group]) -> list[Axis]:
    axes: list[Axis] = []
    taken: set[str] = set()
    for group in groups:
        kind = "pp" if group.kind == "ddp" and group.name in _PIPELINES else group.kind
        wanted = [group.name.lower(), kind, *(f"{kind}_{n}" for n in range(2, 34))]
        name = next(n for n in wanted if _NAME.fullmatch(n) and n not in taken)
        taken.add(name)
        axes.append(Axis(name, kind, group.size))
    return axes
