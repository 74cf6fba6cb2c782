"""A small problem that compressed, late and interrupted training all have to solve."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 24, 8


def network(seed: int = 0) -> nn.Sequential:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, 2 * WIDTH),
        nn.Tanh(),
        nn.Linear(2 * WIDTH, 1),
    )


def batch(step: int, rank: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank learns from in a step: a function that a network of this size can learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, torch.sin(inputs[:, :4].sum(1, keepdim=True))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of a rank's share of a step."""
    inputs, targets = batch(step, rank)
    loss: torch.Tensor = nn.functional.mse_loss(model(inputs), targets)
    return loss


def loss_unseen(model: nn.Module) -> float:
    """The loss of what nobody learns from."""
    inputs, targets = batch(10**6, 0, 512)
    with torch.no_grad():
        return float(nn.functional.mse_loss(model(inputs), targets))


def many_buckets(model: nn.Module) -> DistributedDataParallel:
    """A model whose gradients go in several buckets, which DDP makes anew after the first step."""
    return DistributedDataParallel(model, bucket_cap_mb=0.004)


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters in one."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
