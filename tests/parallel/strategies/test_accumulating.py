"""Gradients of several backward passes add up under every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.live.network import batch, loss_of, network
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import farthest, spread, values

OPTIONS: dict[str, Any] = {
    "optimizer": torch.optim.SGD,
    "optimizer_options": {"lr": 0.5},
}


def alone() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and parameters of one process after two steps of two passes each."""
    model, losses = network(0), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        loss = loss_of(model(batch(step)[0]), batch(step)[1])
        loss.backward()
        losses.append(float(loss.detach()))
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(model.named_parameters())


def added_up(spec: str, options: dict[str, Any]) -> tuple[list[float], float]:
    """The mean losses of this rank's passes, and how far parameters are from one process's."""
    dist, losses = spread(spec, **{**OPTIONS, **options}), []
    for step in range(4):
        found = dist.backward(loss_of, dist.share(batch(step)))
        losses.append(sum(map(float, found)) / len(found) if found else 0.0)
        if step % 2:
            dist.optimizer.step()
            dist.zero_grad()
    return losses, farthest(values(dist), alone()[1])


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("ddp:2", {}),
        ("zero1:2", {}),
        ("fsdp:2", {"microbatches": 2}),
        ("pp:2", {"schedule": "gpipe", "microbatches": 3}),
        ("pp:2", {"schedule": "interleaved"}),
        ("pp:2,ddp:2", {}),
        ("pp:2,zero1:2", {}),
        ("pp:2,fsdp:2", {}),
        ("pp:2,tp:2", {}),
    ],
    ids=str,
)
def test_gradients_add_up_as_in_one_process(gloo: Pool, spec: str, options: dict[str, Any]) -> None:
    for _, parameters in gloo.run(ranks_of(spec), added_up, spec, options):
        assert parameters < 1e-5


def test_the_last_stage_gives_the_losses_of_its_micro_batches(gloo: Pool) -> None:
    options = {"microbatches": 3, "schedule": "gpipe"}
    (first, _), (last, _) = gloo.run(2, added_up, "pp:2", options)
    assert first == [0.0] * 4
    assert last == pytest.approx(alone()[0], abs=1e-5)
