"""The state of an optimizer, written for torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptkit
from ckptkit.errors import UsageError
from ckptkit.live import save as save_live
from tests.checkpoint.saving import Tensor, random_values, save
from tests.cli.programs import document
from tests.live.pool import Pool


def training(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    """A model of two groups of parameters, one of which has another rate."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 5))
    first, *others = net.parameters()
    groups: list[dict[str, Any]] = [
        {"params": [first]},
        {"params": others, "lr": 0.25, "betas": (0.5, 0.75)},
    ]
    return net, torch.optim.AdamW(groups, lr=0.5)


def trained(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    net, optimizer = training(seed)
    for _ in range(3):
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return net, optimizer


def states(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of the model and the optimizer, whole."""
    options = StateDictOptions(full_state_dict=True)
    model, state = get_state_dict(net, optimizer, options=options)
    return {"model": dict(model), "optimizer": state}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def go_on_with_dcp(folder: str, wanted: dict[str, Any]) -> None:
    """A rank of FSDP, whose optimizer has done nothing yet, goes on with what was exported."""
    net, optimizer = training(seed=4)
    mesh = init_device_mesh("cpu", (2,))
    for module in (net[0], net[2], net):
        fully_shard(module, mesh=mesh)
    first, *others = net.parameters()
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=1)
    model, state = get_state_dict(net, optimizer)
    load_dcp({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
    assert alike(states(net, optimizer), wanted)
    assert any(isinstance(each, DTensor) for each in optimizer.state[first].values())


def test_dcp_and_torch_go_on_with_the_optimizer(gloo: Pool, tmp_path: Path) -> None:
    net, optimizer = trained(seed=3)
    save_live(tmp_path / "run", step=1, model=net, optimizer=optimizer)
    for to_format in ("dcp", "torch"):
        found = document(
            "export", tmp_path / "run", tmp_path / to_format, "--to-format", to_format,
            "--optimizer",
        )  # fmt: skip
        assert found["left_out"] == []
        assert ckptkit.diff(tmp_path / "run", tmp_path / to_format).same
    whole = torch.load(tmp_path / "torch", weights_only=True)
    assert alike(whole, states(net, optimizer))
    gloo.run(2, go_on_with_dcp, str(tmp_path / "dcp"), whole)
    again = training(seed=4)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        *again, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"],
        options=options,
    )  # fmt: skip
    assert alike(states(*again), whole)


def test_an_optimizer_is_written_only_where_there_is_one_and_a_place_for_it(
    tmp_path: Path,
) -> None:
    save(tmp_path / "run", {"model/w": Tensor(random_values((3,)))})
    for to_format, what in (("hf", "no place for"), ("dcp", "does not say which parameters")):
        with pytest.raises(UsageError, match=what):
            ckptkit.export(tmp_path / "run", tmp_path / "out", to_format=to_format, optimizer=True)
    assert not (tmp_path / "out").exists()
