"""Every optimizer resumes with its state, its counts and its options, here or elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RMSprop,
)

from ckptkit.live import Checkpointer
from tests.live.gathering import Arrays, Comparison, gathered
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, MakeOptimizer, build

PLACES = ("plain", "ddp:2", "fsdp2:2", "zero1:2")
FIRST, REST = range(3), range(3, 6)


def two_groups(parameters: Sequence[nn.Parameter]) -> Optimizer:
    """What most trainings do: no decay for vectors."""
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim < 2]
    return AdamW(
        [
            {"params": matrices, "weight_decay": 0.1, "name": "matrices"},
            {"params": vectors, "weight_decay": 0.0, "lr": 0.02, "name": "vectors"},
        ],
        lr=0.03,
        betas=(0.8, 0.95),
    )


MORE_PLACES = {"AdamW, two groups": ("pp:2", "tp:2"), "by row": ("pp:2",)}
# torch's Adafactor does not take DTensors, and ZeRO hands its groups over as they are.
IMPOSSIBLE = {("Adafactor", "fsdp2:2"), ("AdamW, two groups", "zero1:2")}


class ByRow(Optimizer):
    """Keeps one number for each row, a short history, and a value that is no tensor."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gradients are divided by the size that those of their row have had."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                size = gradient.square().reshape(gradient.shape[0], -1).mean(dim=1, keepdim=True)
                state["rows"] = state.get("rows", torch.zeros_like(size)) * 0.9 + size
                state["history"] = state.get("history", torch.zeros(3)).roll(1)
                state["history"][0] += group["lr"]
                state["seen"] = state.get("seen", 0) + 1
                scaled = gradient / (state["rows"].reshape(-1, *[1] * (gradient.ndim - 1)) + 1e-8)
                parameter.sub_(group["lr"] * scaled * state["history"].sum() * state["seen"])


KINDS: dict[str, MakeOptimizer] = {
    "AdamW": lambda p: AdamW(p, lr=0.03),
    "AdamW, many at once": lambda p: AdamW(p, lr=0.03, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, lr=0.03, fused=True),
    "AdamW, rate in a tensor": lambda p: AdamW(p, lr=torch.tensor(0.03)),
    "AdamW, two groups": two_groups,
    "Adam, amsgrad": lambda p: Adam(p, lr=0.03, amsgrad=True),
    "Adamax": lambda p: Adamax(p, lr=0.03),
    "NAdam": lambda p: NAdam(p, lr=0.03),
    "SGD": lambda p: SGD(p, lr=0.03),
    "SGD, momentum": lambda p: SGD(p, lr=0.03, momentum=0.9, nesterov=True),
    "Adadelta": lambda p: Adadelta(p, lr=0.5),
    "Adagrad": lambda p: Adagrad(p, lr=0.03, initial_accumulator_value=0.1),
    "RMSprop": lambda p: RMSprop(p, lr=0.003, momentum=0.5, centered=True),
    "Adafactor": lambda p: Adafactor(p, lr=0.03),
    "by row": lambda p: ByRow(p, lr=0.001),
}


def save(layout: str, kind: str, location: str) -> tuple[Arrays, list[dict[str, Any]], list[float]]:
    """Train and save; the tensors and options then, and the losses of the next steps."""
    job = build(layout, make=KINDS[kind])
    job.train(FIRST)
    for number, group in enumerate(job.optimizer.param_groups):
        group["lr"] *= 0.9 + number  # as a scheduler would have done
    with Checkpointer(location, timeout=30, differing=["*seen"]) as checkpointer:
        checkpointer.save(3, model=job.model, optimizer=job.optimizer)
    return gathered(job), options(job.optimizer), job.train(REST)


def load(
    layout: str, kind: str, steps: Mapping[str, tuple[str, Arrays]]
) -> dict[str, tuple[list[str], list[dict[str, Any]], list[float]]]:
    """What differs after loading each step, the options, and the losses of the next steps."""
    found = {}
    for source, (location, whole) in steps.items():
        job = build(layout, seed=5, make=KINDS[kind])
        with Checkpointer(location, timeout=30) as checkpointer:
            checkpointer.restore(model=job.model, optimizer=job.optimizer)
        differences = Comparison(job).differences(whole)
        found[source] = (differences, options(job.optimizer), job.train(REST))
    return found


def options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: float(v) if torch.is_tensor(v) else v for key, v in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_where_it_was(gloo: Pool, tmp_path: Path, kind: str) -> None:
    saved = {}
    places = [place for place in PLACES if (kind, place) not in IMPOSSIBLE]
    for layout in [*places, *MORE_PLACES.get(kind, ())]:
        location = str(tmp_path / layout)
        ranks = gloo.run(LAYOUTS[layout].ranks, save, layout, kind, location)
        whole: dict[str, Any] = {}
        for arrays, _, _ in ranks:
            whole = dict(arrays) | whole
        saved[layout] = (whole, *ranks[0][1:])
    steps = {layout: (str(tmp_path / layout), saved[layout][0]) for layout in saved}
    assert kind == "SGD" or any(name.startswith("optimizer/") for name in saved["plain"][0])
    for layout in saved:
        for rank in gloo.run(LAYOUTS[layout].ranks, load, layout, kind, steps):
            for source, (differences, found, losses) in rank.items():
                assert not differences, f"{source} into {layout}"
                assert found == saved[source][1], f"{source} into {layout}"
                assert losses == pytest.approx(saved[source][2], rel=1e-3)
            assert rank[layout][2] == saved[layout][2], f"{layout} goes on otherwise"
