"""Blocks whose results depend on buffers that their forwards change."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.utils.parametrizations import spectral_norm

from ckptkit.activation import checkpoint_activations, kept_bytes, peak_bytes
from ckptkit.errors import UsageError
from tests.activation.network import by_torch, same

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


class Silent(nn.Module):
    """Changes buffers, large and small, without a word in their versions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(2048))
        self.mean: torch.Tensor
        self.variance: torch.Tensor
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is scaled by a table that grows."""
        h = batch_norm(self.layer(x), self.mean, self.variance, training=True)
        self.table.data.mul_(1.5)
        return torch.as_tensor(h.tanh() * (self.mean.exp() + self.table[:WIDTH].clone()))


class Seldom(nn.Module):
    """A large table that only every third forward moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.ones(2048))
        self.calls: torch.Tensor
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is scaled by the table."""
        self.calls += 1
        if self.calls % 3 == 0:
            self.table += 1
        return torch.as_tensor(self.layer(x).tanh() * self.table[:WIDTH].clone())


def trained(make: Callable[[], nn.Module], policy: str | None, in_flight: int) -> nn.Module:
    """A model after backwards of so many forwards at a time, the first forward first."""
    torch.manual_seed(0)
    model = nn.ModuleList(make() for _ in range(2))
    if policy:
        checkpoint_activations(model, policy, blocks=["0", "1"])
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
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
@pytest.mark.parametrize("make", [Normed, Rebound, Late, Counted, Silent, Seldom])
def test_gradients_and_buffers_are_those_without_it(
    make: Callable[[], nn.Module], policy: str, in_flight: int
) -> None:
    assert same(state(trained(make, policy, in_flight)), state(trained(make, None, in_flight)))


class Reading(nn.Module):
    """Reads a buffer of another module, and may change it."""

    def __init__(self, shared: nn.Module, *, changes: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shared = shared
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What depends on the buffer."""
        offset = torch.as_tensor(self.shared.get_buffer("offset"))
        found = torch.sigmoid(self.layer(x) + offset[:WIDTH])
        if self.changes:
            offset[:WIDTH] += found.detach().mean(0)
        return found


@pytest.mark.parametrize("size", [WIDTH, 2048])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_buffers_that_others_change_are_read_as_they_were(policy: str, size: int) -> None:
    def changed_meanwhile(chosen: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        shared = nn.Module()
        shared.register_buffer("offset", torch.zeros(size))
        model = nn.Sequential(Reading(shared, changes=False), Reading(shared, changes=True))
        if chosen:
            checkpoint_activations(model, chosen)
        for _ in range(5):
            loss = model(torch.ones(3, WIDTH)).square().sum()
            shared.get_buffer("offset").add_(1)
            with torch.no_grad():
                model(torch.ones(3, WIDTH))
            loss.backward()
        return state(model)

    assert same(changed_meanwhile(policy), changed_meanwhile(None))


class Masked(nn.Module):
    """A large table that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("table", torch.ones(2048, 64))
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A part of the table is used."""
        return torch.as_tensor(torch.tanh(self.layer(x) * self.table[: x.shape[0]]))


def test_buffers_that_do_not_change_take_no_memory() -> None:
    ours, theirs = (nn.Sequential(*(Masked() for _ in range(3))) for _ in range(2))
    checkpoint_activations(ours, "full")
    by_torch(theirs)
    x = torch.ones(64, 64)
    for _ in range(5):
        kept, peak = [], []
        for model in (ours, theirs):
            kept.append(kept_bytes(lambda model=model: model(x).sum()))  # type: ignore[misc]
            peak.append(peak_bytes(lambda model=model: model(x).sum().backward()))  # type: ignore[misc]
        assert kept[0] <= kept[1]
        assert peak[0] <= peak[1]


def test_copies_end_with_their_buffers() -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Masked()]), blocks=["0"])
    model[0](torch.ones(2, 64)).sum().backward()
    shared = vars(model[0])["forward"]._copies._shared
    assert len(shared) == 1
    model[0].table = torch.ones(2048, 64)
    gc.collect()
    assert len(shared) == 0


@pytest.mark.parametrize("policy", ["full", "selective", "every:2"])
def test_weights_that_change_before_backward_are_no_silent_mistake(policy: str) -> None:
    model, _ = checkpoint_activations(nn.Sequential(Masked(), Masked()), policy)
    loss = model(torch.ones(2, 64)).sum()
    with torch.no_grad():
        model[0].layer.weight.add_(1)
    with pytest.raises(UsageError, match=r"layer\.weight: a parameter of a block was changed"):
        loss.backward()


class Aliased(nn.Module):
    """Knows its buffer by an attribute, or by another buffer, and changes it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("whole", torch.ones(2 * WIDTH))
        self.whole: torch.Tensor
        self.others = [self.whole]
        if way == "buffer":
            self.register_buffer("part", self.whole[:WIDTH])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What is scaled by half of the buffer."""
        if "part" in self._buffers:
            self.whole.mul_(1.5)
            return torch.as_tensor(self.layer(x).tanh() * self.get_buffer("part").clone())
        return torch.as_tensor(self.layer(x).tanh() * self.others[0].mul_(1.5)[:WIDTH].clone())


@pytest.mark.parametrize("way", ["attribute", "buffer"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_buffer_of_two_names_that_changes_is_no_silent_mistake(policy: str, way: str) -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Aliased(way)]), policy, blocks=["0"])
    loss = model[0](torch.ones(3, WIDTH)).sum()
    with pytest.raises(UsageError, match="by something else than its name"):
        loss.backward()


def test_a_buffer_made_in_inference_mode_is_no_obstacle() -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Late()]), blocks=["0"])
    with torch.inference_mode():
        model[0](torch.ones(3, WIDTH))
    model[0](torch.ones(3, WIDTH)).sum().backward()
    assert model[0].layer.weight.grad is not None


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
