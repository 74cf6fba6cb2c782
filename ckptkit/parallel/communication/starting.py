"""From whatever launcher started this process to a communicator."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.communication import current
from ckptkit.parallel.communication.communicator import Communicator
from ckptkit.parallel.communication.environment import Place, place_from
from ckptkit.parallel.communication.torch_group import TorchTransport
from ckptkit.parallel.communication.transport import DEFAULT_TIMEOUT

BACKENDS = ("gloo", "nccl", "mpi")
VARIABLE = "CKPTKIT_BACKEND"
"""What `auto` means, where it is set: `ckpt launch --backend` sets it."""

_MPI = ("Open MPI", "MPI (PMI)")


def init(backend: str = "auto", *, timeout: float = DEFAULT_TIMEOUT) -> Communicator:
    """Join the job that this process was started as a rank of, and make its default process group.

    The environment of torchrun (and `ckpt launch`), Slurm or MPI says which job that is; without
    any it is a job of one rank. `auto` is nccl where there are GPUs, which also sets the device by
    the local rank, and gloo elsewhere. Called again, or after torch.distributed was initialised
    by hand, it returns the communicator of what there is. `timeout` bounds every wait in seconds.
    """
    there = current.known()
    if there is None and dist.is_initialized():
        there = _adopted(timeout)
    if there is not None:
        _check_same(backend, there)
        return there
    place = place_from(os.environ)
    chosen = _chosen(backend)
    made = _STARTERS[chosen](place, timeout)
    current.set_for_process(made)
    return made


def _adopted(timeout: float) -> Communicator:
    found = Communicator(TorchTransport(timeout=timeout, on_close=_forget))
    current.set_for_process(found)
    return found


def _chosen(backend: str) -> str:
    if backend == "auto":
        backend = os.environ.get(VARIABLE) or "auto"
    if backend == "auto":
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if backend == "memory":
        raise UsageError(
            "ranks in memory are threads, and have their communicator from the start",
            where="backend",
            hint="ckptkit.parallel.run_in_memory(function, world_size=4) makes them",
        )
    if backend not in BACKENDS:
        hint = f"there are auto, {', '.join(BACKENDS)}"
        raise UsageError("no such backend", where="backend", value=backend, hint=hint)
    if backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        hint = "gloo works everywhere"
        raise UsageError(
            "nccl needs a GPU, and a torch that knows CUDA", where="backend", hint=hint
        )
    return backend


def _check_same(backend: str, there: Communicator) -> None:
    if backend not in ("auto", there.backend):
        raise UsageError(
            f"this rank communicates by {there.backend} already",
            where="backend",
            value=backend,
            hint="close that communicator first",
        )


def _gloo(place: Place, timeout: float) -> Communicator:
    return _joined("gloo", place, timeout)


def _nccl(place: Place, timeout: float) -> Communicator:
    devices = torch.cuda.device_count()
    if place.local_rank >= devices:
        raise UsageError(
            f"rank {place.local_rank} of this machine has no GPU of its own",
            value=f"{devices} GPUs",
            hint="start as many ranks as there are GPUs, or use backend='gloo'",
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return _joined("nccl", place, timeout, device_id=device)


def _mpi(place: Place, timeout: float) -> Communicator:
    if place.world_size > 1 and place.source not in _MPI and not _is_under_mpi():
        raise UsageError(
            f"{place.source} has started this process, and MPI knows nothing of it",
            where="backend",
            value="mpi",
            hint="start it with mpirun or `ckpt launch --backend mpi`",
        )
    _need_mpi4py()
    from ckptkit.parallel.communication.mpi.joining import join  # noqa: PLC0415 - starts MPI

    join(timeout)
    return Communicator(TorchTransport(timeout=timeout, on_close=_leave))


_STARTERS: dict[str, Callable[[Place, float], Communicator]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "mpi": _mpi,
}


def _joined(backend: str, place: Place, timeout: float, **more: Any) -> Communicator:
    try:
        dist.init_process_group(
            backend, timeout=timedelta(seconds=timeout), **_meeting(place, timeout), **more
        )
    except (dist.DistError, dist.DistNetworkError) as error:
        raise PeerError(
            f"the {place.world_size} ranks did not all meet within {timeout:g} s",
            where=f"{place.address}:{place.port}",
            hint="look at the logs of the other ranks; rank 0 has to be reachable at this address",
        ) from error
    return Communicator(TorchTransport(timeout=timeout, on_close=_leave))


def _meeting(place: Place, timeout: float) -> dict[str, Any]:
    """Where the ranks meet, as torch wants to be told."""
    ranks = {"rank": place.rank, "world_size": place.world_size}
    if place.world_size == 1:
        return {"store": HashStore(), **ranks}
    if place.source == "torchrun":
        return {"init_method": "env://"}  # the store may be the agent's
    if place.address is None or place.port is None:
        _need_mpi4py("or set MASTER_ADDR and MASTER_PORT to where rank 0 can listen")
        from ckptkit.parallel.communication.mpi.joining import shared_store  # noqa: PLC0415

        return {"store": shared_store(timeout), **ranks}
    return {"init_method": f"tcp://{place.address}:{place.port}", **ranks}


def _need_mpi4py(otherwise: str = "") -> None:
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            "mpi4py is not installed",
            where="backend",
            hint=f"pip install 'ckptkit[mpi]' {otherwise}".strip(),
        )


def _is_under_mpi() -> bool:
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))


def _leave() -> None:
    _forget()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget() -> None:
    if not current.is_of_thread():
        current.set_for_process(None)
