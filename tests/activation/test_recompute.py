"""Blocks that run again: in each backward, with the same inputs and random numbers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import CheckpointPolicy

from ckptkit.activation import checkpoint_activations
from ckptkit.activation.recompute import Recomputed, _keep_costly
from ckptkit.errors import UsageError
from tests.activation.network import batch, gpt, loss_of


@pytest.mark.parametrize("policy", ["full", "every:2", "offload"])
def test_backward_runs_again_where_the_graph_is_retained(policy: str) -> None:
    def twice(chosen: str | None) -> list[torch.Tensor]:
        model = gpt()
        if chosen:
            checkpoint_activations(model, chosen)
        torch.manual_seed(2)
        loss = loss_of(model(batch()[0]), batch()[1])
        weights = list(model.layers.parameters())
        loss.backward(retain_graph=True)
        found = [*torch.autograd.grad(loss, weights, retain_graph=True)]
        found += torch.autograd.grad(loss, weights)
        return found + [p.grad for p in weights if p.grad is not None]

    assert all(map(torch.equal, twice(policy), twice(None)))


@pytest.mark.parametrize("policy", ["full", "offload"])
def test_gradients_have_gradients(policy: str) -> None:
    def penalised(chosen: str | None) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = nn.ModuleList([SmoothBlock()])
        if chosen:
            checkpoint_activations(model, chosen, blocks=["0"])
        weights = list(model.parameters())
        loss = model[0](torch.linspace(-1, 1, 12).view(2, 6)).square().sum()
        first = torch.autograd.grad(loss, weights, create_graph=True)
        sum(each.square().sum() for each in first).backward()  # type: ignore[union-attr]
        return [p.grad for p in weights if p.grad is not None]

    for one, other in zip(penalised(policy), penalised(None), strict=True):
        torch.testing.assert_close(one, other)


class SmoothBlock(nn.Module):
    """A layer, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("forwards", torch.zeros(()))
        self.forwards: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What has second derivatives."""
        self.forwards += 1
        return torch.as_tensor(self.layer(x).tanh())


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_block_runs_again_in_the_mode_of_its_forward(policy: str) -> None:
    found = []
    for chosen in (None, policy):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 6))])
        if chosen:
            checkpoint_activations(model, chosen, blocks=["0"])
        loss = model[0](torch.ones(2, 6)).square().sum()
        model.eval()
        loss.backward()
        assert not any(module.training for module in model.modules())
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_selective_block_says_that_it_has_one_backward() -> None:
    model, _ = checkpoint_activations(gpt(), "selective")
    loss = loss_of(model(batch()[0]), batch()[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward once"):
        loss.backward()


def test_attention_that_draws_random_numbers_runs_again() -> None:
    x: Any = None  # no tensor is looked at
    keep: Any = partial(_keep_costly, x)
    flash, cudnn = (
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    )
    assert keep(flash, x, x, x) is CheckpointPolicy.MUST_SAVE
    assert keep(flash, x, x, x, 0.0, True) is CheckpointPolicy.MUST_SAVE
    assert keep(flash, x, x, x, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keep(flash, x, x, x, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keep(cudnn, x, x, x, x, True, 0.1) is CheckpointPolicy.PREFER_RECOMPUTE
    assert keep(torch.ops.aten.mm.default, x, x) is CheckpointPolicy.MUST_SAVE


class Mixing(nn.Module):
    """Takes tensors by keyword and in a dictionary, and adds to a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, *, more: dict[str, torch.Tensor], seen: list[torch.Tensor]
    ) -> torch.Tensor:
        """Their mixture."""
        y = torch.as_tensor(self.layer(x).tanh() * more["scale"].exp())
        seen.append(y.detach())
        return y


def test_tensors_by_keyword_are_inputs_too_and_lists_are_added_to_once() -> None:
    found = []
    for policy in (None, "full"):
        torch.manual_seed(0)
        model = nn.ModuleList([Mixing()])
        if policy:
            checkpoint_activations(model, policy, blocks=["0"])
        scale, seen = torch.ones(4, requires_grad=True), [torch.zeros(())]
        model[0](torch.ones(2, 4), more={"scale": scale}, seen=seen).sum().backward()
        assert len(seen) == 2
        found.append([scale.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *found))


def test_a_keyword_that_changes_before_backward_is_no_silent_mistake() -> None:
    model, _ = checkpoint_activations(nn.ModuleList([Mixing()]), blocks=["0"])
    scale = torch.ones(4)
    loss = model[0](torch.ones(2, 4), more={"scale": scale}, seen=[]).sum()
    scale.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.filterwarnings("ignore")  # of what the compiler itself uses
def test_hooks_around_a_block_are_not_lost_by_compiling() -> None:
    block = SmoothBlock()
    run = Recomputed(block, block.forward, around=partial(nullcontext, None))
    compiled: Any = torch.compile(run, backend="eager")
    # Torch 2.11 only says that it cannot compile the line that raises.
    with pytest.raises((UsageError, Unsupported), match=r"cannot be compiled|raise UsageError"):
        compiled(torch.ones(2, 6))
    torch.compiler.reset()
