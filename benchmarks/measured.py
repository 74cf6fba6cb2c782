"""What was measured, by the name of who did it."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Samples = dict[str, list[float]]

_UNCOMPILED = "PYTHONDONTWRITEBYTECODE"


@dataclass(frozen=True, slots=True)
class Taken:
    """One action of all ranks: the seconds from the moment all begin to the moment the last one
    is done, the processor seconds of all together, and what each of them gave back.
    """

    seconds: float
    cpu: float
    results: list[Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """Many actions."""

    seconds: Samples = field(default_factory=dict)
    cpu: Samples = field(default_factory=dict)

    def add(self, name: str, taken: Taken) -> None:
        """One more."""
        self.seconds.setdefault(name, []).append(taken.seconds)
        self.cpu.setdefault(name, []).append(taken.cpu)

    def median(self, name: str) -> float:
        """The usual number of seconds."""
        return median(self.seconds[name])

    def median_cpu(self, name: str) -> float:
        """The usual number of processor seconds."""
        return median(self.cpu[name])

    def with_best(self, prefix: str) -> tuple[str, Measured]:
        """The name of the fastest of the variants that begin so, and all without the others."""
        variants = [name for name in self.seconds if name.startswith(prefix)]
        best = min(variants, key=self.median)
        kept = [name for name in self.seconds if name == best or name not in variants]
        seconds = {name: self.seconds[name] for name in kept}
        return best, Measured(seconds, {name: self.cpu[name] for name in kept})


def taken_by(command: Sequence[str]) -> Taken:
    """What a process takes from its start to its end, with the compiled modules that users have:
    who tells Python not to keep these compiles ckptkit at each start.
    """
    kept = {name: value for name, value in os.environ.items() if name != _UNCOMPILED}
    start, cpu = time.monotonic(), _of_children()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=kept)
    return Taken(time.monotonic() - start, _of_children() - cpu, [])


def _of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
