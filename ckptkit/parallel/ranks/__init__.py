"""From whatever started this rank (torchrun, Slurm, MPI, or a thread of one process) to its
communicator: one interface to the ranks of a job, whatever carries its messages.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT
from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.ranks import mpirun
from ckptkit.parallel.ranks.communicator import Communicator
from ckptkit.parallel.ranks.messages import Hub, MemoryCarrier, TorchCarrier

T = TypeVar("T")

BACKENDS = ("auto", "gloo", "nccl", "mpi")
BACKEND_VARIABLE = "CKPTKIT_BACKEND"
"""What `auto` means, where it is set: `ckpt launch --backend` sets it."""
_GRACE = 5.0  # a rank that neither communicates nor ends cannot be told that the others failed
_PORTS = range(20000, 30000)  # below those that systems give away by themselves

# By launcher. torchrun comes first, then MPI, then Slurm: each may have been started by the one
# after it.
_LAUNCHERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": mpirun.TORCHRUN,
    **mpirun.MPI,
    "Slurm": (("SLURM_PROCID",), ("SLURM_NTASKS",), ("SLURM_LOCALID",), ()),
}

_of_thread = threading.local()  # its `communicator`, where ranks are threads
# By default process group, which may be destroyed by hand, and another one made.
_of_process: WeakKeyDictionary[dist.ProcessGroup, Communicator] = WeakKeyDictionary()


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
        there = _made(timeout, is_own=False)
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
    _join(_chosen(backend), place, timeout)
    return _made(timeout, is_own=True)


def run_in_memory(
    function: Callable[..., T], *args: Any, world_size: int, timeout: float = 60.0
) -> list[T]:
    """Run `function(communicator, *args)` on so many ranks, threads of this process; what they
    return, by rank.

    The same program gives the same results every time, as far as each rank draws its random
    numbers from a generator of its own: torch's default one belongs to all threads. An exception
    on one rank ends the others in their next call, and comes out of here as it is, with a note
    saying on which rank; `timeout` seconds bound every wait, and the whole.
    """
    if world_size < 1:
        raise UsageError("a job has one rank or more", where="world_size", value=world_size)
    hub, finished = Hub(world_size), threading.Event()
    results: dict[int, T] = {}
    problems: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        communicator = Communicator(MemoryCarrier(hub, rank, world_size, timeout=timeout))
        _of_thread.communicator = communicator
        try:
            results[rank] = function(communicator, *args)
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            problems[rank] = error
            hub.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            _of_thread.communicator = None
            hub.end()
        if problems or len(results) == world_size:
            finished.set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    finished.wait(timeout)
    if problems:
        deadline = time.monotonic() + min(timeout, _GRACE)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if problems:
        # The first that a rank raised by itself: the others were ended by that.
        by_rank = sorted(problems, key=lambda rank: (hub.has_ended(problems[rank]), rank))
        problems[by_rank[0]].add_note(f"on rank {by_rank[0]} of {world_size}")
        raise problems[by_rank[0]]
    if late := [thread.name for thread in threads if thread.is_alive()]:
        what = f"{', '.join(late)} still ran after {timeout:g} s"
        hub.fail(what)
        raise PeerError(what, where="run_in_memory")
    return [results[rank] for rank in range(world_size)]


def _chosen(backend: str) -> str:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if backend == "auto":
        backend = os.environ.get(BACKEND_VARIABLE) or "auto"
    if backend == "auto":
        return "nccl" if has_nccl else "gloo"
    if backend == "memory":
        raise UsageError(
            "ranks in memory are threads, and have their communicator from the start",
            where="backend",
            hint="ckptkit.parallel.run_in_memory(function, world_size=4) makes them",
        )
    if backend not in BACKENDS:
        hint = f"there are {', '.join(BACKENDS)}"
        raise UsageError("no such backend", where="backend", value=backend, hint=hint)
    if backend == "nccl" and not has_nccl:
        what = "nccl needs a GPU, and a torch that knows CUDA"
        raise UsageError(what, where="backend", hint="gloo works everywhere")
    return backend


def _join(backend: str, place: RankPlace, timeout: float) -> None:
    """Make torch's process group, once its ranks have found each other."""
    ranks = {"rank": place.rank, "world_size": place.world_size}
    given: dict[str, Any]
    if backend == "mpi":
        knows_mpi = any(size in os.environ for _, (size,), *_ in mpirun.MPI.values())
        if place.world_size > 1 and not knows_mpi:
            raise UsageError(
                f"{place.source} has started this process, and MPI knows nothing of it",
                where="backend",
                value="mpi",
                hint="start it with mpirun or `ckpt launch --backend mpi`",
            )
        _mpi_group().join(timeout)
        return
    if place.world_size == 1:
        given = {"store": HashStore(), **ranks}
    elif place.source == "torchrun":
        given = {"init_method": "env://"}  # the store may be the agent's
    elif place.address is None or place.port is None:
        mpi_group = _mpi_group("or set MASTER_ADDR and MASTER_PORT to where rank 0 can listen")
        given = {"store": mpi_group.shared_store(timeout), **ranks}
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


def _mpi_group(otherwise: str = "") -> ModuleType:
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError(
            "mpi4py is not installed",
            where="backend",
            hint=f"pip install 'ckptkit[mpi]' {otherwise}".strip(),
        )
    from ckptkit.parallel.ranks import mpi_group  # noqa: PLC0415 - starts MPI

    return mpi_group


def _known() -> Communicator | None:
    return getattr(_of_thread, "communicator", None) or _joined()


def _joined() -> Communicator | None:
    group = dist.group.WORLD
    return None if group is None else _of_process.get(group)


def _made(timeout: float, *, is_own: bool) -> Communicator:
    """The communicator of the default process group, which goes with it where it `is_own`."""

    def close() -> None:
        # By now there may be another group.
        if _joined() is made:
            _of_process.clear()
            if is_own:
                dist.destroy_process_group()

    made = Communicator(TorchCarrier(timeout=timeout, on_close=close))
    group: Any = dist.group.WORLD
    _of_process[group] = made
    return made


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank of a process in its job, and where the job meets."""

    source: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} is none of the {self.world_size} that there are",
                where=f"the environment of {self.source}",
            )


def place_from(environment: Mapping[str, str]) -> RankPlace:
    """The place that the environment tells of; one rank where it tells of none.

    What contradicts itself or says only half is a UsageError.
    """
    found = [place for launcher in _LAUNCHERS if (place := _told_by(launcher, environment))]
    first, *others = found or [RankPlace("nothing")]
    for other in others:
        # mpirun may start one torchrun a node, which starts more ranks: only fewer contradict it.
        # Slurm's variables go down to whatever a step or a shell starts, and contradict nothing.
        same_size = first.world_size == other.world_size
        if other.source != "Slurm" and (
            first.world_size < other.world_size or (same_size and first.rank != other.rank)
        ):
            raise UsageError(
                f"{first.source} says that this is rank {first.rank} of {first.world_size}, "
                f"{other.source} that it is rank {other.rank} of {other.world_size}",
                where="the environment",
                hint="unset the variables of the launcher that did not start this process",
            )
        if first.address is None and same_size and first.rank == other.rank:
            first = replace(first, address=other.address, port=other.port)
    return first


def _told_by(launcher: str, environment: Mapping[str, str]) -> RankPlace | None:
    if launcher == "Slurm" and not environment.get("SLURM_STEP_NODELIST"):
        return None  # a shell in an allocation, or the batch script itself: no rank of a step
    (of_rank,), (of_size,), of_local_rank, of_local_size = _LAUNCHERS[launcher]
    rank, size = _number(environment, of_rank), _number(environment, of_size)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        there, missing = (of_size, of_rank) if rank is None else (of_rank, of_size)
        raise UsageError(
            f"{there} is set, but {missing} is not",
            where="the environment",
            value=environment[there],
            hint=f"{launcher} sets both: unset the one or set the other",
        )
    local_rank = _number(environment, *of_local_rank)
    local_size = _number(environment, *of_local_size) or size
    if local_rank is None:
        local_rank = rank % max(1, local_size)
    address, port = environment.get("MASTER_ADDR") or None, _number(environment, "MASTER_PORT")
    if launcher == "Slurm":
        # It says indirectly where rank 0 is: as a list of hosts, and a number all ranks know.
        # The first host of such as `a[003-007,9],b` is a003.
        nodes = environment["SLURM_STEP_NODELIST"].strip()
        if address is None and (match := re.match(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes)):
            name, numbers, more = match.groups()
            address = name + re.split("[-,]", numbers or "")[0] + more
        job = _number(environment, "SLURM_JOB_ID")
        if port is None and job is not None:
            port = _PORTS[job % len(_PORTS)]
    # MPI does without: its ranks tell each other by messages.
    if launcher in ("torchrun", "Slurm") and size > 1 and (address is None or port is None):
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise UsageError(
            f"{launcher} has started {size} ranks, but {missing} is not set",
            where="the environment",
            hint=f"set {missing} to where rank 0 can listen",
        )
    return RankPlace(launcher, rank, size, local_rank, address, port)


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set."""
    for name in names:
        if text := environment.get(name):
            if not text.strip().isdecimal():
                raise UsageError("is no number", where=name, value=text)
            return int(text)
    return None
