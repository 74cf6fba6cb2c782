"""Products that "selective" keeps, and that their block changes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptkit.activation import checkpoint_activations
from ckptkit.errors import UsageError
from tests.activation.network import same
from tests.live.pool import Pool

WIDTH = 8


class Recurrent(nn.Module):
    """A layer whose gates are pieces of a product, changed in place."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.layer = layer(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The states of all steps."""
        found = self.layer(x)
        return torch.as_tensor(found if isinstance(found, torch.Tensor) else found[0])


class Cell(Recurrent):
    """The same, a step at a time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The state after two steps."""
        found = self.layer(x[1], self.layer(x[0]))
        return torch.as_tensor(found if isinstance(found, torch.Tensor) else found[0])


class InPlace(nn.Module):
    """Changes a product: by a method of it, or of something that lies in its memory."""

    def __init__(self, change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A layer."""
        h = self.layer(x)
        self.change(h)
        return torch.as_tensor(h.tanh())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{kind.__name__: lambda kind=kind: Recurrent(kind) for kind in (nn.GRU, nn.RNN, nn.LSTM)},  # type: ignore[misc]
    **{
        kind.__name__: lambda kind=kind: Cell(kind)  # type: ignore[misc]
        for kind in (nn.GRUCell, nn.RNNCell, nn.LSTMCell)
    },
    "relu": lambda: InPlace(torch.relu_),
    "data": lambda: InPlace(lambda h: h.data.mul_(0.5)),
    "detached": lambda: InPlace(lambda h: h.detach().mul_(0.5)),
    "part": lambda: InPlace(lambda h: h[:, ::2].zero_()),
    "out": lambda: InPlace(lambda h: torch.mul(h.data, 2, out=h.data)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_products_are_kept_as_they_were_before_a_change(name: str) -> None:
    def trained(policy: str | None) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(BLOCKS[name]() for _ in range(2))
        if policy:
            checkpoint_activations(model, policy, blocks=["0", "1"])
        x = torch.randn(3, 4, WIDTH)
        for block in model:
            found = block(x)
            found.square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    assert same(trained("selective"), trained(None))


class Reduced(torch.autograd.Function):
    """A sum over all ranks, in the memory of what is summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """As it is."""
        return gradients[0]


def reduced(policy: str | None) -> dict[str, torch.Tensor]:
    """Gradients where a product is summed over the ranks in its own memory."""
    torch.manual_seed(0)
    model = nn.ModuleList([InPlace(Reduced.apply), InPlace(dist.all_reduce)])
    if policy:
        checkpoint_activations(model, policy, blocks=["0", "1"])
    for block in model:
        block(torch.randn(3, WIDTH)).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_collective_changes_a_product_though_it_does_not_say_so(gloo: Pool) -> None:
    for found, wanted in zip(*(gloo.run(2, reduced, p) for p in ("selective", None)), strict=True):
        assert same(found, wanted)


class Pair(InPlace):
    """Gives a product away."""

    def forward(self, x: torch.Tensor) -> Any:
        """A layer, with and without its bend."""
        h = self.layer(x)
        return h, h.sin().exp()


def test_a_product_that_is_changed_after_the_forward_is_no_silent_mistake() -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Pair(abs)]), "selective", blocks=["0"])
    product, bent = model[0](torch.ones(3, WIDTH))
    with torch.no_grad():
        product.zero_()
    with pytest.raises(UsageError, match="changed in place after its forward"):
        bent.sum().backward()
