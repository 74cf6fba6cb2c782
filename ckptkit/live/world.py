"""The job this process is a rank of, as torch.distributed knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ckptkit.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The rank of this process, how many there are, and the store where they leave word for each
    other.
    """

    rank: int = 0
    size: int = 1
    store: Store | None = None


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
