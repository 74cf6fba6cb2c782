"""Small trainings by torch's engines, which come to the same over every backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.parallel.strategies.training import spread, values
from tests.parallel.strategies.training import train as trained

Numbers = list[float]
# Between them they ask for every collective, of the whole job and of groups of it.
SPECS = ("zero2", "tp:2,fsdp:2", "pp:2,ddp:2")
MORE_SPECS = (
    *("ddp", "zero1", "zero3", "ddp:2,fsdp:2", "tp:2,ddp:2"),
    *("pp:4", "pp:2,fsdp:2", "pp:2,tp:2"),
)


def model() -> nn.Sequential:
    """The same on every rank; uneven for 4 ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(net: nn.Module, rank: int, *, alike: bool = False, sharded: bool = False) -> Numbers:
    """Three steps; what the parameters are then."""
    optimizer: torch.optim.Optimizer
    if sharded:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(100 * step + (0 if alike else rank))
        inputs = torch.randn(4, 6)
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
    found: Numbers = []
    for value in net.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found += whole.flatten().tolist()
    return found


def ddp() -> Numbers:
    """Gradients are all-reduced in two buckets."""
    net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0001)
    return train(net, dist.get_rank())


def fsdp() -> Numbers:
    """Parameters are gathered and gradients reduce-scattered."""
    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return train(net, dist.get_rank())


def tp() -> Numbers:
    """A DTensor for every weight, on a mesh of two dims."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    net = model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(net, mesh["tp"], plan)
    return train(net, dist.get_rank(), alike=True)


def pipeline() -> Numbers:
    """One linear layer a rank; what a stage receives into requires gradients from step two on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    stage = PipelineStage(net, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(100 * step)
        inputs, wanted = torch.randn(4, 6), torch.randn(4, 6)
        optimizer.zero_grad()
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, target=wanted if rank == world - 1 else None)
        optimizer.step()
    return [number for value in net.state_dict().values() for number in value.flatten().tolist()]


def zero1() -> Numbers:
    """Each rank updates some parameters, and sends them to the others."""
    net = nn.parallel.DistributedDataParallel(model())
    return train(net, dist.get_rank(), sharded=True)


def in_one_line(spec: str) -> Numbers:
    """The losses of three steps under a strategy, and what the parameters are then."""
    under = spread(spec)
    losses = trained(under, range(3))
    whole = values(under)
    return losses + [number for name in sorted(whole) for number in whole[name].flatten().tolist()]


def half_sums() -> Numbers:
    """Sums as the engines ask for them."""
    rank = dist.get_rank()
    found: Numbers = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        tensor = torch.arange(5).to(dtype) + rank
        dist.all_reduce(tensor)
        found += tensor.double().tolist()
    largest = torch.tensor([rank, 3, -rank], dtype=torch.uint8)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    rows = [torch.zeros(2) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, torch.full((2,), float(rank)))
    total = torch.arange(3.0) * rank
    dist.reduce(total, 0)
    whole = [*largest.tolist(), *torch.cat(rows).tolist()]
    return found + whole + (total.tolist() if rank == 0 else [])


TRAININGS: dict[str, Callable[[], Numbers]] = {
    "ddp": ddp,
    "zero1": zero1,
    "fsdp": fsdp,
    "tp": tp,
    "pipeline": pipeline,
    **{f"as_distributed {spec}": partial(in_one_line, spec) for spec in SPECS},
    "sums": half_sums,
}


MORE: dict[str, Callable[[], Numbers]] = {
    f"as_distributed {spec}": partial(in_one_line, spec) for spec in MORE_SPECS
}


def all_trainings(*, more: bool = False) -> dict[str, Numbers]:
    """What each of them comes to on this rank; or of those that take longer."""
    return {name: training() for name, training in (MORE if more else TRAININGS).items()}
