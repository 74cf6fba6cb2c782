"""From groups of ranks to a strategy, and from torch's placements to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit.errors import LayoutError, StrategyError
from ckptkit.live.groups import Group, ranks_along
from ckptkit.live.world import World
from ckptkit.model import (
    Layout,
    Part,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    layout_of,
)
from ckptkit.model.mesh import Axis, Mesh

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
    _axes_of: dict[DeviceMesh, tuple[int | None, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, world: World, groups: Iterable[Group]) -> Topology:
        """The topology that the groups of one rank span; ranks between them repeat each other."""
        chosen = _distinct(groups)
        sized = [group for group in chosen if group.size > 1]
        axes = _filled(sized, world.size)
        single = [Group(g.kind, g.ranks, g.name) for g in chosen if g.size == 1]
        taken = {group.kind for group in axes}
        axes += [group for group in _one_of_a_kind(single) if group.kind not in taken]
        named = _named(axes)
        strategy = Strategy(Mesh(tuple(named)))
        kept_alike = [
            axis.name
            for axis, group in zip(named, axes, strict=True)
            if axis.kind in _KEPT_ALIKE and not group.is_assumed
        ]
        strides = tuple(group.stride for group in axes)
        return cls(strategy, world.rank, strides, frozenset(kept_alike))

    def mesh_axes(self, tensor: torch.Tensor) -> frozenset[str]:
        """The axes of a DTensor's mesh, along which it keeps its replicas alike."""
        if not isinstance(tensor, DTensor):
            return frozenset()
        axes = self.strategy.mesh.axes
        return frozenset(axes[at].name for at in self._axes(tensor.device_mesh) if at is not None)

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
            found |= self._of_dtensor(name, tensor)
        return found

    def _of_dtensor(self, name: str, tensor: DTensor) -> dict[str, Placement]:
        found: dict[str, Placement] = {}
        cuts: dict[int, list[int]] = {}  # by dim, the axes in the order in which they cut
        lines = list(zip(self._axes(tensor.device_mesh), tensor.placements, strict=True))
        for axis, placement in reversed(lines):
            if axis is None or isinstance(placement, TorchReplicate):
                continue
            if isinstance(placement, _StridedShard) and self._is_strided(placement, cuts):
                cuts[placement.dim].append(axis)
            elif isinstance(placement, (TorchShard, _StridedShard)):
                cuts.setdefault(placement.dim, []).insert(0, axis)
            else:
                raise LayoutError(
                    "a DTensor of partial sums has no values to save yet",
                    where=name,
                    value=str(placement),
                    hint="redistribute it to Replicate() or Shard(…) first",
                )
        for dim, order in cuts.items():
            for axis in order:
                found[self.strategy.mesh.axes[axis].name] = _as_ours(name, dim, axis, order)
        return found

    def axis_of(self, ranks: Sequence[int], name: str = "") -> int | None:
        """The axis that some ranks in line lie along; None for a single one."""
        if len(ranks) < 2:
            return None
        stride = ranks[1] - ranks[0]
        for axis, (found, known) in enumerate(
            zip(self.strides, self.strategy.mesh.axes, strict=True)
        ):
            if (found, known.size) == (stride, len(ranks)):
                return axis
        raise StrategyError(
            f"{self.strategy} has no axis along which these ranks lie", where=name, value=ranks
        )

    def _is_strided(self, placement: _StridedShard, cuts: dict[int, list[int]]) -> bool:
        """Whether it cuts what the axes to its right have cut already, and not before them."""
        sizes = [self.strategy.mesh.axes[axis].size for axis in cuts.get(placement.dim, [])]
        before = math.prod(sizes)
        if placement.split_factor not in (1, before):
            raise LayoutError(
                "a strided placement that its mesh does not explain",
                value=(str(placement), f"{before} pieces along the axes to its right"),
            )
        return placement.split_factor > 1

    def _axes(self, mesh: DeviceMesh) -> tuple[int | None, ...]:
        if mesh not in self._axes_of:
            lines = [ranks_along(mesh, dim) for dim in range(mesh.ndim)]
            self._axes_of[mesh] = tuple(self.axis_of(line, str(mesh)) for line in lines)
        return self._axes_of[mesh]


def _as_ours(name: str, dim: int, axis: int, order: list[int]) -> Placement:
    """The placement that cuts at this axis' turn, when the axes to its right are placed alike."""
    turn = [other for other in order if other >= axis]
    if turn[0] == axis:
        return Shard(dim)
    if turn[-1] == axis:
        return Strided(dim)
    raise LayoutError(
        f"dim {dim} is cut along these axes in an order that no strategy can say",
        where=name,
        value=order,
        hint="number the ranks of the mesh row by row",
    )


def _distinct(groups: Iterable[Group]) -> list[Group]:
    """One group for each line of ranks: the one that says most."""
    best: dict[tuple[int, int], Group] = {}
    for group in groups:
        key = (group.stride, group.size) if group.size > 1 else (0, _PRECEDENCE.index(group.kind))
        known = best.get(key)
        if known is None or _says_more(group, known):
            best[key] = replace(group, name=group.name or (known.name if known else ""))
        elif not known.name and group.name:
            best[key] = replace(known, name=group.name)
    return list(best.values())


def _says_more(group: Group, known: Group) -> bool:
    mine, theirs = _PRECEDENCE.index(group.kind), _PRECEDENCE.index(known.kind)
    return (mine, group.is_assumed) < (theirs, known.is_assumed)


def _filled(groups: list[Group], world_size: int) -> list[Group]:
    """The groups from the widest stride to the narrowest, with replicas where ranks are left."""
    axes: list[Group] = []
    covered = 1
    for group in sorted(groups, key=lambda g: g.stride):
        if group.stride % covered:
            raise _tangled(groups, world_size)
        if group.stride > covered:
            axes.append(_replicas(covered, group.stride // covered))
        axes.append(group)
        covered = group.stride * group.size
    if world_size % covered:
        raise _tangled(groups, world_size)
    if world_size > covered:
        axes.append(_replicas(covered, world_size // covered))
    return axes[::-1]


def _replicas(stride: int, size: int) -> Group:
    return Group("ddp", tuple(range(0, stride * size, stride)), is_assumed=True)


def _tangled(groups: list[Group], world_size: int) -> StrategyError:
    shown = [(group.kind, group.name, group.stride, group.size) for group in groups]
    return StrategyError(
        f"the groups of ranks do not span a mesh of {world_size} ranks",
        value=shown,
        hint="(kind, name, stride, size); a mesh numbers its ranks row by row, and each group "
        "is one of its lines",
    )


def _one_of_a_kind(groups: list[Group]) -> list[Group]:
    shards = [g for g in groups if g.kind in ("fsdp", "zero1", "zero2", "zero3")]
    others = [g for g in groups if g not in shards]
    return [*shards[:1], *others]


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
