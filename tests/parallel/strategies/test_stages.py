"""Which parameters the stages of a pipeline have, and what becomes of those that are nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear, mse_loss

from ckptkit.errors import LayoutError, UsageError
from ckptkit.parallel import as_distributed
from tests.live.network import batch, loss_of, network
from tests.live.pool import Pool
from tests.parallel.strategies.test_losses import ranks_of
from tests.parallel.strategies.training import Layered, spread, train, values

WIDTH = 4


class Unused(Layered):
    """A model with a layer that does not run."""

    def __init__(self) -> None:
        super().__init__(2, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)


def with_unused() -> list[str]:
    made = as_distributed(
        Unused(), "pp:2", optimizer=torch.optim.SGD, microbatches=2, example=torch.ones(2, WIDTH)
    )
    made.step(mse_loss, (torch.ones(2, WIDTH), torch.zeros(2, WIDTH)))
    return list(values(made))


def test_what_does_not_run_is_on_a_stage_all_the_same(gloo: Pool) -> None:
    first, last = gloo.run(2, with_unused)
    assert sorted(first + last) == sorted(dict(Unused().named_parameters()))


class Tied(nn.Module):
    """A model whose last operation takes the weights of the first layer."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.by_name = by_name
        self.embed: nn.Linear | None = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.weight = self.embed.weight if by_name else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """With the weights under the name that this model gives them."""
        hidden = hidden if self.embed is None else self.embed(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.embed is not None and not self.by_name:
            return linear(hidden, self.embed.weight)
        return hidden if self.weight is None else linear(hidden, self.weight)


def refused(make: Callable[[], nn.Module]) -> str:
    """How a pipeline of a model is refused on this rank."""
    try:
        as_distributed(make(), "pp:2", example=torch.ones(2, WIDTH), microbatches=2)
    except (LayoutError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("by_name", [True, False])
def test_weights_that_two_stages_would_have_are_refused(gloo: Pool, by_name: bool) -> None:
    for said in gloo.run(2, refused, partial(Tied, by_name=by_name)):
        assert ("tied weights on two stages" if by_name else "do not give what") in said


class WithTail(Layered):
    """A model that runs its norm and its head only where it has both."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__(4, WIDTH)
        self.norm: nn.LayerNorm | None = nn.LayerNorm(WIDTH)
        self.head: nn.Linear | None = head
        self.scale: nn.Parameter | None = nn.Parameter(torch.ones(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden state, where a part of the tail is missing."""
        hidden = super().forward(hidden)
        if self.norm is None or self.head is None or self.scale is None:
            return hidden
        found: torch.Tensor = self.head(self.norm(hidden)) * self.scale
        return found


class Scaled(Layered):
    """A model that does more to its hidden state than run its layers, before a head of zeros."""

    def __init__(self) -> None:
        super().__init__(4, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.head.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the head makes of it."""
        found: torch.Tensor = self.head(super().forward(3 * hidden))
        return found


def test_a_head_of_zeros_does_not_hide_what_a_split_changes(gloo: Pool) -> None:
    for said in gloo.run(2, refused, Scaled):
        assert "do not give what the whole model gives" in said


class SlowLinear(nn.Linear):
    """A layer that takes longer than all others together."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As it is, after a while."""
        time.sleep(0.1)
        return super().forward(hidden)


def parts_with_tail(count: int, balance: str) -> list[str]:
    """The parameters of a stage of a model that the evenest split cuts where it cannot be cut."""
    torch.manual_seed(0)
    head = SlowLinear(WIDTH, WIDTH) if balance == "time" else nn.Linear(WIDTH, 100 * WIDTH)
    model = WithTail(head)
    inputs = torch.randn(count, WIDTH)
    wanted = model(inputs).detach()
    made = as_distributed(
        model,
        f"pp:{count}",
        optimizer=torch.optim.SGD,
        balance=balance,
        example=inputs,
        microbatches=count,
    )
    loss = made.step(mse_loss, (inputs, torch.zeros_like(wanted)))
    torch.testing.assert_close(loss, mse_loss(wanted, torch.zeros_like(wanted)))
    return list(values(made))


@pytest.mark.parametrize(("count", "balance"), [(2, "time"), (3, "parameters")])
def test_a_split_that_does_not_work_gives_way_to_the_next_best(
    gloo: Pool, count: int, balance: str
) -> None:
    *_, last = gloo.run(count, parts_with_tail, count, balance)
    assert {name.partition(".")[0] for name in last} == {"norm", "head", "scale"}


class Shared(Layered):
    """Two neighbours in the middle have the same weights."""

    def __init__(self) -> None:
        super().__init__(4, WIDTH)
        self.layers[2].weight = self.layers[1].weight


def stage_of_shared() -> list[str]:
    made = as_distributed(Shared(), "pp:2", example=torch.ones(2, WIDTH), microbatches=2)
    (stage,) = made.modules
    return [name for name, _ in stage.named_parameters(remove_duplicate=False)]


def test_neighbours_with_the_same_weights_are_on_one_stage(gloo: Pool) -> None:
    stages = gloo.run(2, stage_of_shared)
    assert any({"layers.1.weight", "layers.2.weight"} <= set(stage) for stage in stages)


class Particular(Layered):
    """A model that rank 1 cannot cut in its middle."""

    def __init__(self) -> None:
        super().__init__(4, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Something else there."""
        second, third = self.layers[1:3]
        is_cut = isinstance(second, nn.Linear) and not isinstance(third, nn.Linear)
        return super().forward(hidden) + (is_cut and dist.get_rank() == 1)


def test_ranks_that_would_cut_at_different_places_are_told(gloo: Pool) -> None:
    for said in gloo.run(2, refused, Particular):
        assert "rank 1 has another split into stages than rank 0" in said


class Failing(Layered):
    """A model that rank 1 cannot run."""

    def __init__(self) -> None:
        super().__init__(4, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As when memory is short there."""
        if dist.get_rank() == 1:
            raise RuntimeError("no room on rank 1")
        return super().forward(hidden)


def test_a_rank_that_cannot_run_the_example_keeps_nobody_waiting(gloo: Pool) -> None:
    for said in gloo.run(2, refused, Failing):
        assert "no room on rank 1" in said


STAGES = (("embed", "layers.0"), ("layers.1", "norm", "head", "scale"))


def frozen_stage(spec: str, stage: int, location: str) -> dict[str, bool]:
    """Which parameters training changes where nothing of a stage is trained."""
    model = network(0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(STAGES[stage]))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = as_distributed(
        model, spec, optimizer=torch.optim.AdamW, microbatches=2, example=batch(0)[0][:2]
    )
    train(made, range(2))
    made.save(location, 2, timeout=30, differing=["*seen"])
    first = train(made, range(2, 4))
    made.load(location, timeout=30)
    assert train(made, range(2, 4)) == first
    return {name: not value.equal(before[name]) for name, value in values(made).items()}


@pytest.mark.parametrize(
    ("spec", "stage"),
    [("pp:2", 0), ("pp:2", 1), ("pp:2,zero1:2", 0), ("pp:2,zero1:2", 1), ("pp:2,fsdp:2", 0)],
)
def test_a_stage_may_be_frozen(gloo: Pool, tmp_path: Path, spec: str, stage: int) -> None:
    for changed in gloo.run(ranks_of(spec), frozen_stage, spec, stage, str(tmp_path)):
        assert changed == {name: not name.startswith(STAGES[stage]) for name in changed}


class Passage(NamedTuple):
    """What a batch may be made of."""

    tokens: torch.Tensor
    weights: torch.Tensor


def odd_targets() -> str:
    made = spread("pp:2")
    tokens, targets = batch(0)
    pair = tokens, Passage(targets, targets)
    try:
        made.step(lambda found, wanted: loss_of(found, wanted.tokens), pair)
    except UsageError as error:
        return str(error)
    return ""


def test_targets_that_are_no_tensor_are_refused_on_every_rank(gloo: Pool) -> None:
    for said in gloo.run(2, odd_targets):
        assert "the targets of a pipeline are one tensor" in said
