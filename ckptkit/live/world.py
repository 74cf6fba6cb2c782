"""The job this process is a rank of, as torch.distributed knows it."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
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


def wire() -> torch.device:
    """Where the backend of the default group wants tensors to be."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    return torch.device("cpu") if found is None else found


def bytes_of_first(data: bytes | None, size: int) -> bytes:
    """Rank 0's bytes on every rank of the default group; all of them know how many there are."""
    if data is None:
        tensor = torch.empty(size, dtype=torch.uint8, device=wire())
    else:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(wire())
    dist.broadcast(tensor, src=0)
    return bytes(tensor.cpu().numpy()) if data is None else data


def rng_state() -> dict[str, Any]:
    """The state of the generators of Python, numpy and torch (CPU and CUDA); save it as
    `PerDataRank(rng_state())`: ranks that work on the same data, as those of `tp` do, have to draw
    the same numbers. `PerRank` is for jobs that only ever go on as they were spread.
    """
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 — what most programs still use
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys), int(place), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state().numpy(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [each.numpy() for each in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: dict[str, Any] | None) -> None:
    """Set the generators to a state; None, the fallback of another world size, changes nothing."""
    if state is None:
        return
    unknown = sorted(set(state) - {"python", "numpy", "torch", "cuda"})
    if unknown or not {"python", "numpy", "torch"} <= set(state):
        raise UsageError("not a state of rng_state()", value=sorted(state))
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    devices = state.get("cuda", [])
    if devices and torch.cuda.is_available() and len(devices) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([torch.from_numpy(each.copy()) for each in devices])
