"""What the wrappers of a model say about the job: which ranks they join, and what for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from ckptkit.errors import StrategyError

# The names that torch, torchtitan and transformers give to the dims of a mesh.
_KINDS = {
    **dict.fromkeys(("ddp", "dp", "dp_replicate", "replicate"), "ddp"),
    **dict.fromkeys(
        ("fsdp", "efsdp", "dp_shard", "dp_shard_cp", "dp_shard_mod_ep", "shard"), "fsdp"
    ),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pp"),
    **{kind: kind for kind in ("tp", "ep", "zero1", "zero2", "zero3")},
    "etp": "tp",
}


def kind_of(name: str) -> str:
    """The kind of axis that the name of a mesh's dim stands for; nothing where it is unknown."""
    return _KINDS.get(name.lower(), "")


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks that one kind of parallelism joins, in their order along its axis."""

    kind: str
    ranks: tuple[int, ...]
    name: str = ""
    is_assumed: bool = False
    """Whether nothing says what these ranks have in common: they only fill a gap of the mesh."""

    by_mesh: tuple[int, ...] = ()
    """The same ranks in the order of a mesh, where that is not the order in which they cut."""

    @property
    def stride(self) -> int:
        """How far its ranks are apart."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 0

    @property
    def size(self) -> int:
        """How many ranks it joins."""
        return len(self.ranks)

    def to_doc(self) -> list[object]:
        """What it says of the lines of all ranks, as plain values."""
        return [self.kind, self.stride, self.size, self.name, self.is_assumed]

    @classmethod
    def through(cls, rank: int, doc: Sequence[Any]) -> Line:
        """The line through a rank that another rank has told of with `to_doc`."""
        kind, stride, size, name, is_assumed = doc
        first = rank - rank // max(stride, 1) % size * stride
        return cls(kind, tuple(first + stride * n for n in range(size)), name, is_assumed)

    def __post_init__(self) -> None:
        steps = {b - a for a, b in pairwise(self.ranks)}
        if len(steps) > 1 or any(step <= 0 for step in steps):
            raise StrategyError(
                f"the ranks of a {self.kind} group are not evenly spaced",
                value=self.ranks,
                hint="a step numbers the ranks of a mesh row by row: make the job's meshes so, as "
                "[[0, 1], [2, 3]] and [[0, 2], [1, 3]] are",
            )


@dataclass(frozen=True, slots=True)
class SharedOut:
    """How ranks of one line have a plain tensor of a shape together: each some of its rows, or one
    of them the whole of it.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int | None = None
    """The place in the line of the one that has it."""


def line_of(kind: str, process_group: dist.ProcessGroup | None, name: str = "") -> Line:
    """The line that a process group (None: the default one) is."""
    ranks = dist.get_process_group_ranks(process_group)
    return Line(kind, tuple(ranks), name)


def assumed(lines: list[Line]) -> list[Line]:
    """The lines, of which those that repeat do so for the DTensors of a mesh only: of other tensors
    nobody keeps the copies alike.
    """
    return [replace(line, is_assumed=line.kind in ("ddp", "zero1")) for line in lines]


def mesh_lines(mesh: DeviceMesh, kinds: tuple[str, ...]) -> list[Line]:
    """One line for each dim of a device mesh that this rank is in. Their ranks go upwards, as in
    torch's groups, whatever the order in the mesh is.
    """
    if mesh.get_coordinate() is None:
        return []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    lines = [ranks_along(mesh, dim) for dim in range(mesh.ndim)]
    return [
        Line(kind, tuple(sorted(line)), name, by_mesh=() if _is_upwards(line) else line)
        for kind, name, line in zip(kinds, names, lines, strict=True)
    ]


def check_upwards(line: Sequence[int], where: str) -> None:
    """Refuse to cut along a line of ranks that torch reads in two orders."""
    if not _is_upwards(line):
        raise StrategyError(
            "cut along ranks that do not go upwards: torch scatters and gathers there in the order "
            "of ranks, but DCP saves and loads in that of the mesh",
            where=where,
            value=tuple(line),
            hint="number the ranks upwards along the dims of a mesh that cut; those that repeat, "
            "and those of `fully_shard`, may go any way",
        )


def dtensor_lines(
    tensors: Sequence[DTensor | DTensorSpec], *, fully_sharded: bool = False
) -> list[Line]:
    """The lines of ranks of the meshes of some DTensors. The name of a dim says its kind, unless it
    says that it repeats and it does not: no axis along which something is cut is `ddp`. One without
    a name is `fsdp` where it is the first to cut rows and `fully_sharded`, otherwise `tp`.
    """
    distinct: dict[DeviceMesh, list[set[int]]] = {}
    for tensor in tensors:
        dims = distinct.setdefault(tensor.device_mesh, [set() for _ in tensor.placements])
        for dim, placement in zip(dims, tensor.placements, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                dim.add(placement.dim)
    found: list[Line] = []
    for mesh, dims in distinct.items():
        kinds = [kind_of(name) for name in mesh.mesh_dim_names or ("",) * mesh.ndim]
        for at, cut in enumerate(dims):
            if cut and kinds[at] in ("", "ddp"):
                rows = fully_sharded and 0 in cut and "fsdp" not in kinds
                kinds[at] = "fsdp" if rows else "tp"
        found += assumed(mesh_lines(mesh, tuple(kind or "ddp" for kind in kinds)))
    return list(dict.fromkeys(replace(line, by_mesh=()) for line in found))


def ranks_along(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """The ranks on the line through this rank along one dim of a mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # noqa: S101 — the caller has looked
    index = tuple(slice(None) if d == dim else at for d, at in enumerate(coordinate))
    line: torch.Tensor = mesh.mesh[index]
    return tuple(line.tolist())


def _is_upwards(line: Sequence[int]) -> bool:
    return all(one < other for one, other in pairwise(line))
