"""The same few steps of training under any strategy, and in one process without any."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptkit.live.state.entries import canonical_names, every_module
from ckptkit.parallel import Distributed, as_distributed
from ckptkit.parallel.strategies.data_parallel import OverlappingZero1
from tests.live.network import batch, loss_of, network

STEPS = 4
RULES: dict[str, Any] = {
    "rules": [
        {"match": "embed.weight", "tp": "shard(0)"},
        {"match": "re:.*(up\\.weight|up\\.bias|head\\.weight)", "tp": "shard(0)"},
        {"match": "*.down.weight", "tp": "shard(1)"},
        {"match": "*", "tp": "replicate"},
    ]
}
# Small enough to make several units of the little model.
OPTIONS: dict[str, Any] = {
    "optimizer": torch.optim.AdamW,
    "optimizer_options": {"lr": 0.03},
    "group_below": 300,
}

Values = Mapping[str, torch.Tensor]


def spread(spec: str, seed: int = 0, **options: Any) -> Distributed:
    """The little model under a strategy, with whatever that needs besides."""
    known = {**OPTIONS, **options}
    if "tp" in spec:
        known.setdefault("rules", RULES)
    if "pp" in spec:
        known.setdefault("microbatches", 4 if "pp:4" in spec else 2)
        known.setdefault("example", batch(0)[0][:2])
    return as_distributed(network(seed), spec, **known)


def train(dist: Distributed, steps: Sequence[int]) -> list[float]:
    """The losses of some steps over batches that all replicas share."""
    return [float(dist.step(loss_of, dist.share(batch(step)))) for step in steps]


def values(dist: Distributed) -> dict[str, torch.Tensor]:
    """The whole parameters that this rank knows of."""
    if isinstance(dist.optimizer, OverlappingZero1):
        dist.optimizer.wait()
    found = {}
    for module in dist.modules:
        canonical = canonical_names(every_module(module))
        for name, parameter in module.named_parameters():
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            found[canonical(name)] = whole.detach().clone()
    return found


@functools.cache
def reference(steps: int = STEPS) -> tuple[list[float], Values]:
    """The losses and parameters of one process alone."""
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.named_parameters())


def farthest(mine: Values, theirs: Values) -> float:
    """The largest difference between parameters of the same names."""
    with torch.no_grad():
        return max(float((tensor - theirs[name]).abs().max()) for name, tensor in mine.items())


class Layered(nn.Module):
    """Many tiny layers, one after another."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What comes out of the last."""
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
