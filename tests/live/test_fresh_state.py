"""The state of an optimizer in a single process, and how it comes to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from ckptkit.errors import LayoutError, UsageError
from ckptkit.live import ShardedOptimizerState
from tests.live.network import batch, loss_of, network
from tests.live.test_sharded_optimizer import UNEVEN, amsgrad, same


def trained_alone(make: Callable[[Sequence[nn.Parameter]], Optimizer]) -> tuple[nn.Module, Any]:
    model = network(0)
    optimizer = make(list(model.parameters()))
    inputs, targets = batch(0)
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    return model, optimizer


def test_one_process_needs_no_process_group() -> None:
    model, optimizer = trained_alone(amsgrad)
    state = ShardedOptimizerState(model, optimizer)
    full = state.gather(UNEVEN)
    assert full is not None
    assert same(full, optimizer.state[model.get_parameter(UNEVEN)])
    full["exp_avg"].fill_(3)
    assert not state.get(UNEVEN)["exp_avg"].eq(3).any()
    state.scatter(UNEVEN, full)
    assert state.get(UNEVEN)["exp_avg"].eq(3).all()


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("shape", [(1,), (7, 7)])
def test_a_shard_of_another_shape_changes_nothing(shape: tuple[int, ...], has_state: bool) -> None:
    """Not even one whose elements a copy could repeat."""
    model, optimizer = trained_alone(amsgrad)
    state = ShardedOptimizerState(model, optimizer)
    wrong = state.clone().get(UNEVEN) | {"exp_avg": torch.ones(shape)}
    wrong["step"].fill_(3)
    if not has_state:
        state.release()
    before = state.clone().get(UNEVEN)
    with pytest.raises(LayoutError, match="keeps other things"):
        state.put(UNEVEN, wrong)
    assert same(state.get(UNEVEN), before)


def test_a_tensor_takes_no_place_of_a_plain_value() -> None:
    model, optimizer = trained_alone(amsgrad)
    state = ShardedOptimizerState(model, optimizer)
    given = state.clone().get(UNEVEN)
    optimizer.state[model.get_parameter(UNEVEN)]["step"] = 1
    with pytest.raises(LayoutError, match="keeps other things"):
        state.put(UNEVEN, given)


def test_state_of_another_shape_than_the_parameter_is_whole() -> None:
    model, optimizer = trained_alone(Adafactor)
    state = ShardedOptimizerState(model, optimizer)
    full = state.gather(UNEVEN)
    assert full is not None
    assert full["row_var"].shape == (12, 1)
    state.remove(UNEVEN)
    state.scatter(UNEVEN, full)
    assert same(state.gather(UNEVEN), full)


@pytest.mark.parametrize(
    "kind",
    ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"],
)
def test_every_optimizer_says_itself_what_it_keeps(kind: str) -> None:
    make: type[Optimizer] = getattr(torch.optim, kind)
    model, optimizer = trained_alone(make)
    state = ShardedOptimizerState(model, optimizer)
    kept = state.get(UNEVEN)
    weights = model.get_parameter(UNEVEN).detach().clone()
    state.remove(UNEVEN)
    made = state.create(UNEVEN)
    shapes = {key: (value.shape, value.dtype) for key, value in made.items()}
    assert shapes == {key: (value.shape, value.dtype) for key, value in kept.items()}
    assert made["step"] == 0
    assert torch.equal(model.get_parameter(UNEVEN), weights)


def test_creating_state_steps_nothing_and_tells_nobody() -> None:
    model, optimizer = trained_alone(AdamW)
    scheduler = StepLR(optimizer, 1)
    stepped: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    state = ShardedOptimizerState(model, optimizer)
    before = {name: state.gather(name) for name in state.names if name != UNEVEN}
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state.remove(UNEVEN)
    state.create(UNEVEN)
    assert not stepped
    assert scheduler.last_epoch == 0
    assert all(same(state.gather(name), full) for name, full in before.items())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_what_is_there_is_not_created_again() -> None:
    state = ShardedOptimizerState(*trained_alone(AdamW))
    with pytest.raises(UsageError, match="there is state already"):
        state.create(UNEVEN)


def test_tied_and_frozen_parameters() -> None:
    model = network(0)
    assert model.head is not None
    assert model.embed is not None
    model.head.weight = model.embed.weight
    optimizer = AdamW([p for name, p in model.named_parameters() if name != UNEVEN])
    state = ShardedOptimizerState(model, optimizer)
    assert "head.weight" not in state.names
    state.create("head.weight")
    assert state.has("embed.weight")
    assert same(state.gather("head.weight"), state.gather("embed.weight"))
    with pytest.raises(UsageError, match="the optimizer steps no parameter of this name"):
        state.create(UNEVEN)
