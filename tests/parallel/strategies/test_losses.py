"""Every strategy trains as one process alone does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

from tests.live.network import batch, loss_of, network
from tests.live.pool import Pool
from tests.parallel.strategies.training import STEPS, farthest, reference, spread, train, values

# Sizes of one, and one that does not divide; the other tests run those of two, and these of four.
STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp:1": {},
    "fsdp:1": {},
    "fsdp:3": {},
}
ON_FOUR = (
    "ddp:4",
    "zero1:4",
    "zero2:4",
    "zero3:4",
    "fsdp:4",
    "ddp:2,fsdp:2",
    "ddp:2,zero2:2",
    "tp:4",
    "fsdp:2,tp:2",
    "tp:2,fsdp:2",
    "zero2:2,tp:2",
    "ddp:2,tp:2",
    "pp:4",
    "pp:2,ddp:2",
    "pp:2,zero1:2",
    "pp:2,fsdp:2",
    "pp:2,tp:2",
)
ON_EIGHT = ("pp:2,tp:2,fsdp:2",)
MORE_STEPS = 6
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("pp:2", {"schedule": "gpipe"}),
    ("pp:2", {"schedule": "interleaved"}),
    ("pp:2", {"balance": "time"}),
    ("pp:2,fsdp:2", {"schedule": "interleaved"}),
    ("fsdp:2", {"offload": True}),
    ("fsdp:2", {"group_below": 0}),
    ("fsdp:2", {"group_below": "1GiB"}),
    ("fsdp:2", {"microbatches": 3}),
    ("ddp:2", {"microbatches": 3}),
]


def ranks_of(spec: str) -> int:
    """How many ranks a strategy has that says all its sizes."""
    found = 1
    for axis in spec.split(","):
        found *= int(axis.partition(":")[2] or 1)
    return found


def differences(spec: str, options: dict[str, Any], steps: int = STEPS) -> tuple[str, float, float]:
    """How far losses and parameters are from those of one process."""
    dist = spread(spec, **options)
    losses, wanted = train(dist, range(steps)), reference(steps)
    apart = max(abs(a - b) for a, b in zip(losses, wanted[0], strict=True))
    return str(dist.strategy), apart, farthest(values(dist), wanted[1])


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        *STRATEGIES.items(),
        *OTHERS,
        pytest.param("pp:2,tp:2,fsdp:1", {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_losses_and_parameters_are_those_of_one_process(
    gloo: Pool, spec: str, options: dict[str, Any]
) -> None:
    for written, losses, parameters in gloo.run(ranks_of(spec), differences, spec, options):
        assert written == spec
        assert losses < 1e-5
        assert parameters < 1e-5


# What `as_distributed` puts together in another way than test_checkpoints.py trains; the rest of
# four ranks is longer and larger only.
APART = ("zero1:4", "zero3:4", "pp:4", "ddp:2,zero2:2", "fsdp:2,tp:2", *ON_EIGHT)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec in APART else pytest.mark.long)
        for spec in (*ON_FOUR, *ON_EIGHT)
    ],
)
def test_they_still_are_after_more_steps_on_more_ranks(gloo: Pool, spec: str) -> None:
    for written, losses, parameters in gloo.run(ranks_of(spec), differences, spec, {}, MORE_STEPS):
        assert written == spec
        assert losses < 1e-5
        assert parameters < 1e-5


LIMIT = 0.3
"""Below the norm of the first gradients, and above that of none."""


def clipped(spec: str) -> tuple[list[float], float]:
    """The norms of gradients that are clipped, and how far parameters are from one process's."""
    dist, alone = spread(spec), network(0)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.03)
    apart = []
    for step in range(2):
        dist.zero_grad()
        dist.backward(loss_of, dist.share(batch(step)))
        found = dist.clip_grad_norm_(LIMIT)
        dist.optimizer.step()
        optimizer.zero_grad()
        loss_of(alone(batch(step)[0]), batch(step)[1]).backward()
        wanted = clip_grad_norm_(alone.parameters(), LIMIT)
        optimizer.step()
        assert wanted > LIMIT
        apart.append(abs(float(found - wanted)))
    return apart, farthest(values(dist), dict(alone.named_parameters()))


# What is cut by one axis is cut by it beside others too.
CLIPPED = (
    "single",
    "zero1:2",
    "fsdp:2",
    "ddp:2,fsdp:2",
    "ddp:2,tp:2",
    "tp:2,fsdp:2",
    "pp:2,zero1:2",
    *(pytest.param(spec, marks=pytest.mark.long) for spec in ON_EIGHT),
)


@pytest.mark.parametrize("spec", CLIPPED)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(gloo: Pool, spec: str) -> None:
    for apart, parameters in gloo.run(ranks_of(spec), clipped, spec):
        assert max(apart) < 1e-5
        assert parameters < 1e-5


@pytest.mark.parametrize("spec", ["ddp:2", "fsdp:2", "tp:2", "pp:2"])
def test_half_precision_stays_near(gloo: Pool, spec: str) -> None:
    options = {"mixed_precision": "bf16"}
    for _, losses, parameters in gloo.run(ranks_of(spec), differences, spec, options):
        assert 0 < losses < 0.1
        assert 0 < parameters < 0.1


def test_the_axis_without_a_size_gets_the_other_ranks(gloo: Pool) -> None:
    (written, *_), *_ = gloo.run(4, differences, "tp:2,fsdp", {})
    assert written == "tp:2,fsdp:2"
