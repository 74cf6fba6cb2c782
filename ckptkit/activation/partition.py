"""Tensors that a tensor-parallel group holds alike, of which each rank keeps its piece."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ckptkit.activation.held import Held
from ckptkit.activation.meter import metered, unmetered
from ckptkit.activation.wire import bytes_of
from ckptkit.errors import LayoutError, UsageError

_LEAST = 1024  # elements: what is smaller stays whole


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank keeps of a tensor that all of its group hold."""

    own: torch.Tensor
    """Its elements, flat; each rank's as many, the last ones padded."""
    shape: torch.Size
    group: dist.ProcessGroup
    stride: tuple[int, ...] | None = None
    """How they lay in memory, whose order is that of `own`; None: that of the indices is."""
    requires_grad: bool = False
    spread: tuple[DeviceMesh, tuple[Any, ...]] | None = None
    """Of a DTensor: its mesh and placements."""


def cut(tensor: torch.Tensor, group: dist.ProcessGroup) -> Piece:
    """What this rank keeps, which shares no memory with the tensor."""
    if isinstance(tensor, DTensor):
        piece = cut(tensor.to_local(), group)
        return replace(piece, spread=(tensor.device_mesh, tensor.placements))
    flat, stride = _as_it_lies(tensor)
    mine = share_of(flat, group.rank(), group.size())
    own = mine.new_zeros(-(-tensor.numel() // group.size()))
    own[: mine.numel()] = mine
    return Piece(own, tensor.shape, group, stride, tensor.requires_grad)


def _as_it_lies(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The elements in the order of their memory, and how they lie there; None: not without gaps."""
    order = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    in_order = tensor.detach().permute(order)
    if not in_order.is_contiguous():
        return tensor.detach().reshape(-1), None
    return in_order.reshape(-1), tensor.stride()


def share_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The elements of a rank, flat; the last ranks may have fewer."""
    flat = tensor.detach().reshape(-1)
    length = -(-flat.numel() // ranks)
    return flat[rank * length : (rank + 1) * length]


def gather(piece: Piece) -> torch.Tensor:
    """The whole tensor again; all ranks of the group do so in the same order."""
    with metered():
        whole = piece.own.new_empty(piece.own.numel() * piece.group.size())
    dist.all_gather_single(whole, piece.own, group=piece.group)
    tensor = whole[: piece.shape.numel()].view(piece.shape)
    if piece.stride is not None:
        tensor = tensor.as_strided(piece.shape, piece.stride)
    if piece.spread is None:
        return tensor
    mesh, placements = piece.spread
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


class Partition:
    """Hooks that keep pieces of what checkpointed blocks save: their inputs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._seen: Counter[str] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        # A copy of the model is cut by the same ranks: groups themselves cannot be copied.
        return Partition(self._group)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "blocks whose inputs are shared by ranks cannot be pickled",
            hint="call undo first, or save the state_dict",
        )

    def around(self, name: str) -> saved_tensors_hooks:
        """Hooks for one forward of a block."""
        place = 0

        def pack(tensor: torch.Tensor) -> Held | Piece:
            nonlocal place
            if not self._can_be_cut(tensor):
                return Held.of(tensor)
            self._check(f"input {place} of {name}", tensor)
            place += 1
            return cut(tensor, self._group)

        return saved_tensors_hooks(pack, _unpack)

    def _can_be_cut(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, nn.Parameter) or tensor.numel() < _LEAST:
            return False
        if isinstance(tensor, DTensor):
            return all(isinstance(placement, Replicate) for placement in tensor.placements)
        return tensor.is_floating_point() and tensor.layout is torch.strided

    def _check(self, what: str, tensor: torch.Tensor) -> None:
        """In the first forward, the second, the fourth ...: pieces of tensors that differ would
        make wrong gradients silently.
        """
        self._seen[what] += 1
        if self._seen[what].bit_count() > 1:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        flat, stride = _as_it_lies(local)
        data = bytes_of(flat).cpu().numpy().tobytes()
        said = hashlib.blake2b(data, digest_size=16).hexdigest(), tuple(local.shape), stride
        heard: list[Any] = [None] * self._group.size()
        with unmetered():  # a backend may hold what it has sent a moment longer
            dist.all_gather_object(heard, said, group=self._group)
        if len(set(heard)) > 1:
            raise LayoutError(
                "the ranks of the tensor-parallel group hold different activations here",
                where=what,
                hint="sequence parallelism cuts them already: use 'full'; if dropout differs "
                "between the ranks, give them the same seed",
            )


def _unpack(packed: Held | Piece) -> torch.Tensor:
    return gather(packed) if isinstance(packed, Piece) else packed.get()


def group_for(model: nn.Module, group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The tensor-parallel group: as given, or as the model's DTensors say."""
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                "a mesh of several axes is no group", value=group, hint="pass mesh['tp']"
            )
        return group.get_group()
    if group is not None:
        return group
    for parameter in model.parameters():
        names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
        if names and "tp" in names and isinstance(parameter, DTensor):
            return parameter.device_mesh.get_group("tp")
    raise UsageError(
        "nothing says which ranks hold the same activations",
        hint="pass group=: the process group of tensor parallelism, or mesh['tp']",
    )
