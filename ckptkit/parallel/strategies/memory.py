"""How many bytes training takes: on this rank, and in one process alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ckptkit.live.state.tensors import local_of


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one kind of tensors.

    >>> Bytes(here=10, whole=40).share
    0.25
    """

    here: int
    whole: int

    @property
    def share(self) -> float:
        """What this rank has of the whole."""
        return self.here / self.whole if self.whole else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """What is held between two steps.

    >>> dist = as_distributed(torch.nn.Linear(4, 2), "single", optimizer=torch.optim.SGD)
    >>> dist.memory().parameters.here
    40
    """

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes


def measured(
    modules: Sequence[nn.Module],
    optimizer: Optimizer | None,
    *,
    parts: Sequence[dist.ProcessGroup],
    owners: Sequence[dist.ProcessGroup],
    device: torch.device,
) -> Memory:
    """The memory of a job; `parts` join ranks that have different parameters (stages), `owners`
    those that keep the state of different parameters (ZeRO-1). A collective where there are any.
    """
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [t for kept in _state(optimizer) for t in kept]
    return Memory(
        _bytes(parameters, parts, device),
        _bytes(gradients, parts, device),
        _bytes(state, [*parts, *owners], device),
    )


def _state(optimizer: Optimizer | None) -> Iterable[list[torch.Tensor]]:
    inner: Optimizer | None = getattr(optimizer, "optim", optimizer)
    for kept in inner.state.values() if inner is not None else ():
        yield [value for value in kept.values() if torch.is_tensor(value)]


def _bytes(
    tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> Bytes:
    here = sum(local_of(t).numel() * t.element_size() for t in tensors)
    whole = torch.tensor(sum(t.numel() * t.element_size() for t in tensors), device=device)
    for group in groups:
        dist.all_reduce(whole, group=group)
    return Bytes(here, int(whole))
