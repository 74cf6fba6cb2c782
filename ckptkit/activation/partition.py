"""Tensors that a tensor-parallel group holds alike, of which each rank keeps its piece."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ckptkit.errors import LayoutError, UsageError

_LEAST = 1024  # elements: what is smaller stays whole


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank keeps of a tensor that all of its group hold."""

    own: torch.Tensor
    """Its elements, flat; each rank's as many, the last ones padded."""
    shape: torch.Size
    group: dist.ProcessGroup
    requires_grad: bool = False
    spread: tuple[DeviceMesh, tuple[Any, ...]] | None = None
    """Of a DTensor: its mesh and placements."""


def cut(tensor: torch.Tensor, group: dist.ProcessGroup) -> Piece:
    """What this rank keeps, which shares no memory with the tensor."""
    if isinstance(tensor, DTensor):
        piece = cut(tensor.to_local(), group)
        spread = tensor.device_mesh, tensor.placements
        return Piece(piece.own, piece.shape, group, piece.requires_grad, spread)
    rank, ranks = group.rank(), group.size()
    flat = tensor.detach().reshape(-1)
    length = -(-flat.numel() // ranks)
    mine = flat[rank * length : (rank + 1) * length]
    own = mine.new_zeros(length)
    own[: mine.numel()] = mine
    return Piece(own, tensor.shape, group, tensor.requires_grad)


def gather(piece: Piece) -> torch.Tensor:
    """The whole tensor again; all ranks of the group do so in the same order."""
    whole = piece.own.new_empty(piece.own.numel() * piece.group.size())
    dist.all_gather_into_tensor(whole, piece.own, group=piece.group)
    tensor = whole[: piece.shape.numel()].view(piece.shape)
    if piece.spread is None:
        return tensor
    mesh, placements = piece.spread
    return DTensor.from_local(tensor, mesh, placements, run_check=False)


class Partition:
    """Hooks that keep pieces of what checkpointed blocks save: their inputs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._checked: set[str] = set()

    def around(self, name: str) -> saved_tensors_hooks:
        """Hooks for one forward of a block."""
        place = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor | Piece:
            nonlocal place
            if not self._can_be_cut(tensor):
                return tensor
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
        """Once for each: pieces of tensors that differ would make wrong gradients silently."""
        if what in self._checked:
            return
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        data = local.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy().tobytes()
        said = hashlib.blake2b(data, digest_size=16).hexdigest(), tuple(local.shape)
        heard: list[Any] = [None] * self._group.size()
        dist.all_gather_object(heard, said, group=self._group)
        if len(set(heard)) > 1:
            raise LayoutError(
                "the ranks of the tensor-parallel group hold different activations here",
                where=what,
                hint="sequence parallelism cuts them already: use 'full'; if dropout differs "
                "between the ranks, give them the same seed",
            )
        self._checked.add(what)


def _unpack(packed: torch.Tensor | Piece) -> torch.Tensor:
    return gather(packed) if isinstance(packed, Piece) else packed


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
