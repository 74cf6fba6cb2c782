"""What the ranks of a real job write with torch itself, for the tests of the readers."""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    fully_shard,
)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.foreign.older import written_by

Wanted = dict[str, np.ndarray[Any, Any]]


def trained(net: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and its optimizer after three steps."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        torch.manual_seed(step)
        net(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def network() -> nn.Sequential:
    torch.manual_seed(7)
    # Five rows over four ranks leave one of them without any.
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))


def as_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The elements, those that numpy has no type for as the bits of a number."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    elif tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.view(torch.uint8)
    return tensor.numpy()


def wanted_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Wanted:
    """Every tensor whole, as torch itself gathers it, by our names."""
    options = StateDictOptions(full_state_dict=True)
    model: Any = get_model_state_dict(net, options=options)
    found = {f"model/{k}": as_numpy(v) for k, v in model.items()}
    states: Any = get_optimizer_state_dict(net, optimizer, options=options)["state"]
    for name, values in states.items():
        found |= {f"optimizer/{name}/{k}": as_numpy(v) for k, v in values.items()}
    return found


def write_samples(folder: str) -> None:
    """Every sample of this torch, in folders of their own; each with what is wanted of it."""
    root = Path(folder)
    warnings.simplefilter("ignore")
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "fsdp"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    both._flatten("all")  # from now on the two meshes refer to each other
    columns = {"0": ColwiseParallel(), "2": RowwiseParallel()}

    def sharded(mesh: DeviceMesh) -> nn.Module:
        net = network()
        fully_shard(net[0], mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    def two() -> nn.Module:
        net = network()
        parallelize_module(net, both["tp"], columns)
        fully_shard(net[0], mesh=both["fsdp"])
        fully_shard(net, mesh=both["fsdp"])
        return net

    def tensor_parallel() -> nn.Module:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        return parallelize_module(network(), mesh, columns)

    ways = {
        "fsdp2": lambda: sharded(line),
        "hsdp": lambda: sharded(square),
        "tp": tensor_parallel,
        "2d": two,
    }
    for name, way in ways.items():
        net, optimizer = trained(way())
        wanted = wanted_of(net, optimizer)
        model = get_model_state_dict(net)
        state = get_optimizer_state_dict(net, optimizer)
        whole = {"model": model, "optimizer": state, "epoch": 3, "rng": {"seed": [1, 2]}}
        if name == "2d":  # FSDP over TP on a dim that does not divide is refused by torch itself
            whole = {"model": model, "optimizer": state, "epoch": 3}
        save(whole, root / name, wanted)
        place = root / f"{name}-ranks"
        place.mkdir(exist_ok=True)
        rank = dist.get_rank()
        torch.save(net.state_dict(), place / f"model_world_size_4_rank_{rank}.pt")
        torch.save(optimizer.state_dict(), place / f"optim_world_size_4_rank_{rank}.pt")
        torch.save({"lr_scheduler": None}, place / f"extra_state_world_size_4_rank_{rank}.pt")
        note(place, wanted)
        if version := {"hsdp": "2.4", "fsdp2": "2.9", "2d": "2.12"}.get(name):
            place = root / f"{name}-ranks-of-torch-{version}"
            place.mkdir(exist_ok=True)
            with written_by(version):
                torch.save(net.state_dict(), place / f"model_world_size_4_rank_{rank}.pt")
            note(place, {k: v for k, v in wanted.items() if k.startswith("model/")})
        if name == "fsdp2":
            flat = get_optimizer_state_dict(
                net, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
            )
            save({"model": model, "optimizer": flat}, root / "flattened", wanted)
            only = {k: v for k, v in wanted.items() if k.startswith("model/")}
            save(model, root / "bare", only)
            writer = FileSystemWriter(root / "many", single_file_per_rank=False)
            dcp_save({"model": model, "optimizer": state}, storage_writer=writer)
            note(root / "many", wanted)
            dcp_save(
                {"model": model, "optimizer": state},
                checkpoint_id=root / "alone",
                use_collectives=False,
            )
            note(root / "alone", wanted)
    old_sharded(root)
    in_stages(root)


def in_stages(root: Path) -> None:
    """A pipeline of two stages, each of them sharded over two ranks, that saves as torchtitan does;
    and as one that saves lists of the optimizer's groups, of which DCP keeps those of one stage.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    number, layers = mesh.get_local_rank("pp"), dict(network().named_children())
    mine = [{"0": layers["0"], "1": layers["1"]}, {"2": layers["2"]}][number]
    part = nn.Sequential(OrderedDict(mine))
    fully_shard(part, mesh=mesh["fsdp"])
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.01, weight_decay=0.1)
    stage = PipelineStage(part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(stage, 2, lambda found, _: found.square().sum())
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(4, 6)
        schedule.step(*([] if number else [batch]), target=batch if number else None)
        optimizer.step()
        optimizer.zero_grad()
    of_stages: list[Wanted] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_stages, wanted_of(part, optimizer))
    wanted = {name: value for each in of_stages for name, value in each.items()}
    for name, is_flat in (("pipeline", True), ("pipeline-lists", False)):
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        state = get_optimizer_state_dict(part, optimizer, options=options)
        save({"model": get_model_state_dict(part), "optimizer": state}, root / name, wanted)


def old_sharded(root: Path) -> None:
    wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
    net, optimizer = trained(wrapped)
    wanted = wanted_of(net, optimizer)
    with FullyShardedDataParallel.state_dict_type(
        net,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(_use_dtensor=False),
        ShardedOptimStateDictConfig(_use_dtensor=False),
    ):
        model = net.state_dict()
        state = FullyShardedDataParallel.optim_state_dict(net, optimizer)
    save({"model": model, "optimizer": state}, root / "fsdp1", wanted)
    place = root / "fsdp1-ranks"
    place.mkdir(exist_ok=True)
    torch.save(model, place / f"pytorch_model_fsdp_0_rank_{dist.get_rank()}.bin")
    note(place, {k: v for k, v in wanted.items() if k.startswith("model/")})
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.LOCAL_STATE_DICT):
        local = net.state_dict()
    (root / "local").mkdir(exist_ok=True)
    torch.save(local, root / "local" / f"pytorch_model_fsdp_0_rank_{dist.get_rank()}.bin")


def save(state: Mapping[str, Any], place: Path, wanted: Wanted) -> None:
    dcp_save(dict(state), checkpoint_id=place)
    note(place, wanted)


def note(place: Path, wanted: Wanted) -> None:
    """Keep what a sample is to give beside it."""
    dist.barrier()
    if dist.get_rank() == 0:
        place.with_suffix(".wanted").write_bytes(pickle.dumps(wanted))
