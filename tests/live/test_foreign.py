"""A foreign checkpoint fills a job of any layout: each rank reads what it needs of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_alike
from ckptkit.errors import PeerError
from ckptkit.live import load, restore
from ckptkit.storage import open_store
from tests.live.pool import Pool


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5))


def saved(path: Path, seed: int) -> Path:
    """A safetensors file of the model, by hand."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in model(seed).state_dict().items():
        raw = tensor.numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def whole(parameter: torch.Tensor) -> np.ndarray[Any, Any]:
    full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach().numpy().copy()


def fill(folder: str, spread: str) -> dict[str, np.ndarray[Any, Any]]:
    net = model(seed=1)
    mesh = init_device_mesh("cpu", (2,))
    if spread == "fsdp":
        fully_shard(net, mesh=mesh)
    elif spread == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(net, mesh, plan)
    load(folder, model=net)
    return {name: whole(parameter) for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("spread", ["ddp", "fsdp", "tp"])
def test_each_rank_gets_its_part(spread: str, gloo: Pool, tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", seed=2)
    wanted = {name: tensor.numpy() for name, tensor in model(seed=2).state_dict().items()}
    for found in gloo.run(2, fill, str(tmp_path), spread):
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


def fill_noting(folder: str, ranks_here: int) -> dict[str, bool]:
    """Of each parameter whether this rank says that it alone reads its bytes."""
    found: dict[str, bool] = {}
    read_many = Checkpoint.read_many

    def noting(self: Checkpoint, wanted: Any, *, alone: bool = False, **options: Any) -> None:
        found.update((name.removeprefix("model/"), alone) for name, _, _ in wanted)
        read_many(self, wanted, alone=alone, **options)

    with (
        patch.object(Checkpoint, "read_many", noting),
        patch.object(restore, "ranks_here", lambda _: ranks_here),
    ):
        fill(folder, "tp")
    return found


@pytest.mark.parametrize("ranks_here", [1, 2])
def test_rows_that_ranks_of_a_machine_share_are_read_by_all_of_them(
    ranks_here: int, gloo: Pool, tmp_path: Path
) -> None:
    saved(tmp_path / "model.safetensors", seed=2)
    together = {"2.weight", "2.bias"} if ranks_here > 1 else set()
    for found in gloo.run(2, fill_noting, str(tmp_path), ranks_here):
        assert found == {name: name not in together for name in model(seed=1).state_dict()}


def fill_apart(folders: list[str]) -> bytes:
    net = model(seed=1)
    load(folders[torch.distributed.get_rank()], model=net)
    return whole(net.get_parameter("0.weight")).tobytes()


def test_all_ranks_open_what_rank_0_has_found(gloo: Pool, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        saved(tmp_path / str(rank) / "model.safetensors", seed=2 + rank)
    first, second = gloo.run(2, fill_apart, [str(tmp_path / "0"), str(tmp_path / "1")])
    assert first == second


def test_a_rank_that_finds_other_tensors_there_is_told(tmp_path: Path) -> None:
    saved(tmp_path / "model.safetensors", seed=2)
    with pytest.raises(PeerError, match="other tensors here than rank 0"):
        open_alike(open_store(tmp_path), "", str(tmp_path), bytes(32))
