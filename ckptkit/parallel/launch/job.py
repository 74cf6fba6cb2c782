"""What is to be launched, and what came of it."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass

from ckptkit.errors import UsageError

BACKENDS = ("auto", "gloo", "nccl", "mpi")


@dataclass(frozen=True, slots=True)
class Job:
    """A program, and as how many ranks it runs."""

    program: tuple[str, ...]
    """The arguments of Python: a script or `-m` and a module, and then those of the program."""
    nproc_per_node: int = 1
    nodes: str = "1"
    """How many machines take part: a number, or the least and the most as `1:4`."""
    backend: str = "auto"
    max_restarts: int = 0
    endpoint: str = ""
    """Where the machines meet, as host:port; the same on all of them."""
    run_id: str = ""

    def __post_init__(self) -> None:
        if not self.program or self.program == ("-m",):
            raise UsageError("there is no program to launch", hint="name a script, or -m a module")
        if self.nproc_per_node < 1:
            raise UsageError("a machine runs one rank or more", value=self.nproc_per_node)
        if self.max_restarts < 0:
            raise UsageError("a job restarts never or some times", value=self.max_restarts)
        if self.backend not in BACKENDS:
            hint = f"there are {', '.join(BACKENDS)}"
            raise UsageError("no such backend", value=self.backend, hint=hint)
        _, most = self.node_range
        if most > 1 and self.backend == "mpi":
            raise UsageError(
                "ranks on several machines are for mpirun itself to start",
                value=self.nodes,
                hint="mpirun --hostfile HOSTS -n 8 python train.py; ckptkit.parallel.init('mpi') "
                "reads its environment",
            )
        if most > 1 and not self.endpoint:
            raise UsageError(
                "several machines need a place to meet",
                value=self.nodes,
                hint="--rdzv-endpoint HOST:PORT, the same on each of them",
            )

    @property
    def node_range(self) -> tuple[int, int]:
        """The least and the most machines."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.nodes)
        if match is None or int(match[1]) < 1 or int(match[2] or match[1]) < int(match[1]):
            hint = "a number, or the least and the most: 1:4"
            raise UsageError("is no number of machines", value=self.nodes, hint=hint)
        return int(match[1]), int(match[2] or match[1])

    @property
    def command(self) -> tuple[str, ...]:
        """What each rank runs; unbuffered, so that lines come when they are printed."""
        return (sys.executable, "-u", *self.program)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    ok: bool
    restarts: int = 0
    failed_rank: int | None = None
    """The one that failed first."""
    exit_code: int | None = None
    """That rank's; minus the number of the signal that ended it, as Python has it."""

    @property
    def reason(self) -> str:
        """In words."""
        if self.ok:
            return "all ranks ended well"
        return said(self.failed_rank, self.exit_code)


def said(rank: int | None, code: int | None) -> str:
    """How a rank ended, in words."""
    who = "a rank" if rank is None else f"rank {rank}"
    if code is None:
        return f"{who} failed"
    if code < 0:
        return f"{who} was ended by signal {-code}{_name_of(-code)}"
    return f"{who} ended with exit code {code}"


def _name_of(number: int) -> str:
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""
