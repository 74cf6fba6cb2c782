"""What the environment says about this process' place in a job: torchrun, Slurm or MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptkit.errors import UsageError

_PORTS = range(20000, 30000)  # below those that systems give away by themselves

# By launcher: the variables of the rank, the size, the rank on this machine and the size of that;
# of several the first that is set counts. torchrun comes first, then MPI, then Slurm: each may
# have been started by the one after it.
_LAUNCHERS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": ("RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "MPI (PMI)": (
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), ()),
}


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The rank of a process in its job, and where the job meets."""

    source: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
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
    told = (_told_by(launcher, environment) for launcher in _LAUNCHERS)
    found = [place for place in told if place is not None]
    if not found:
        return RankPlace("nothing")
    first = found[0]
    for other in found[1:]:
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
    of_rank, of_size, of_local_rank, of_local_size = _LAUNCHERS[launcher]
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
    local_size = _number(environment, *of_local_size)
    local_rank = _number(environment, *of_local_rank)
    address, port = environment.get("MASTER_ADDR") or None, _number(environment, "MASTER_PORT")
    if launcher == "Slurm":
        # It says indirectly where rank 0 is: as a list of hosts, and a number all ranks know.
        local_size = _tasks_here(environment)
        address = address or _first_host(environment["SLURM_STEP_NODELIST"])
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
    local_size = local_size or size
    if local_rank is None:
        local_rank = rank % max(1, local_size)
    return RankPlace(launcher, rank, size, local_rank, local_size, address, port)


def _first_host(nodes: str) -> str | None:
    """The first host of a list as Slurm writes it: `a[003-007,9],b` is a003."""
    match = re.match(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[]*)", nodes.strip())
    if match is None:
        return None
    name, numbers, rest = match.groups()
    return name + re.split("[-,]", numbers or "")[0] + rest


def _tasks_here(environment: Mapping[str, str]) -> int | None:
    """How many tasks Slurm has on this node, of a list such as `4(x2),3`."""
    told = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for item in told.split(",") if told else ():
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _number(environment: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is set."""
    for name in names:
        if text := environment.get(name):
            if not text.strip().isdecimal():
                raise UsageError("is no number", where=name, value=text)
            return int(text)
    return None
