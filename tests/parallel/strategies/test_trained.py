"""What is trained is what was when the model was spread, and gets all of its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ckptkit.errors import UsageError
from ckptkit.parallel import Distributed, as_distributed
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import Layered, farthest, values

WIDTH = 4


class Skipping(Layered):
    """A model that leaves its last layer out when it is told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(3, WIDTH)
        self.skips = False

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes out of the last layer that runs."""
        for layer in self.layers[:-1] if self.skips else self.layers:
            hidden = layer(hidden)
        return hidden


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that replicas share."""
    return torch.arange(16.0).reshape(4, WIDTH) / 16, torch.ones(4, WIDTH)


def step(made: Distributed) -> str:
    """What a step is refused with."""
    try:
        made.step(mse_loss, made.share(pair()))
    except UsageError as error:
        return str(error)
    return ""


def spread(model: nn.Module, spec: str) -> Distributed:
    """A model and its optimizer under a strategy."""
    example = torch.ones(2, WIDTH) if "pp" in spec else None
    return as_distributed(
        model, spec, optimizer=torch.optim.SGD, optimizer_options={"lr": 0.1}, example=example
    )


def unfrozen(spec: str) -> tuple[str, str]:
    """How steps before and after a change of what is trained are refused."""
    model = Skipping()
    model.layers[0].requires_grad_(requires_grad=False)
    made = spread(model, spec)
    first = step(made)
    for module in made.modules:
        module.requires_grad_()
    return first, step(made)


@pytest.mark.parametrize("spec", ["single", "ddp:2", "zero1:2", "fsdp:2"])
def test_what_was_frozen_cannot_be_trained_later(gloo: Pool, spec: str) -> None:
    for before, after in gloo.run(ranks_of(spec), unfrozen, spec):
        assert not before
        assert "frozen when the model was spread" in after
        assert "'layers.0.weight'" in after


def test_an_optimizer_of_ones_own_may_unfreeze_what_it_has() -> None:
    model = Skipping()
    model.layers[0].requires_grad_(requires_grad=False)
    made = as_distributed(
        model, "single", optimizer=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu"
    )
    assert not step(made)
    model.requires_grad_()
    assert not step(made)
    changed, before = dict(model.named_parameters()), dict(Skipping().named_parameters())
    assert not changed["layers.0.weight"].equal(before["layers.0.weight"])


def skipped(spec: str) -> tuple[str, str, float]:
    """How steps are refused that leave out a layer, and how far parameters are from those before
    that.
    """
    model = Skipping()
    made = spread(model, spec)
    first, before = step(made), values(made)
    model.skips = True
    return first, step(made), farthest(values(made), before)


@pytest.mark.parametrize("spec", ["ddp:2", "zero1:2"])
def test_a_step_without_all_gradients_is_refused_before_anything_changes(
    gloo: Pool, spec: str
) -> None:
    for first, said, apart in gloo.run(2, skipped, spec):
        assert not first
        assert "some parameters got no gradient" in said
        assert "'layers.2.weight'" in said
        assert apart == 0


def frozen_late(spec: str) -> tuple[str, float]:
    """How a step is refused after a layer was frozen, and how far that is from one process's."""
    model, alone = Skipping(), Skipping()
    made = spread(model, spec)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    said = ""
    for number in range(2):
        if number:
            alone.layers[0].requires_grad_(requires_grad=False)
            for name, parameter in made.modules[0].named_parameters():
                parameter.requires_grad_("layers.0" not in name)
        said += step(made)
        optimizer.zero_grad()
        mse_loss(alone(pair()[0]), pair()[1]).backward()
        optimizer.step()
    return said, farthest(values(made), dict(alone.named_parameters()))


def test_replicas_cannot_freeze_later_and_fsdp_can(gloo: Pool) -> None:
    for said, _ in gloo.run(2, frozen_late, "ddp:2"):
        assert "some parameters got no gradient" in said
    for said, apart in gloo.run(2, frozen_late, "fsdp:2"):
        assert not said
        assert apart < 1e-6
