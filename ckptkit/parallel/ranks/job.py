"""From whatever launcher started this process to a communicator."""

from __future__ import annotations

import importlib.util
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.ranks.carrier import DEFAULT_TIMEOUT
from ckptkit.parallel.ranks.communicator import Communicator
from ckptkit.parallel.ranks.environment import RankPlace, place_from
from ckptkit.parallel.ranks.torch_group import TorchCarrier

BACKENDS = ("gloo", "nccl", "mpi")
VARIABLE = "CKPTKIT_BACKEND"
"""What `auto` means, where it is set: `ckpt launch --backend` sets it."""


class _OfThread(threading.local):
    communicator: Communicator | None = None


of_thread = _OfThread()
"""Which rank this thread is, where ranks are threads."""
_of_process: list[Communicator] = []


def current_communicator() -> Communicator:
    """The communicator of this rank: the one that `init` made, or in a thread of `run_in_memory`
    that thread's own.
    """
    found = _known()
    if found is None:
        raise UsageError(
            "there is no communicator yet",
            hint="call ckptkit.parallel.init() first, or run this by run_in_memory",
        )
    return found


def init(backend: str = "auto", *, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
    """Join the job that this process was started as a rank of, and make its default process group.

    The environment of torchrun (and `ckpt launch`), Slurm or MPI says which job that is; without
    any it is a job of one rank. `auto` is nccl where there are GPUs, which also sets the device by
    the local rank, and gloo elsewhere. Called again, or after torch.distributed was initialised
    by hand, it returns the communicator of what there is. `timeout` bounds every wait in seconds.
    """
    there = _known()
    if there is None and dist.is_initialized():
        there = Communicator(TorchCarrier(timeout=timeout, on_close=_forget))
        _of_process[:] = [there]
    if there is not None:
        if backend not in ("auto", there.backend):
            raise UsageError(
                f"this rank communicates by {there.backend} already",
                where="backend",
                value=backend,
                hint="close that communicator first",
            )
        return there
    place = place_from(os.environ)
    backend = _chosen(backend)
    if backend == "mpi":
        _join_by_mpi(place, timeout)
    else:
        _join(backend, place, timeout)
    made = Communicator(TorchCarrier(timeout=timeout, on_close=_leave))
    _of_process[:] = [made]
    return made


def _chosen(backend: str) -> str:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if backend == "auto":
        backend = os.environ.get(VARIABLE) or "auto"
    if backend == "auto":
        return "nccl" if has_nccl else "gloo"
    if backend == "memory":
        raise UsageError(
            "ranks in memory are threads, and have their communicator from the start",
            where="backend",
            hint="ckptkit.parallel.run_in_memory(function, world_size=4) makes them",
        )
    if backend not in BACKENDS:
        hint = f"there are auto, {', '.join(BACKENDS)}"
        raise UsageError("no such backend", where="backend", value=backend, hint=hint)
    if backend == "nccl" and not has_nccl:
        what = "nccl needs a GPU, and a torch that knows CUDA"
        raise UsageError(what, where="backend", hint="gloo works everywhere")
    return backend


def _join(backend: str, place: RankPlace, timeout: float) -> None:
    """Make torch's process group over gloo or nccl, once its ranks have found each other."""
    ranks = {"rank": place.rank, "world_size": place.world_size}
    given: dict[str, Any]
    if place.world_size == 1:
        given = {"store": HashStore(), **ranks}
    elif place.source == "torchrun":
        given = {"init_method": "env://"}  # the store may be the agent's
    elif place.address is None or place.port is None:
        _need_mpi4py("or set MASTER_ADDR and MASTER_PORT to where rank 0 can listen")
        from ckptkit.parallel.ranks.mpi_group import shared_store  # noqa: PLC0415 - starts MPI

        given = {"store": shared_store(timeout), **ranks}
    else:
        given = {"init_method": f"tcp://{place.address}:{place.port}", **ranks}
    if backend == "nccl":
        devices = torch.cuda.device_count()
        if place.local_rank >= devices:
            raise UsageError(
                f"rank {place.local_rank} of this machine has no GPU of its own",
                value=f"{devices} GPUs",
                hint="start as many ranks as there are GPUs, or use backend='gloo'",
            )
        given["device_id"] = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(given["device_id"])
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **given)
    except (dist.DistError, dist.DistNetworkError) as error:
        raise PeerError(
            f"the {place.world_size} ranks did not all meet within {timeout:g} s",
            where=f"{place.address}:{place.port}",
            hint="look at the logs of the other ranks; rank 0 has to be reachable at this address",
        ) from error


def _join_by_mpi(place: RankPlace, timeout: float) -> None:
    knows_mpi = any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if place.world_size > 1 and not knows_mpi:
        raise UsageError(
            f"{place.source} has started this process, and MPI knows nothing of it",
            where="backend",
            value="mpi",
            hint="start it with mpirun or `ckpt launch --backend mpi`",
        )
    _need_mpi4py()
    from ckptkit.parallel.ranks.mpi_group import join  # noqa: PLC0415 - starts MPI

    join(timeout)


def _need_mpi4py(otherwise: str = "") -> None:
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            "mpi4py is not installed",
            where="backend",
            hint=f"pip install 'ckptkit[mpi]' {otherwise}".strip(),
        )


def _known() -> Communicator | None:
    return of_thread.communicator or next(iter(_of_process), None)


def _leave() -> None:
    _forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget() -> None:
    if of_thread.communicator is None:
        _of_process.clear()
