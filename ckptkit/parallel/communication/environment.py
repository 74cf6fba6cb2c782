"""What the environment says about this process' place in a job: torchrun, Slurm or MPI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckptkit.errors import UsageError

_PORTS = range(20000, 30000)  # below those that systems give away by themselves


@dataclass(frozen=True, slots=True)
class Place:
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


@dataclass(frozen=True, slots=True)
class _Source:
    """The variables of one launcher; of several names the first that is set counts."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()


_SOURCES = (
    _Source("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Source(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Source(
        "MPI (PMI)",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    _Source("Slurm", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), ()),
)


def place_from(environment: Mapping[str, str]) -> Place:
    """The place that the environment tells of; one rank where it tells of none.

    torchrun's variables come first, then those of MPI, then Slurm's: each may have been started by
    the one after it. What contradicts itself or says only half is a UsageError.
    """
    found = [place for source in _SOURCES if (place := _read(source, environment)) is not None]
    if not found:
        return Place("nothing")
    first = found[0]
    for other in found[1:]:
        if other.source != "Slurm":  # whose variables go down to whatever a step or a shell starts
            _check_alike(first, other)
        if first.address is None and (first.rank, first.world_size) == (
            other.rank,
            other.world_size,
        ):
            first = replace(first, address=other.address, port=other.port)
    return first


def _check_alike(first: Place, other: Place) -> None:
    # mpirun may start one torchrun a node, which starts more ranks: only fewer are a contradiction.
    fewer = first.world_size < other.world_size
    if fewer or (first.world_size == other.world_size and first.rank != other.rank):
        raise UsageError(
            f"{first.source} says that this is rank {first.rank} of {first.world_size}, "
            f"{other.source} that it is rank {other.rank} of {other.world_size}",
            where="the environment",
            hint="unset the variables of the launcher that did not start this process",
        )


def _read(source: _Source, environment: Mapping[str, str]) -> Place | None:
    if source.name == "Slurm" and not environment.get("SLURM_STEP_NODELIST"):
        return None  # a shell in an allocation, or the batch script itself: no rank of a step
    given = [name for name in (source.rank, source.size) if environment.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = source.size if source.rank in given else source.rank
        raise UsageError(
            f"{given[0]} is set, but {missing} is not",
            where="the environment",
            value=environment[given[0]],
            hint=f"{source.name} sets both: unset the one or set the other",
        )
    rank, size = _number(environment, source.rank), _number(environment, source.size)
    local_size = _first(environment, source.local_size) or size
    if source.name == "Slurm":
        local_size = _tasks_here(environment) or size
    local_rank = _first(environment, source.local_rank)
    if local_rank is None:
        local_rank = rank % local_size
    address, port = _meeting(source, environment, size)
    return Place(source.name, rank, size, local_rank, local_size, address, port)


def _meeting(
    source: _Source, environment: Mapping[str, str], size: int
) -> tuple[str | None, int | None]:
    """Where rank 0 listens; Slurm says it indirectly, MPI tells it by messages."""
    address = environment.get("MASTER_ADDR") or None
    port = _number(environment, "MASTER_PORT") if environment.get("MASTER_PORT") else None
    if source.name == "Slurm":
        address = address or _first_host(environment["SLURM_STEP_NODELIST"])
        if port is None and environment.get("SLURM_JOB_ID"):
            port = _PORTS[_number(environment, "SLURM_JOB_ID") % len(_PORTS)]
    if source.name in ("torchrun", "Slurm") and size > 1 and (address is None or port is None):
        missing = "MASTER_ADDR" if address is None else "MASTER_PORT"
        raise UsageError(
            f"{source.name} has started {size} ranks, but {missing} is not set",
            where="the environment",
            hint=f"set {missing} to where rank 0 can listen",
        )
    return address, port


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
    if not told:
        return None
    counts: list[int] = []
    for item in told.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environment.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((_number(environment, name) for name in names if environment.get(name)), None)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name].strip()
    if not text.isdecimal():
        raise UsageError("is no number", where=name, value=environment[name])
    return int(text)
