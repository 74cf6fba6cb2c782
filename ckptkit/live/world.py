"""The job this process is a rank of, as torch.distributed knows it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ckptkit.checkpoint.threads import cores
from ckptkit.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The rank of this process, how many there are, and the store where they leave word for each
    other.
    """

    rank: int = 0
    size: int = 1
    store: Store | None = None


def copying_threads(world: World) -> int:
    """How many threads of this rank may copy memory at a time: with more than there are cores for
    all ranks of the machine, copying only gets slower.
    """
    said = os.environ.get("LOCAL_WORLD_SIZE", "")  # by torchrun
    ranks = int(said) if said.isdecimal() and int(said) else world.size
    return max(1, min(8, cores() // ranks))


def current_world() -> World:
    """The job of the default process group; a job of one rank where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return World()
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank < 0:
        raise UsageError("this process is no rank of the default process group")
    if size == 1:
        return World()
    # A connection of its own: a save in the background must not hold up the training's.
    store: Any = dist.distributed_c10d._get_default_store()
    return World(rank, size, store.clone())
