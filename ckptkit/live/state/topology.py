"""From lines of ranks to a strategy, and from torch's placements to those along its axes."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit.errors import LayoutError, StrategyError
from ckptkit.live.state.entries import Line, SharedOut, check_upwards, kind_of, ranks_along
from ckptkit.model import (
    Layout,
    Owner,
    Part,
    Placement,
    Replicate,
    Shard,
    Strategy,
    Strided,
    layout_of,
)
from ckptkit.model.document import located
from ckptkit.model.strategy import Axis, Mesh

AxisRun: TypeAlias = tuple[int, ...]
"""The axes that a line of ranks lies along, outermost first."""


# Where two wrappers join the same ranks, what cuts says more than what repeats.
_PRECEDENCE = ("pp", "tp", "ep", "fsdp", "zero1", "zero2", "zero3", "ddp")
_KEPT_ALIKE = ("ddp", "zero1")
_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")


class DTensorLayout(NamedTuple):
    """How the axes of a job cut a DTensor.

    Some cuts no placements along the axes of the job can say. Then `placements` are those of the
    nearest layout that they can, in which it is saved, and `own` is what this rank really holds.
    """

    placements: Mapping[str, Placement]
    axes: frozenset[str]
    """The axes of its mesh, along which it keeps its replicas alike."""
    own: Part | None


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
    _found: dict[Hashable, DTensorLayout] = field(default_factory=dict, compare=False, repr=False)
    """How DTensors lie. Layers are alike: what one has found out holds for all."""
    _unsure: dict[frozenset[str], frozenset[str]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _parts: dict[Hashable, Part] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, rank: int, world_size: int, lines: Iterable[Line]) -> Topology:
        """The topology that the lines through one rank span: the coarsest mesh of which each of
        them is a line, along one axis or several; ranks between them repeat each other.
        """
        chosen = list(lines)
        along = _axes_of([line for line in chosen if line.size > 1], world_size)
        taken = {line.kind for line in along}
        # One axis for each kind whose line is one rank here, and for all that shard together.
        singles: dict[str, Line] = {}
        for line in chosen:
            if line.size == 1:
                kind = "shard" if line.kind in ("fsdp", "zero1", "zero2", "zero3") else line.kind
                first = singles.get(kind)
                if first is None or _says(line) < _says(first):
                    named = line.name or (first.name if first else "")
                    singles[kind] = replace(line, name=named)
        along += [line for line in singles.values() if line.kind not in taken]
        axes: list[Axis] = []
        for line in along:
            kind = "pp" if line.kind == "ddp" and kind_of(line.name) == "pp" else line.kind
            wanted = [line.name.lower(), kind, *(f"{kind}_{n}" for n in range(2, 34))]
            known = {axis.name for axis in axes}
            name = next(n for n in wanted if _NAME.fullmatch(n) and n not in known)
            axes.append(Axis(name, kind, line.size))
        kept_alike = [
            axis.name
            for axis, line in zip(axes, along, strict=True)
            if axis.kind in _KEPT_ALIKE and not line.is_assumed
        ]
        strides = tuple(line.stride for line in along)
        by_rank = frozenset(line.by_mesh for line in chosen)
        return cls(Strategy(Mesh(tuple(axes))), rank, strides, frozenset(kept_alike), by_rank)

    def unsure(self, alike_along: frozenset[str]) -> frozenset[str]:
        """The axes of several ranks besides some."""
        if alike_along not in self._unsure:
            names = frozenset(axis.name for axis in self.strategy.mesh.axes if axis.size > 1)
            self._unsure[alike_along] = names - alike_along
        return self._unsure[alike_along]

    @property
    def pipeline(self) -> int | None:
        """The place of the pipeline axis, where there is one of more than one rank."""
        axes = enumerate(self.strategy.mesh.axes)
        return next((at for at, axis in axes if axis.kind == "pp" and axis.size > 1), None)

    def part(self, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> Part:
        """What this rank holds of a tensor that the axes cut so; replicated along the others."""
        kind = shape, tuple(placements.items())
        if kind not in self._parts:
            self._parts[kind] = self.layout(name, shape, placements).part(self.rank)
        return self._parts[kind]

    def layout(
        self, name: str, shape: tuple[int, ...], placements: Mapping[str, Placement]
    ) -> Layout:
        """What each rank holds of such a tensor."""
        axes = self.strategy.mesh.axes
        row = [placements.get(axis.name, Replicate()) for axis in axes]
        with located(name):
            return layout_of(shape, self.strategy, row)

    def of_dtensor(self, name: str, tensor: DTensor) -> DTensorLayout:
        """How the axes cut a DTensor, as it says itself."""
        mesh = tensor.device_mesh
        kind = mesh, tensor.shape, tensor.placements
        if kind in self._found:
            return self._found[kind]
        with located(name):
            own = _torch_layout(tuple(tensor.shape), mesh.shape, tensor.placements)
        lines = [ranks_along(mesh, dim) for dim in range(mesh.ndim)]
        for line, placement in zip(lines, own.placements, strict=True):
            if not isinstance(placement, Replicate) and line not in self.by_rank:
                check_upwards(line, name)
        lines = [tuple(sorted(line)) for line in lines]
        runs = tuple(self._run_of(line, mesh) for line in lines)
        row, is_exact = _refined(own, runs, self.strategy)
        axes = self.strategy.mesh.axes
        found: dict[str, Placement] = {
            axis.name: placement
            for axis, placement in zip(axes, row, strict=True)
            if not isinstance(placement, Replicate)
        }
        part = None
        if not is_exact:
            coords = tuple(line.index(self.rank) for line in lines)
            part = own.part(own.strategy.mesh.rank(coords))
        of_mesh = frozenset(axes[at].name for run in runs for at in run)
        layout = self._found[kind] = DTensorLayout(found, of_mesh, part)
        return layout

    def of_shared(self, name: str, shared: SharedOut) -> dict[str, Placement]:
        """How the axes cut a plain tensor that ranks of one line share out."""
        run = self._run_of(shared.ranks, name)
        axes, sizes = self.strategy.mesh.axes, self.strategy.mesh.sizes
        if shared.owner is None:
            rows, ranks = shared.shape[:1], len(shared.ranks)
            if len(run) > 1 and rows[0] % ranks:
                raise LayoutError(
                    f"{rows[0]} rows over {ranks} ranks, which lie along several axes here",
                    where=name,
                    value=str(self.strategy),
                    hint="rows that go evenly into the ranks can be saved, and DTensors of any "
                    "number",
                )
            return {axes[axis].name: Shard(0) for axis in run}
        place = shared.owner
        found: dict[str, Placement] = {}
        for axis in reversed(run):
            place, coordinate = divmod(place, sizes[axis])
            found[axes[axis].name] = Owner(coordinate)
        return found

    def _run_of(self, ranks: Sequence[int], where: object) -> AxisRun:
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
                f"{self.strategy} has no axes along which these ranks lie",
                where=str(where),
                value=ranks,
            )
        return tuple(inside)


def _axes_of(lines: list[Line], world_size: int) -> list[Line]:
    """The axes that lines lie along, from the widest stride to the narrowest."""
    ends = {end for line in lines for end in (line.stride, line.stride * line.size)}
    bounds = sorted({1, world_size, *ends})
    # Where ranks are numbered row by row, a line that begins in the middle of a row is no line.
    is_amiss = any(line.ranks[0] // line.stride % line.size for line in lines)
    if is_amiss or any(b % a for a, b in pairwise(bounds)):
        raise StrategyError(
            f"the groups of ranks do not span a mesh of {world_size} ranks",
            value=[(line.kind, line.name, line.stride, line.size) for line in lines],
            hint="(kind, name, stride, size); each group has to be a line of one mesh whose ranks "
            "are numbered row by row, as [[0, 1], [2, 3]] and [[0, 2], [1, 3]] are, and not "
            "[[0, 3], [1, 2]]: make the job's meshes so",
        )
    axes: list[Line] = []
    for stride, end in reversed(list(pairwise(bounds))):
        ranks = tuple(range(0, end, stride))
        over = [g for g in lines if g.stride <= stride and end <= g.stride * g.size]
        over.sort(key=_says)
        most = over[0] if over else Line("ddp", ranks, is_assumed=True)
        exact = [g for g in over if (g.stride, g.size) == (stride, len(ranks))]
        name = next((line.name for line in exact if line.name), "")
        axes.append(Line(most.kind, ranks, name, is_assumed=most.is_assumed))
    # Of several axes that fsdp cuts along, that which most lines have in common; along the others
    # some tensors are cut further than others, as experts are.
    cut = [axis for axis in axes if axis.kind == "fsdp"]
    if len(cut) < 2:
        return axes
    sharding = [line for line in lines if line.kind == "fsdp"]
    over_each = [sum(g.stride <= a.stride < g.stride * g.size for g in sharding) for a in cut]
    kept = cut[over_each.index(max(over_each))]
    return [replace(a, kind="ep") if a in cut and a is not kept else a for a in axes]


def _says(line: Line) -> tuple[int, bool]:
    """The smaller, the more a line says."""
    return _PRECEDENCE.index(line.kind), line.is_assumed


@lru_cache(maxsize=4096)
def _torch_layout(
    shape: tuple[int, ...], ranks: tuple[int, ...], placements: tuple[TorchPlacement, ...]
) -> Layout:
    """How a DTensor lies on its own mesh, whose dims are the axes."""
    row: list[Placement] = [Replicate() for _ in ranks]
    factors: dict[int, int] = {}
    pieces: dict[int, int] = {}  # by dim of the tensor, how many the axes to the right have made
    for at, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, TorchReplicate):
            continue
        if not isinstance(placement, (TorchShard, _StridedShard)):
            raise LayoutError(
                "a DTensor of partial sums has no values to save yet",
                value=str(placement),
                hint="redistribute it to Replicate() or Shard(…) first",
            )
        dim, before = placement.dim, pieces.get(placement.dim, 1)
        factors[at] = int(getattr(placement, "split_factor", 1))
        # In as many blocks as the axes to the right make: it cuts what these have left.
        is_late = factors[at] == before > 1
        row[at] = Strided(dim) if is_late else Shard(dim)
        pieces[dim] = before * ranks[at]
    # Of what is left for the axes to the right to cut; -1 where that differs between ranks.
    lengths = list(shape)
    cutting = [(at, cut) for at, cut in enumerate(row) if isinstance(cut, (Shard, Strided))]
    for at, cut in enumerate(row):
        if not isinstance(cut, Shard):
            continue
        dim, length = cut.dim, lengths[cut.dim]
        if factors[at] > 1:  # of blocks that no axis has made: packed, and each is cut for itself
            strided = [i for i, other in cutting if other.dim == dim and factors[i] > 1]
            if length < 0 or len(strided) > 1:
                raise LayoutError(
                    f"dim {dim} is cut in blocks, and further in a way that has two readings",
                    value=str(placements),
                    hint="cut blocks along one dim of the mesh, or make them tensors of their own",
                )
            step = max(1, -(-length // factors[at]))  # as torch.chunk does
            row[at] = Shard(
                dim, tuple(min(step, length - start) for start in range(0, length, step)) or None
            )
        lengths[dim] = -1 if length < 0 or length % ranks[at] else length // ranks[at]
    mesh = Mesh(tuple(Axis(f"dim{n}", "tp", size) for n, size in enumerate(ranks)))
    return layout_of(shape, Strategy(mesh), row)


@lru_cache(maxsize=4096)
def _refined(
    own: Layout, runs: tuple[AxisRun, ...], strategy: Strategy
) -> tuple[tuple[Placement, ...], bool]:
    """How the axes of a strategy cut a tensor as its own mesh does, each line of which lies along
    some of them; and whether they make exactly its pieces.
    """
    sizes = strategy.mesh.sizes
    row: list[Placement] = [Replicate() for _ in sizes]
    is_sure = True
    for dim, length in enumerate(own.shape):
        steps: list[tuple[AxisRun, Placement]] = []  # in the order in which they cut
        for run, placement in reversed(list(zip(runs, own.placements, strict=True))):
            if isinstance(placement, Shard) and placement.dim == dim:
                steps.insert(0, (run, placement))
            elif isinstance(placement, Strided) and placement.dim == dim:
                steps.append((run, placement))
        order = [axis for run, _ in steps for axis in run]
        is_even = length % math.prod(sizes[axis] for axis in order) == 0
        # Where several axes do what one of their sizes together would, that goes evenly or not.
        cuts = _by_turn(dim, steps) if is_even or all(len(run) < 2 for run, _ in steps) else None
        if cuts is None and is_even and length:
            cuts = _by_blocks(dim, length, steps, sizes)
        is_sure = is_sure and cuts is not None
        for axis in order:
            row[axis] = Shard(dim) if cuts is None else cuts[axis]
    if is_sure:
        return tuple(row), True
    # Whether every rank of the tensor's own mesh holds what the axes say that it does.
    found = layout_of(own.shape, strategy, row)
    for rank in range(own.strategy.world_size):
        coords = [0] * len(sizes)
        for run, at in zip(runs, own.strategy.mesh.coords(rank), strict=True):
            for axis in reversed(run):
                at, coords[axis] = divmod(at, sizes[axis])  # noqa: PLW2901
        if own.part(rank).boxes != found.part(strategy.mesh.rank(tuple(coords))).boxes:
            return tuple(row), False
    return tuple(row), True


def _by_turn(dim: int, steps: Sequence[tuple[AxisRun, Placement]]) -> dict[int, Placement] | None:
    """The placements of axes that cut a dim in this order, where no blocks are needed to say it."""
    cuts: dict[int, Placement] = {}
    order = [axis for run, _ in steps for axis in run]
    for run, placement in steps:
        blocks = placement.blocks if isinstance(placement, Shard) else None
        for axis in run:
            turn = [other for other in order if other >= axis]
            if turn[0] == axis and (blocks is None or len(run) == 1):
                cuts[axis] = Shard(dim, blocks)
            elif turn[-1] == axis and blocks is None:
                cuts[axis] = Strided(dim)
            else:
                return None
    return cuts


def _by_blocks(
    dim: int, length: int, steps: Sequence[tuple[AxisRun, Placement]], sizes: Sequence[int]
) -> dict[int, Placement] | None:
    """The placements of axes that cut a dim in this order, said with blocks; None where it does not
    go evenly. A place along the dim is then a number of several digits: each axis takes one of
    them, and of the others (None) every rank has all values.
    """
    digits: list[tuple[int, int | None]] = [(length, None)]
    for run, placement in steps:
        count = math.prod(sizes[axis] for axis in run)
        lengths = (isinstance(placement, Shard) and placement.blocks) or (0,)
        blocks = len(lengths)
        if len(set(lengths)) > 1:
            return None
        for at, (size, axis) in enumerate(digits):
            if axis is not None:
                continue
            if blocks > 1 and blocks % size == 0:
                blocks //= size
            elif size % (blocks * count) == 0:
                taken = [(sizes[axis], axis) for axis in run]
                left = [(blocks, None)] if blocks > 1 else []
                digits[at : at + 1] = [*left, *taken, (size // blocks // count, None)]
                break
            elif size > 1:
                return None
        else:
            return None
    cuts: dict[int, Placement] = {}
    for at, (_, axis) in enumerate(digits):
        if axis is not None:
            before = [s for s, other in digits[:at] if other is None or other > axis]
            here = length // math.prod(
                s for s, other in digits if other is not None and other < axis
            )
            count = math.prod(before)
            cuts[axis] = Shard(dim, (here // count,) * count if count > 1 else None)
    return cuts
