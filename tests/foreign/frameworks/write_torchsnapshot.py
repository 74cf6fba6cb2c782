"""Write snapshots with torchsnapshot: `write_torchsnapshot.py OUT`.

Of each snapshot `OUT/<name>`, `OUT/<name>.npz` has what torchsnapshot itself restores from it.
torchsnapshot 0.1.0 runs with torch 2.13 as it is. Of bfloat16 it writes an odd number of elements
without the last, so no tensor here has one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.multiprocessing.spawn import spawn
from torchsnapshot import RNGState, Snapshot, StateDict

Arrays = dict[str, np.ndarray[Any, Any]]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))


def trained(net: nn.Module, seed: int = 1) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(seed)
    net(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return optimizer


def others() -> dict[str, Any]:
    """Values of all sorts, and tensors of all sorts."""
    torch.manual_seed(3)
    return {
        "epoch": 3,
        "rate": 0.25,
        "name": "a/b",
        "flag": True,
        "raw": b"\x00\xff",
        "pair": (1, 2.5),
        "nothing": None,
        "empty": {},
        "list": [{"deep": [1, torch.ones(2)]}, 4],
        "numbers": {7: torch.arange(4), 8: "eight"},
        "a/b%": torch.arange(3),
        "brain": torch.randn(4, 2).bfloat16(),
        "half": torch.randn(3).half(),
        "waves": torch.randn(3, 2, dtype=torch.complex64),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "columns": torch.randn(4, 6)[:, 1:4],
        "transposed": torch.randn(5, 3).t(),
    }


def blank(value: Any) -> Any:
    """The same with other numbers in its tensors."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            shard.tensor.zero_()
        return value
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else value


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def named(above: str, value: Any) -> Arrays:
    """Its tensors, by the names that ckptkit gives them."""
    if isinstance(value, torch.Tensor):
        return {above: as_numpy(value)}
    items: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    found: Arrays = {}
    for key, item in items:
        node = str(key).replace("%", "%25").replace("/", "%2F")
        found |= named(f"{above}/{node}", item)
    return found


def of_optimizer(state: Mapping[str, Any], names: list[str]) -> Arrays:
    return {
        f"optimizer/{names[index]}/{key}": as_numpy(value)
        for index, values in state["state"].items()
        for key, value in values.items()
    }


def keep(root: Path, name: str, arrays: Any) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        np.savez(root / f"{name}.npz", **arrays)


def batched(root: Path) -> None:
    """One process: a model, its optimizer, and random numbers."""
    net = network(0)
    place = str(root / "batched")
    Snapshot.take(place, {"model": net, "optim": trained(net), "rng": RNGState()})
    wanted = torch.get_rng_state()
    again = network(9)
    optimizer = trained(again, 9)
    Snapshot(place).restore({"model": again, "optim": optimizer, "rng": RNGState()})
    assert torch.equal(torch.get_rng_state(), wanted)
    arrays = {f"model/{key}": as_numpy(value) for key, value in again.state_dict().items()}
    arrays |= of_optimizer(optimizer.state_dict(), list(again.state_dict()))
    keep(root, "batched", arrays | {"other/rng/rng_state": as_numpy(torch.get_rng_state())})


def unbatched(root: Path) -> None:
    """One process: all sorts of values, each in files of its own."""
    place = str(root / "unbatched")
    Snapshot.take(place, {"model": network(0), "extra": StateDict(**others())})
    net, extra = network(9), StateDict(**blank(others()))
    Snapshot(place).restore({"model": net, "extra": extra})
    arrays = {f"model/{key}": as_numpy(value) for key, value in net.state_dict().items()}
    keep(root, "unbatched", arrays | named("other/extra", extra.state_dict()))


def sharded_state(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    net = FullyShardedDataParallel(network(seed), device_id=torch.device("cpu"))
    optimizer = trained(net, seed)
    with FullyShardedDataParallel.state_dict_type(
        net,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(_use_dtensor=False),
        ShardedOptimStateDictConfig(_use_dtensor=False),
    ):
        state = FullyShardedDataParallel.optim_state_dict(net, optimizer)
        return dict(net.state_dict()), state


def whole(value: Any) -> Any:
    """All of a tensor, of which each rank has shards."""
    if not isinstance(value, ShardedTensor):
        return value
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        shards,
        [
            (s.metadata.shard_offsets, s.metadata.shard_sizes, s.tensor)
            for s in value.local_shards()
        ],
    )
    full = torch.zeros(value.size())
    for offsets, sizes, tensor in (shard for each in shards for shard in each):
        full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] = tensor
    return full


def sharded(root: Path) -> None:
    """FSDP with ShardedTensors, and what each rank has for itself."""
    model, optimizer = sharded_state(0)
    rank = dist.get_rank()
    mine = StateDict(ones=torch.full((3,), float(rank)), rank=rank, pair=(rank, 1))
    shared = StateDict(table=torch.arange(64).reshape(8, 8), step=3)
    place = str(root / "sharded")
    Snapshot.take(
        place,
        {
            "model": StateDict(**model),
            "optimizer": StateDict(**optimizer),
            "mine": mine,
            "shared": shared,
        },
        replicated=["shared/**"],
    )
    snapshot = Snapshot(place)

    def read(path: str, value: Any) -> Any:
        # `restore` reads all that is sharded for each part of the state, and fails at the others'.
        return whole(snapshot.read_object(f"{rank}/{path}", blank(value)))

    model, optimizer = sharded_state(9)
    arrays = {f"model/{key}": as_numpy(read(f"model/{key}", v)) for key, v in model.items()}
    for parameter, values in optimizer["state"].items():
        for key, value in values.items():
            path = f"{parameter}/{key}"
            arrays[f"optimizer/{path}"] = as_numpy(read(f"optimizer/state/{path}", value))
    ones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ones, read("mine/ones", mine["ones"]))
    arrays |= {f"other/mine/ones/rank.{n}": as_numpy(value) for n, value in enumerate(ones)}
    arrays["other/shared/table"] = as_numpy(read("shared/table", shared["table"]))
    keep(root, "sharded", arrays)


def replicated(root: Path) -> None:
    """DDP, all of it told to be the same on all ranks."""
    net = nn.parallel.DistributedDataParallel(network(0))
    optimizer = trained(net)
    place = str(root / "ddp")
    Snapshot.take(place, {"model": net, "optim": optimizer}, replicated=["**"])
    again = nn.parallel.DistributedDataParallel(network(9))
    optimizer = trained(again, 9)
    Snapshot(place).restore({"model": again, "optim": optimizer})
    inner = again.module.state_dict()
    arrays = {f"model/{key}": as_numpy(value) for key, value in inner.items()}
    keep(root, "ddp", arrays | of_optimizer(optimizer.state_dict(), list(inner)))


def rank_of_two(rank: int, root: str, meeting: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    # Small chunks and shards, so that there are several.
    os.environ["TORCHSNAPSHOT_MAX_SHARD_SIZE_BYTES_OVERRIDE"] = "64"
    sharded(Path(root))
    os.environ["TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"] = "128"
    os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = "1"
    replicated(Path(root))
    dist.destroy_process_group()


def main() -> None:
    root = Path(sys.argv[1])
    root.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    batched(root)
    os.environ["TORCHSNAPSHOT_DISABLE_BATCHING"] = "1"
    os.environ["TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE"] = "100"
    unbatched(root)
    for name in ("DISABLE_BATCHING", "MAX_CHUNK_SIZE_BYTES_OVERRIDE"):
        del os.environ[f"TORCHSNAPSHOT_{name}"]
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_of_two, (str(root), f"{folder}/meeting"), nprocs=2)


if __name__ == "__main__":
    main()
