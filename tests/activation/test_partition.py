"""Inputs of which each rank keeps a piece: how they come back, and what cannot be cut so."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptkit.activation import checkpoint_activations
from ckptkit.errors import LayoutError, UsageError
from tests.live.pool import Pool


class Laid(nn.Module):
    """Reads its input as it lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A layer over the memory, in its order."""
        flat = x.as_strided((x.numel() // 64, 64), (64, 1))
        return torch.as_tensor(self.layer(flat).sin().view(x.shape))


def laid_otherwise() -> list[bool]:
    """Whether gradients are the same for inputs that lie in memory in several ways."""
    torch.manual_seed(0)
    whole = torch.randn(4, 32, 64)
    models = [nn.ModuleList([Laid()]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    checkpoint_activations(models[1], "partition", blocks=["0"], group=dist.group.WORLD)
    equal: list[bool] = []
    same_bits: Any = torch.equal
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        given = [whole.clone().permute(order).requires_grad_() for _ in models]
        for model, x in zip(models, given, strict=True):
            model.zero_grad()
            model[0](x).square().sum().backward()
        ours, theirs = (
            [x.grad, *(p.grad for p in m.parameters())] for m, x in zip(models, given, strict=True)
        )
        equal.append(all(map(same_bits, ours, theirs)))
    return equal


def test_a_gathered_input_lies_in_memory_as_it_did(gloo: Pool) -> None:
    assert gloo.run(2, laid_otherwise) == [[True] * 3] * 2


def different_later() -> str:
    """What is said where the ranks hold the same in the first forward only."""
    torch.manual_seed(0)
    model = nn.ModuleList([Laid()])
    checkpoint_activations(model, "partition", blocks=["0"], group=dist.group.WORLD)
    model[0](torch.ones(64, 64))
    try:
        model[0](torch.full((64, 64), float(dist.get_rank())))
    except LayoutError as error:
        return str(error)
    return ""


def test_what_differs_later_is_refused_too(gloo: Pool) -> None:
    for said in gloo.run(2, different_later):
        assert "input 0 of 0: the ranks" in said


def unpicklable() -> str:
    """What is said when a partitioned model is pickled."""
    model, _ = checkpoint_activations(
        nn.ModuleList([Laid()]), "partition", blocks=["0"], group=dist.group.WORLD
    )
    try:
        pickle.dumps(model)
    except UsageError as error:
        return str(error)
    return ""


def test_a_partitioned_model_says_that_it_cannot_be_pickled(gloo: Pool) -> None:
    assert all("cannot be pickled" in said for said in gloo.run(2, unpicklable))
