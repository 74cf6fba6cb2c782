"""The norm of the gradients of a whole model, of which ranks have parts, and its limit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckptkit.live.state.tensors import local_of

_WIDE = (torch.float64, torch.complex128)
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


def clip(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    stages: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> torch.Tensor:
    """Scale gradients down to a norm of `max_norm` of all of them; returns what it was.

    `stages` join ranks that have different parameters.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        _cut_alike(parameter)
    square = _square(trained, device)
    for group in stages:
        dist.all_reduce(square, group=group)
    norm = square.sqrt().to(_widest(trained))
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for parameter in trained:
        if parameter.grad is not None:
            local_of(parameter.grad).mul_(scale.to(parameter.grad.device))
    return norm


def _cut_alike(parameter: torch.Tensor) -> None:
    """Cut a gradient as its parameter is: that of an embedding may be whole on each rank."""
    gradient = parameter.grad
    if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _square(parameters: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The square of the norm of what this rank and those have that share its tensors."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_groups: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    for parameter in parameters:
        square = by_groups.setdefault(_cut_over(parameter), torch.zeros_like(total))
        if parameter.grad is not None:
            square += _norm(local_of(parameter.grad)).square().to(device)
    for groups, square in by_groups.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """Of 16 bits in 32, of pairs for complex numbers."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=_widest([gradient]))
    return norm.double()


def _widest(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    is_wide = any(tensor.dtype in _WIDE for tensor in tensors)
    return torch.float64 if is_wide else torch.float32


def _cut_over(parameter: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups whose ranks have different parts of a tensor."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(dim)
        for dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
