"""The job this process is a rank of, as torch.distributed knows it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

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
    return World(rank, size, _connection())


# By process group: to connect is slow where looking up the name of a host is.
_connections: WeakKeyDictionary[dist.ProcessGroup, Store] = WeakKeyDictionary()


def _connection() -> Store:
    """A connection to the job's store besides the training's, which a save in the background must
    not hold up.
    """
    group: Any = dist.group.WORLD
    if group not in _connections:
        store: Any = dist.distributed_c10d._get_default_store()
        _connections[group] = store.clone()
    return _connections[group]
