"""Optimizers and schedulers of torch go with every strategy, or are refused before it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from ckptkit.errors import UsageError
from ckptkit.parallel import as_distributed
from tests.live.network import batch, loss_of, network
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import farthest, spread, train, values


def accumulating(parameters: list[nn.Parameter]) -> Optimizer:
    """Makes its state at once."""
    return Adagrad(parameters, lr=0.1, initial_accumulator_value=0.5)


def resumed(spec: str, options: dict[str, Any], location: str) -> float:
    """How far parameters are from one process's where a job goes on from a checkpoint."""
    own: dict[str, Any] = {"optimizer": accumulating, "optimizer_options": {}, **options}
    first = spread(spec, **own)
    train(first, range(2))
    first.save(location, 2, timeout=30, differing=["*seen"])
    then = spread(spec, seed=1, **own)
    then.load(location, timeout=30)
    train(then, range(2, 4))
    alone = network(0)
    optimizer = accumulating(list(alone.parameters()))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(alone(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    return farthest(values(then), dict(alone.named_parameters()))


@pytest.mark.parametrize(
    ("spec", "options"), [("ddp:2", {}), ("zero1:2", {}), ("zero1:2", {"overlap": True})], ids=str
)
def test_a_function_may_make_an_optimizer_that_has_its_state_at_once(
    gloo: Pool, tmp_path: Path, spec: str, options: dict[str, Any]
) -> None:
    assert max(gloo.run(2, resumed, spec, options, str(tmp_path))) < 1e-5


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=8),
    "cyclic": lambda optimizer: CyclicLR(optimizer, 0.01, 0.05, step_size_up=2),
}


def scheduled(spec: str, name: str) -> float:
    """How far parameters are from one process's with the same scheduler."""
    schedule = SCHEDULERS[name]
    alone, dist = network(0), spread(spec)
    optimizer = AdamW(alone.parameters(), lr=0.03)
    schedulers = schedule(optimizer), schedule(dist.optimizer)
    for step in range(4):
        train(dist, [step])
        optimizer.zero_grad()
        loss_of(alone(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return farthest(values(dist), dict(alone.named_parameters()))


@pytest.mark.parametrize(
    ("spec", "name"),
    [("fsdp:2", "one_cycle"), ("zero1:2", "cyclic"), ("pp:2,zero1:2", "one_cycle")],
)
def test_schedulers_may_change_more_than_the_rate(gloo: Pool, spec: str, name: str) -> None:
    assert max(gloo.run(ranks_of(spec), scheduled, spec, name)) < 1e-5


class Complex(nn.Module):
    """A layer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Real and imaginary parts, added up."""
        return torch.view_as_real(inputs.to(self.weight.dtype) @ self.weight).sum(-1)


def wide() -> nn.Module:
    """A layer in double precision."""
    torch.manual_seed(0)
    return nn.Linear(4, 4, dtype=torch.float64)


def clipped(make: Callable[[], nn.Module], spec: str) -> list[tuple[torch.dtype, float]]:
    """The dtype of a norm and of what is clipped to it, and how far both are from torch's own."""
    alone, made = make(), as_distributed(make(), spec, optimizer=SGD)
    dtype = torch.float64 if make is wide else torch.float32
    pair = torch.eye(4, dtype=dtype), torch.ones(4, 4, dtype=dtype)
    mse_loss(alone(pair[0]), pair[1]).backward()
    wanted = clip_grad_norm_(alone.parameters(), 0.1)
    made.backward(mse_loss, pair)
    found = made.clip_grad_norm_(0.1)
    own = {"": made.clip_grad_norm_(1e6)}
    return [
        (found.dtype, float((found - wanted).abs())),
        (dtype, farthest(own, {"": torch.tensor(0.1, dtype=dtype)})),
    ]


@pytest.mark.parametrize("make", [wide, Complex])
@pytest.mark.parametrize("spec", ["ddp:2", "fsdp:2"])
def test_gradients_of_other_dtypes_are_clipped_in_them(
    gloo: Pool, make: Callable[[], nn.Module], spec: str
) -> None:
    dtype, most = (torch.float64, 1e-12) if make is wide else (torch.float32, 1e-6)
    for found in gloo.run(2, clipped, make, spec):
        (norm_dtype, norm), (_, limit) = found
        assert norm_dtype is dtype
        assert norm < most
        assert limit < 1e-6


def test_sparse_gradients_are_clipped_too() -> None:
    norms = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        made = as_distributed(nn.Embedding(5, 4, sparse=is_sparse), "single", optimizer=SGD)
        made.backward(mse_loss, (torch.tensor([1, 3, 3]), torch.ones(3, 4)))
        norms.append([float(made.clip_grad_norm_(limit)) for limit in (0.1, 1e6)])
    assert norms[1] == pytest.approx(norms[0])
    assert norms[1][1] == pytest.approx(0.1, rel=1e-4)


def plain(parameters: list[nn.Parameter]) -> Optimizer:
    """Takes nothing but parameters."""
    return SGD(parameters)


def closing(parameters: list[nn.Parameter]) -> Optimizer:
    """Makes one that cannot be seen in what makes it."""
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (torch.optim.LBFGS, {}, "without a closure"),
        (torch.optim.LBFGS(network(0).parameters()), {}, "without a closure"),
        (torch.optim.LBFGS, {"lr": 1}, "without a closure"),
        (SGD, {"learning_rate": 1}, "'learning_rate'.*\n?.*it takes lr, momentum"),
        (plain, {"lr": 1}, "it takes parameters only"),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused_before_the_model_is_spread(
    optimizer: Any, options: dict[str, Any], reason: str
) -> None:
    model = network(0)
    with pytest.raises(UsageError, match=f"(?s){reason}"):
        as_distributed(model, "single", optimizer=optimizer, optimizer_options=options)
    assert as_distributed(model, "single").modules == (model,)


def test_a_function_that_makes_what_needs_a_closure_is_refused() -> None:
    with pytest.raises(UsageError, match="without a closure"):
        as_distributed(network(0), "single", optimizer=closing)


@pytest.mark.parametrize("model", [nn.Tanh(), nn.Linear(2, 2).requires_grad_(requires_grad=False)])
def test_an_optimizer_of_nothing_is_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="nothing of the model is trained"):
        as_distributed(model, "single", optimizer=SGD)
