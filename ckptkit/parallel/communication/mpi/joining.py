"""From an MPI job to a torch.distributed job of the same ranks."""

from __future__ import annotations

import sys
import zlib
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from mpi4py.run import set_abort_status
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from ckptkit.parallel.communication.mpi.process_group import NAME, MpiProcessGroup

_TAGS = 32768  # every MPI has so many


def join(timeout: float) -> None:
    """Make the default process group of the MPI job that this process is a rank of."""
    register()
    world = MPI.COMM_WORLD
    dist.init_process_group(
        NAME,
        store=shared_store(timeout),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout),
    )


def register() -> None:
    """Make torch.distributed know the backend; once is enough, more does no harm."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu"])
        _end_all_ranks_with_this_one()


def shared_store(timeout: float) -> Store:
    """A store on rank 0, which tells the others by MPI where it listens."""
    world = MPI.COMM_WORLD
    if world.size == 1:
        return HashStore()
    names = world.allgather(MPI.Get_processor_name())
    # Names of hosts can take long to look up, where nobody knows them.
    host = "127.0.0.1" if len(set(names)) == 1 else names[0]
    wait = timedelta(seconds=timeout)
    store = None
    if world.rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=wait, wait_for_workers=False)
    port = world.bcast(None if store is None else store.port, 0)
    return store or TCPStore(host, port, is_master=False, timeout=wait)


def _make(given: Any, options: Any) -> MpiProcessGroup:  # noqa: ARG001 - as torch calls it
    ranks = list(given.global_ranks_in_group) or list(range(given.group_size))
    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    name = str(given.group_id)
    comm = MPI.COMM_WORLD.Create_group(group, zlib.crc32(name.encode()) % _TAGS)
    return MpiProcessGroup(comm, given.timeout, name)


def _end_all_ranks_with_this_one() -> None:
    """MPI's orderly end waits for all ranks: a rank with an exception must not begin it."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        set_abort_status(1)

    sys.excepthook = hook
