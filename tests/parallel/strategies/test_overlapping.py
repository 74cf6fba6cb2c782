"""ZeRO-1 whose updated parameters are on their way while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ckptkit.parallel import as_distributed
from tests.live.pool import Pool
from tests.parallel.strategies.training import STEPS, Values, spread, train, values

WAYS = ("zero1:4", "pp:2,zero1:2")


def trained(spec: str, overlap: bool) -> tuple[list[float], Values]:
    dist = spread(spec, overlap=overlap)
    return train(dist, range(STEPS)), values(dist)


@pytest.mark.parametrize("spec", WAYS)
def test_nothing_differs_by_a_bit(gloo: Pool, spec: str) -> None:
    ranks = 4 if spec.startswith("pp") else int(spec[-1])
    plain = gloo.run(ranks, trained, spec, False)
    ahead = gloo.run(ranks, trained, spec, True)
    for (losses, found), (wanted_losses, wanted) in zip(ahead, plain, strict=True):
        assert losses == wanted_losses
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def parameters_of(state: Mapping[str, torch.Tensor]) -> Values:
    """Buffers are each rank's own."""
    return {name: it.clone() for name, it in state.items() if not name.endswith(".seen")}


def whoever_reads_waits(location: str) -> None:
    dist = spread("zero1:2", overlap=True)
    optimizer, model = dist.optimizer, dist.modules[0]
    for step in range(3):
        train(dist, [step])
        assert len(optimizer.on_their_way) == len(list(model.parameters()))
        if step == 0:
            state = parameters_of(model.state_dict())
        elif step == 1:
            dist.save(location, step, timeout=30, differing=["*seen"])
            state = parameters_of(model.state_dict())
        else:
            dist.load(location, timeout=30)
            found = parameters_of(model.state_dict())
            assert all(torch.equal(found[name], state[name]) for name in state)
        assert not optimizer.on_their_way


def test_states_and_checkpoints_wait_for_what_is_on_its_way(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, whoever_reads_waits, str(tmp_path))


def layers_wait_for_their_own() -> None:
    dist = spread("zero1:2", overlap=True)
    train(dist, [0])
    optimizer, model = dist.optimizer, dist.model.module
    seen = []
    for layer in model.children():
        layer.register_forward_pre_hook(lambda *_: seen.append(len(optimizer.on_their_way)))
    train(dist, [1])
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) > 1


def test_layers_wait_for_their_own_parameters_only(gloo: Pool) -> None:
    gloo.run(2, layers_wait_for_their_own)


class Uncalled(nn.Module):
    """Uses its layers without calling them: by a method, by their weights, and after the forward
    pass, in the loss.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Through all layers but for the head."""
        layers: Any = self.layers
        for layer in layers:
            hidden = functional.linear(hidden, layer.weight).tanh()
        hidden = layers[0].forward(hidden)
        return hidden + torch.stack([layer.bias for layer in layers]).sum()


class Late:
    """A message that is on its way until somebody waits for it, as those of a slow rank are."""

    def __init__(self, parameter: torch.Tensor, work: dist.Work) -> None:
        work.wait()
        self._parameter, self._value = parameter, parameter.detach().clone()
        parameter.data.fill_(float("nan"))

    def wait(self) -> None:
        """Come."""
        self._parameter.data.copy_(self._value)


def uncalled(overlap: bool) -> list[torch.Tensor]:
    made = as_distributed(
        Uncalled(),
        "zero1:2",
        optimizer=torch.optim.SGD,
        optimizer_options={"lr": 0.1},
        overlap=overlap,
    )
    model, optimizer = made.model.module, made.optimizer
    for _ in range(3):
        if overlap:
            coming = optimizer._coming
            coming.update({p: Late(p, work) for p, work in coming.items()})
        made.step(
            lambda hidden, _: model.head.weight.mul(hidden.mean()).sum(), (torch.ones(2, 4), 0)
        )
    if overlap:
        optimizer.wait()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_layers_that_are_not_called_are_waited_for_too(gloo: Pool) -> None:
    for found, wanted in zip(
        gloo.run(2, uncalled, True), gloo.run(2, uncalled, False), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def failing_pass() -> list[int]:
    made = spread("zero1:2", overlap=True)
    train(made, [0])
    with pytest.raises(TypeError):
        made.modules[0](None, None)
    left = [len(made.optimizer.on_their_way)]
    train(made, [1])
    return [*left, len(made.optimizer.on_their_way)]


def test_a_forward_pass_that_fails_leaves_nothing_behind(gloo: Pool) -> None:
    for after_failure, after_step in gloo.run(2, failing_pass):
        assert after_failure == 0
        assert after_step > 0
