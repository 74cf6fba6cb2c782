"""ZeRO-1 whose updated parameters are on their way while the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.live.pool import Pool
from tests.parallel.strategies.training import STEPS, Values, spread, train, values

WAYS = ("zero1:2", "zero1:4", "pp:2,zero1:2")


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
            dist.save(location, step, timeout=30)
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
