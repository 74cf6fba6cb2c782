"""What the wrappers of a model say about the job: which ranks they join, and what for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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


Line = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that one kind of parallelism joins, in their order along its axis."""

    kind: str
    ranks: tuple[int, ...]
    name: str = ""
    is_assumed: bool = False
    """Whether nothing says what these ranks have in common: they only fill a gap of the mesh."""

    by_mesh: tuple[int, ...] = ()
    """The same ranks in the order of a mesh that numbers them otherwise than their group does."""

    @property
    def stride(self) -> int:
        """How far its ranks are apart."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 0

    @property
    def size(self) -> int:
        """How many ranks it joins."""
        return len(self.ranks)

    @property
    def is_line(self) -> bool:
        """Whether it can be a line of a mesh whose ranks are numbered row by row."""
        return self.size < 2 or self.ranks[0] // self.stride % self.size == 0

    def __post_init__(self) -> None:
        steps = {b - a for a, b in zip(self.ranks, self.ranks[1:], strict=False)}
        if len(steps) > 1 or any(step <= 0 for step in steps):
            raise StrategyError(
                f"the ranks of a {self.kind} group are not evenly spaced",
                value=self.ranks,
                hint="ckptkit knows meshes whose ranks are numbered row by row; only `fully_shard` "
                "cuts in the order of ranks whatever that of its mesh",
            )


def group_of(kind: str, process_group: dist.ProcessGroup | None, name: str = "") -> Group:
    """The group that a process group (None: the default one) is."""
    ranks = dist.get_process_group_ranks(process_group)
    return Group(kind, tuple(ranks), name)


def assumed(groups: list[Group]) -> list[Group]:
    """The groups, of which those that repeat do so for the DTensors of a mesh only: of other
    tensors nobody keeps the copies alike.
    """
    return [replace(group, is_assumed=group.kind in ("ddp", "zero1")) for group in groups]


def mesh_groups(
    mesh: DeviceMesh, kinds: tuple[str, ...], by_rank: Collection[Line] | None = ()
) -> list[Group]:
    """One group for each dim of a device mesh that this rank is in. Lines that are `by_rank` (None:
    all) are taken in the order of their ranks, whatever that of the mesh is.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    found = []
    for dim, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        line = ranks_along(mesh, dim)
        ranks = tuple(sorted(line)) if by_rank is None or line in by_rank else line
        found.append(Group(kind, ranks, name, by_mesh=() if ranks == line else line))
    return found


def dtensor_groups(
    tensors: Sequence[DTensor | DTensorSpec],
    by_rank: Collection[Line] = (),
    *,
    fully_sharded: bool = False,
) -> list[Group]:
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
    found: list[Group] = []
    for mesh, dims in distinct.items():
        kinds = [kind_of(name) for name in mesh.mesh_dim_names or ("",) * mesh.ndim]
        for at, cut in enumerate(dims):
            if cut and kinds[at] in ("", "ddp"):
                rows = fully_sharded and 0 in cut and "fsdp" not in kinds
                kinds[at] = "fsdp" if rows else "tp"
        found += assumed(mesh_groups(mesh, tuple(kind or "ddp" for kind in kinds), by_rank))
    return list(dict.fromkeys(found))


def ranks_along(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """The ranks on the line through this rank along one dim of a mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # noqa: S101 — the caller has looked
    index = tuple(slice(None) if d == dim else at for d, at in enumerate(coordinate))
    line: torch.Tensor = mesh.mesh[index]
    return tuple(line.tolist())
