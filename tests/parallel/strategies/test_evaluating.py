"""A model may be looked at between steps: training goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from ckptkit.parallel import as_distributed
from tests.live.network import batch, loss_of
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import farthest, reference, spread, train, values

WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}
EACH_CUT = ["fsdp:2", "zero2:2", "tp:2", pytest.param("ddp:2,tp:2", marks=pytest.mark.long)]
CUT = ("fsdp:2", "zero2:2", "ddp:2,fsdp:2", "tp:2,fsdp:2", "ddp:2,tp:2")


def evaluated(spec: str, way: str) -> tuple[float, bool]:
    """How far parameters are from one process's where each step is followed by an evaluation, and
    whether that leaves nothing in memory.
    """
    dist = spread(spec)
    before = dist.memory().parameters
    for step in range(3):
        train(dist, [step])
        with WAYS[way]():
            dist.model(batch(step)[0])
    return farthest(values(dist), reference(3)[1]), dist.memory().parameters == before


@pytest.mark.parametrize(
    ("spec", "way"),
    [
        *((spec, "no_grad") for spec in ("ddp:2", *CUT)),
        ("fsdp:2", "enable_grad"),
        pytest.param("ddp:2,tp:2", "enable_grad", marks=pytest.mark.long),
    ],
)
def test_an_evaluation_between_steps_changes_nothing(gloo: Pool, spec: str, way: str) -> None:
    for parameters, is_as_before in gloo.run(ranks_of(spec), evaluated, spec, way):
        assert parameters < 1e-5
        assert is_as_before


def evaluated_before_the_update(spec: str) -> tuple[float, bool]:
    """The same, between gradients and what is done with them; and whether the next evaluation is
    of the new parameters.
    """
    dist = spread(spec)
    inputs, _ = batch(0)
    found = []
    for step in range(3):
        dist.zero_grad()
        dist.backward(loss_of, dist.share(batch(step)))
        with torch.no_grad():
            found.append(dist.model(inputs))
        dist.clip_grad_norm_(1e6)
        dist.optimizer.step()
        with torch.no_grad():
            found.append(dist.model(inputs))
    is_new = [not a.equal(b) for a, b in zip(found[::2], found[1::2], strict=True)]
    is_old = [a.equal(b) for a, b in zip(found[1::2], found[2::2], strict=False)]
    return farthest(values(dist), reference(3)[1]), all(is_new + is_old)


@pytest.mark.parametrize("spec", EACH_CUT)
def test_an_evaluation_sees_what_the_optimizer_has_made(gloo: Pool, spec: str) -> None:
    for parameters, is_current in gloo.run(ranks_of(spec), evaluated_before_the_update, spec):
        assert parameters < 1e-5
        assert is_current


def looked_at_before_the_update(spec: str) -> tuple[float, bool]:
    """The same, where something is computed with gradients in mind, and no backward pass comes."""
    dist = spread(spec)
    inputs, _ = batch(0)
    changes = []
    for step in range(3):
        dist.zero_grad()
        dist.backward(loss_of, dist.share(batch(step)))
        before = dist.model(inputs).detach()
        dist.optimizer.step()
        changes.append(not before.equal(dist.model(inputs).detach()))
    return farthest(values(dist), reference(3)[1]), all(changes)


@pytest.mark.parametrize("spec", EACH_CUT)
def test_what_was_gathered_before_an_update_is_not_used_after_it(gloo: Pool, spec: str) -> None:
    for parameters, is_current in gloo.run(ranks_of(spec), looked_at_before_the_update, spec):
        assert parameters < 1e-5
        assert is_current


class Headed(torch.nn.Module):
    """Its last two modules are gathered together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(8, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.head = torch.nn.Linear(64, 64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(self.norm(self.body(inputs))))


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def asked_for_its_head_alone(spec: str) -> float:
    """How far parameters are from those of a model whose head is never called by itself."""
    made = [
        as_distributed(Headed(), spec, optimizer=torch.optim.AdamW, group_below=2048)
        for _ in range(2)
    ]
    data = torch.randn(4, 8), torch.randn(4, 64)
    for _ in range(3):
        for dist in made:
            dist.step(squared, data)
        with torch.no_grad():
            made[0].model.head(torch.ones(2, 64))
    return farthest(values(made[0]), values(made[1]))


def asked_for_its_head_in_pieces(spec: str) -> float:
    """The same for a loss of a head by itself, too, where gradients are forgotten late."""
    made = [
        as_distributed(Headed(), spec, optimizer=torch.optim.AdamW, group_below=2048)
        for _ in range(2)
    ]
    inputs, targets = torch.randn(4, 8), torch.randn(4, 64)
    for _ in range(3):
        outputs = made[0].model(inputs)
        again = made[0].model.head(torch.ones(2, 64))
        made[0].zero_grad()
        (squared(outputs, targets) + again.square().mean()).backward()
        made[0].optimizer.step()
        made[1].zero_grad()
        outputs = made[1].model(inputs)
        again = made[1].model.head(torch.ones(2, 64))
        (squared(outputs, targets) + again.square().mean()).backward()
        made[1].optimizer.step()
    return farthest(values(made[0]), values(made[1]))


@pytest.mark.parametrize("spec", ["fsdp:2", "zero2:2"])
def test_gradients_may_be_forgotten_while_a_module_is_called_by_itself(
    gloo: Pool, spec: str
) -> None:
    assert max(gloo.run(2, asked_for_its_head_in_pieces, spec)) == 0


class Fragile(Headed):
    """Refuses inputs without a sign, in its middle."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(inputs))
        if not inputs.any():
            raise ValueError("no inputs")
        return torch.as_tensor(self.head(hidden))


def interrupted(spec: str) -> tuple[float, bool]:
    """The same where a forward pass raises between gradients and the update that they make, and
    whether the next one is of the new parameters.
    """
    made = [
        as_distributed(kind(), spec, optimizer=torch.optim.AdamW, group_below=2048)
        for kind in (Fragile, Headed)
    ]
    inputs, targets = torch.randn(4, 8), torch.randn(4, 64)
    for _ in range(3):
        for dist in made:
            dist.zero_grad()
            dist.backward(squared, (inputs, targets))
            if dist is made[0]:
                with pytest.raises(ValueError, match="no inputs"):
                    dist.model(torch.zeros(4, 8))
            dist.optimizer.step()
    is_alike = made[0].model(inputs).equal(made[1].model(inputs))
    return farthest(values(made[0]), values(made[1])), bool(is_alike)


@pytest.mark.parametrize("spec", ["fsdp:2", "zero2:2"])
def test_a_forward_pass_that_raises_leaves_nothing_old(gloo: Pool, spec: str) -> None:
    assert gloo.run(2, interrupted, spec) == [(0, True)] * 2


@pytest.mark.parametrize("spec", ["fsdp:2", "zero2:2"])
def test_a_module_may_be_called_by_itself(gloo: Pool, spec: str) -> None:
    assert max(gloo.run(2, asked_for_its_head_alone, spec)) == 0


def zeroed_late(spec: str) -> float:
    """How far parameters are where gradients are forgotten between forward and backward."""
    dist = spread(spec)
    for step in range(3):
        inputs, targets = dist.share(batch(step))
        loss = loss_of(dist.model(inputs), targets)
        dist.zero_grad()
        loss.backward()
        dist.optimizer.step()
    return farthest(values(dist), reference(3)[1])


@pytest.mark.parametrize("spec", ["fsdp:2", "zero2:2"])
def test_gradients_may_be_forgotten_after_the_forward_pass(gloo: Pool, spec: str) -> None:
    assert max(gloo.run(2, zeroed_late, spec)) < 1e-5
