"""A program that saves with two processes, one of which dies at an operation of its FileBarrier:
all such cases at once, each on a copy of one run.

`python -m tests.checkpoint.dying_at_barrier ROOT` copies ROOT/base to ROOT/RANK-OPERATION-WHEN and
prints these names, each with how the rank ended that did not die: 0, or 3 where it was told of
a failure.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptkit import FileBarrier, Writer
from ckptkit.errors import PeerError
from tests.checkpoint.dying import NEW
from tests.checkpoint.saving import add

_RANKS = 2
_TIMEOUT = 3.0
_DEAD, _TOLD = 17, 3
# Looking for news is no operation: it changes nothing, and happens any number of times.
_OPERATIONS = ("mkdir", "open", "replace", "read_bytes", "unlink")
_NEVER = 1 << 30


class _Counted:
    """The operations on a folder, counted from 1; the process ends at one of them."""

    def __init__(self, folder: Path, fatal: int, *, after: bool) -> None:
        self.count = 0
        self._folder = folder
        self._fatal = fatal
        self._after = after
        for name in _OPERATIONS:
            setattr(Path, name, self._counting(getattr(Path, name)))

    def _counting(self, real: Any) -> Any:
        def counting(path: Path, *arguments: Any, **options: Any) -> Any:
            if not path.is_relative_to(self._folder):
                return real(path, *arguments, **options)
            self.count += 1
            fatal = self.count == self._fatal
            if fatal and not self._after:
                os._exit(_DEAD)
            result = real(path, *arguments, **options)
            if fatal:
                os._exit(_DEAD)
            return result

        return counting


def _start(run: Path, rank: int, fatal: int = _NEVER, *, after: bool = False) -> int:
    """A rank in a process of its own; ends with the number of its operations if none is fatal."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        meeting = run.with_name(f"meeting-{run.name}")
        counted = _Counted(meeting, fatal, after=after)
        _save(run, FileBarrier(meeting, rank, _RANKS, _TIMEOUT))
        code = counted.count if run.name == "count" else 0
    except PeerError:
        code = _TOLD
    finally:
        os._exit(code)


def _save(run: Path, barrier: FileBarrier) -> None:
    with Writer(run, step=2, strategy="fsdp:2", rank=barrier.rank, barrier=barrier) as writer:
        for name, tensor in NEW.items():
            add(writer, name, tensor)


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _cases(counts: list[int]) -> Iterator[tuple[int, int, str]]:
    for rank, count in enumerate(counts):
        for number in range(1, count + 1):
            yield rank, number, "before"
            yield rank, number, "after"


def main(root: Path) -> None:
    children = [_start(root / "count", rank) for rank in range(_RANKS)]
    counts = [_ended(child) for child in children]
    cases = {}
    for dying, number, when in _cases(counts):
        run = root / f"{dying}-{number}-{when}"
        shutil.copytree(root / "base", run)
        dead = _start(run, dying, number, after=when == "after")
        cases[run.name] = dead, _start(run, 1 - dying)
    for name, (dead, other) in cases.items():
        if _ended(dead) != _DEAD:
            raise SystemExit(f"{name} outlived its last operation")
        print(name, _ended(other))  # noqa: T201 — a program, read by its test


if __name__ == "__main__":
    main(Path(sys.argv[1]))
