"""The ways in which FSDP1 can be used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from ckptkit.live import load, save
from tests.live.network import Block, network
from tests.live.strategies import Job

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": functools.partial(AdamW, lr=0.01),
    "Adam, amsgrad": functools.partial(Adam, lr=0.01, amsgrad=True),
    "SGD": functools.partial(SGD, lr=0.1),
    "SGD, momentum": functools.partial(SGD, lr=0.1, momentum=0.9),
    "Adagrad": functools.partial(Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": functools.partial(RMSprop, lr=0.01, momentum=0.5, centered=True),
}
make_adamw = OPTIMIZERS["AdamW"]


@dataclass(frozen=True)
class Way:
    """One way to use FSDP1."""

    ranks: int = 2
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    use_orig_params: bool = True
    ranks_from: str = "default"

    def wrap(self, model: nn.Module, **options: Any) -> FullyShardedDataParallel:
        """The model with every block a unit of its own."""
        usual = {
            "sharding_strategy": self.strategy,
            "use_orig_params": self.use_orig_params,
            "auto_wrap_policy": ModuleWrapPolicy({Block}),
            "device_id": torch.device("cpu"),
        }
        return FullyShardedDataParallel(model, **{**usual, **self._ranks(), **options})

    def job(self, seed: int, make: Callable[[Any], Optimizer] = make_adamw) -> Job:
        """A job of the small network."""
        return as_job(self.wrap(network(seed)), make)

    def _ranks(self) -> dict[str, Any]:
        size, rank = dist.get_world_size(), dist.get_rank()
        if self.ranks_from == "mesh":
            return {"device_mesh": init_device_mesh("cpu", (size,), mesh_dim_names=("cut",))}
        if self.ranks_from == "mesh of two dims":
            names = ("repeat", "cut")
            return {"device_mesh": init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names)}
        if self.ranks_from == "two groups":
            half = size // 2
            cut = [dist.new_group(list(range(half * n, half * n + half))) for n in range(2)]
            repeat = [dist.new_group([n, n + half]) for n in range(half)]
            return {"process_group": (cut[rank // half], repeat[rank % half])}
        return {}


NO_SHARD, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD
WAYS = {
    "full": Way(),
    "full, flat": Way(use_orig_params=False),
    "full, flat, on 3": Way(3, use_orig_params=False),
    "full, mesh, on 4": Way(4, ranks_from="mesh"),
    "full, mesh, flat": Way(use_orig_params=False, ranks_from="mesh"),
    "grad op, flat": Way(3, ShardingStrategy.SHARD_GRAD_OP, use_orig_params=False),
    "hybrid": Way(4, HYBRID, ranks_from="two groups"),
    "hybrid, mesh, flat": Way(4, HYBRID, False, "mesh of two dims"),
    "no shard": Way(2, NO_SHARD),
    "no shard, flat": Way(2, NO_SHARD, use_orig_params=False),
    "alone": Way(1),
    "alone, flat": Way(1, use_orig_params=False),
}


def as_job(model: nn.Module, make: Callable[[Any], Optimizer]) -> Job:
    optimizer = make(list(model.parameters()))
    return Job(model, [model], optimizer, dist.get_rank(), dist.get_world_size())


def ddp(seed: int, make: Callable[[Any], Optimizer] = make_adamw) -> Job:
    return as_job(DistributedDataParallel(network(seed)), make)


def store(job: Job, location: str) -> None:
    save(
        location, step=5, model=job.model, optimizer=job.optimizer, differing=["*seen"], timeout=20
    )


def restore(job: Job, location: str, **options: Any) -> str:
    found = load(location, model=job.model, optimizer=job.optimizer, timeout=20, **options)
    return str(found.report)
