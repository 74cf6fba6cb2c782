"""Tensors that were cut by hand, or whose cuts DTensor cannot say: rules say it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ckptkit
from ckptkit.errors import LayoutError, PeerError
from ckptkit.live import Checkpointer
from tests.live.pool import Pool

ROWS, COLUMNS = (6, 4, 4), 3
FUSED = {"*wqkv.weight": {"tp": "shard(0, blocks=[6,4,4])"}}


def whole() -> torch.Tensor:
    return torch.arange(sum(ROWS) * COLUMNS, dtype=torch.float32).reshape(-1, COLUMNS)


def mine(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Each of the fused blocks is cut in two."""
    return torch.cat([block.chunk(2)[rank] for block in tensor.split(ROWS)])


class Attention(nn.Module):
    """A fused projection of which this rank holds its heads."""

    def __init__(self, local: torch.Tensor) -> None:
        super().__init__()
        self.wqkv = nn.Linear(COLUMNS, local.shape[0], bias=False)
        self.wqkv.weight = nn.Parameter(local)


def save_fused(location: str, as_dtensor: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = mine(whole(), mesh.get_local_rank())
    if as_dtensor:
        local = DTensor.from_local(local, mesh, [Shard(0)])
    model = Attention(local)
    optimizer = torch.optim.AdamW(model.parameters())
    model.wqkv.weight.grad = torch.ones_like(model.wqkv.weight)
    optimizer.step()
    with Checkpointer(location, mesh=mesh, rules=FUSED, timeout=30) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
    fresh = Attention(torch.zeros_like(model.wqkv.weight))
    other = torch.optim.AdamW(fresh.parameters())
    with Checkpointer(location, mesh=mesh, rules=FUSED, timeout=30) as checkpointer:
        checkpointer.restore(model=fresh, optimizer=other)
    assert torch.equal(local_of(fresh.wqkv.weight), local_of(model.wqkv.weight))
    for key, value in optimizer.state[model.wqkv.weight].items():
        loaded = other.state[fresh.wqkv.weight][key]
        assert torch.equal(local_of(loaded), local_of(value)), key


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("as_dtensor", [False, True])
def test_a_fused_projection_is_stored_whole_and_in_order(
    gloo: Pool, tmp_path: Path, as_dtensor: bool
) -> None:
    gloo.run(2, save_fused, str(tmp_path), as_dtensor)
    with ckptkit.open(tmp_path) as step:
        found = step["model/wqkv.weight"][...]
        assert found.shape == (sum(ROWS), COLUMNS)
        # One step of AdamW moves every element by almost nothing.
        np.testing.assert_allclose(found, whole().numpy(), atol=2e-1)
        assert step["optimizer/wqkv.weight/exp_avg"].shape == found.shape
        assert step["optimizer/wqkv.weight/step"].shape == ()


def save_unevenly(location: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Attention(torch.zeros(5, COLUMNS))
    with Checkpointer(location, mesh=mesh, rules=FUSED, timeout=30) as checkpointer:
        checkpointer.save(1, model=model)


def refused(location: str) -> str:
    with pytest.raises((LayoutError, PeerError)) as caught:
        save_unevenly(location)
    return str(caught.value)


def test_a_part_that_is_not_what_the_rules_say_is_refused(gloo: Pool, tmp_path: Path) -> None:
    for message in gloo.run(2, refused, str(tmp_path)):
        assert "model/wqkv.weight" in message
        assert "(5, 3)" in message
        assert "(7, 3)" in message
