"""Small trainings by torch's engines, which come to the same over every backend."""

from __future__ import annotations

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

from ckptkit.parallel import as_distributed

Numbers = list[float]


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
    """What `as_distributed` makes of the model."""
    spread = as_distributed(model(), spec, optimizer=torch.optim.AdamW)
    for step in range(3):
        torch.manual_seed(100 * step)
        inputs = torch.randn(8, 6)
        spread.step(lambda found, _: found.square().mean(), spread.share((inputs, inputs)))
    values = spread.model.state_dict().values()
    whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
    return torch.cat([value.flatten() for value in whole]).tolist()


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


TRAININGS = {
    "ddp": ddp,
    "zero1": zero1,
    "fsdp": fsdp,
    "tp": tp,
    "pipeline": pipeline,
    "zero2 in one line": partial(in_one_line, "zero2"),
    "a hybrid in one line": partial(in_one_line, "ddp:2,fsdp:2"),
    "sums": half_sums,
}


def all_trainings() -> dict[str, Numbers]:
    """What each of them comes to on this rank."""
    return {name: training() for name, training in TRAININGS.items()}
