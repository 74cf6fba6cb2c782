"""A model may be looked at between steps: training goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from tests.live.network import batch, loss_of
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import farthest, reference, spread, train, values

WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", ["ddp:2", *CUT])
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


@pytest.mark.parametrize("spec", ["fsdp:2", "zero2:2", "ddp:2,tp:2"])
def test_an_evaluation_sees_what_the_optimizer_has_made(gloo: Pool, spec: str) -> None:
    for parameters, is_current in gloo.run(ranks_of(spec), evaluated_before_the_update, spec):
        assert parameters < 1e-5
        assert is_current


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
