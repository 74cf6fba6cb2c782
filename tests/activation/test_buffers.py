"""Blocks whose results depend on buffers that their forwards change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ckptkit.activation import checkpoint_activations
from tests.activation.network import same

WIDTH = 6


class Normed(nn.Module):
    """Each forward takes a step of the power iteration, and uses where it comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A layer."""
        return torch.as_tensor(self.layer(x).tanh())


class Rebound(nn.Module):
    """A running mean that is another tensor after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ema", torch.ones(WIDTH))
        self.ema: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is scaled by the mean so far."""
        self.ema = 0.9 * self.ema + 0.1 * x.detach().abs().mean(0)
        return torch.as_tensor(self.layer(x).tanh() * self.ema)


class Late(Rebound):
    """A running mean that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is scaled by the mean so far."""
        if self._buffers["ema"] is None:
            self.ema = torch.full((WIDTH,), 0.5)
        return super().forward(x)


class Counted(nn.Module):
    """A counter that scales, and that only every second forward moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("count", torch.ones(()))
        self.calls: torch.Tensor
        self.count: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is scaled by the counter."""
        self.calls += 1
        if self.calls % 2 == 0:
            self.count += 1
        return torch.as_tensor(self.layer(x).tanh() * self.count.clone())


def trained(make: Callable[[], nn.Module], policy: str | None, in_flight: int) -> nn.Module:
    """A model after backwards of so many forwards at a time, the first forward first."""
    torch.manual_seed(0)
    model = nn.ModuleList(make() for _ in range(2))
    if policy:
        checkpoint_activations(model, policy, blocks=["0", "1"])
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        losses = []
        for _ in range(in_flight):
            x = torch.randn(3, WIDTH, generator=generator)
            losses.append(model[1](model[0](x)).square().sum())
        for loss in losses:
            loss.backward()
    return model


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients and buffers."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | dict(model.named_buffers())


@pytest.mark.parametrize("in_flight", [1, 3])
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("make", [Normed, Rebound, Late, Counted])
def test_gradients_and_buffers_are_those_without_it(
    make: Callable[[], nn.Module], policy: str, in_flight: int
) -> None:
    assert same(state(trained(make, policy, in_flight)), state(trained(make, None, in_flight)))


def test_a_second_backward_begins_with_the_same_buffers() -> None:
    found = []
    for policy in (None, "full"):
        torch.manual_seed(0)
        model = nn.ModuleList([Rebound()])
        if policy:
            checkpoint_activations(model, policy, blocks=["0"])
        loss = model[0](torch.ones(3, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(state(model))
    assert same(*found)


def test_a_model_is_copied_while_a_backward_is_to_come() -> None:
    model = nn.ModuleList([Normed()])
    checkpoint_activations(model, "full", blocks=["0"])
    loss = model[0](torch.ones(3, WIDTH)).square().sum()
    other = copy.deepcopy(model)
    loss.backward()
    other[0](torch.ones(3, WIDTH)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_measuring_leaves_a_rebound_buffer_in_its_place() -> None:
    model = nn.ModuleList([Rebound()])
    before = model[0].ema
    step = lambda: model[0](torch.ones(3, WIDTH)).sum().backward()  # noqa: E731
    checkpoint_activations(model, "budget:1GiB", blocks=["0"], step=step)
    assert model[0].ema is before
