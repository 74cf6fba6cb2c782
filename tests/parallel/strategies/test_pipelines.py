"""What runs through a pipeline, and what that leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ckptkit.errors import UsageError
from ckptkit.parallel import as_distributed
from tests.live.network import batch, loss_of
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import spread

MICROBATCHES = 2


class Counted(nn.Linear):
    """Counts its passes in a tensor that it makes anew each time."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("passes", torch.zeros(()))
        self.passes: torch.Tensor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As without counting."""
        self.passes = self.passes + 1
        return super().forward(hidden)


def normed() -> nn.Sequential:
    """A model whose buffers tell how often it ran, and on what."""
    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), Counted(), spectral(nn.Linear(4, 4)), nn.BatchNorm1d(4)
    )


def pairs() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three batches."""
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 4, generator=random), torch.randn(8, 4, generator=random)) for _ in "abc"
    ]


def buffers_apart(schedule: str) -> list[float]:
    """How far the buffers of this rank's stages are from one process's."""
    options: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "optimizer_options": {"lr": 0.1},
        "microbatches": MICROBATCHES,
        "schedule": schedule,
    }
    dist, alone = as_distributed(normed(), "pp:2", **options), normed()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for inputs, targets in pairs():
        dist.step(mse_loss, (inputs, targets))
        optimizer.zero_grad()
        pieces = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        for piece, wanted in pieces:
            (mse_loss(alone(piece), wanted) / MICROBATCHES).backward()
        optimizer.step()
    known = dict(alone.named_buffers())
    found = [(name, b) for module in dist.modules for name, b in module.named_buffers()]
    return [float((known[name] - buffer).abs().max()) for name, buffer in found]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_buffers_change_as_often_as_in_one_process(gloo: Pool, schedule: str) -> None:
    found = gloo.run(2, buffers_apart, schedule)
    assert sum(map(len, found)) == len(dict(normed().named_buffers()))
    assert max(max(apart, default=0.0) for apart in found) < 1e-5


@pytest.mark.parametrize("spec", ["pp:2,zero1:2", "pp:2,fsdp:2"])
def test_they_do_where_stages_are_wrapped(gloo: Pool, spec: str) -> None:
    for calls in gloo.run(ranks_of(spec), calls_seen, spec):
        assert set(calls) == {2 * MICROBATCHES}


def calls_seen(spec: str) -> list[int]:
    """How often the blocks of this rank ran in two steps."""
    dist = spread(spec, microbatches=MICROBATCHES)
    for step in range(2):
        dist.step(loss_of, dist.share(batch(step)))
    buffers = [pair for module in dist.modules for pair in module.named_buffers()]
    return [int(buffer) for name, buffer in buffers if name.endswith("calls")]


def another_size() -> tuple[str, float]:
    """How a batch of another size is refused; and the loss of the next one, of the first size."""
    dist = spread("pp:2")
    inputs, targets = batch(0)
    dist.step(loss_of, (inputs, targets))
    said = ""
    try:
        dist.step(loss_of, (inputs[:4], targets[:4]))
    except UsageError as error:
        said = str(error)
    return said, float(dist.step(loss_of, batch(1)))


def test_a_batch_of_another_size_is_refused_on_every_rank(gloo: Pool) -> None:
    for said, loss in gloo.run(2, another_size):
        assert "the same shape in every step" in said
        assert "(4, 12)" in said
        assert loss > 0


def called() -> str:
    try:
        spread("pp:2").model(batch(0)[0])
    except UsageError as error:
        return str(error)
    return ""


def test_the_model_of_a_pipeline_says_that_it_cannot_be_called(gloo: Pool) -> None:
    for said in gloo.run(2, called):
        assert "dist.step and dist.backward run it" in said
