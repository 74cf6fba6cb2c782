"""How the ranks of one save wait for each other: two questions, whatever carries the answers."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ckptkit.errors import GivenUpError, PeerError, UsageError

DEFAULT_TIMEOUT = 600.0


class Barrier(Protocol):
    """A meeting point of all ranks; every rank makes the same calls in the same order.

    A rank that does not come within the implementation's time-out is a PeerError on the others,
    never a hang. Once a rank has left, every call on every rank raises: a barrier serves until
    the first failure.
    """

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    def share(self, value: str) -> str:
        """Rank 0's value, on every rank; what the others pass is ignored."""

    def wait(self) -> None:
        """Return when all ranks are here."""

    def leave(self, problem: str) -> None:
        """Tell the others that this rank has failed, without waiting for them; never raises."""


class SoloBarrier:
    """The barrier of a single rank."""

    rank = 0
    world_size = 1

    def share(self, value: str) -> str:
        """The value itself."""
        return value

    def wait(self) -> None:
        """Nobody to wait for."""

    def leave(self, problem: str) -> None:
        """Nobody to tell."""


class ThreadBarrier:
    """Ranks that are threads of one process: `ThreadBarrier.group(4)` makes one for each."""

    def __init__(self, rank: int, shared: _Shared, timeout: float) -> None:
        self.rank = rank
        self.world_size = shared.meeting.parties
        self._shared = shared
        self._timeout = timeout

    @classmethod
    def group(cls, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> list[ThreadBarrier]:
        """One barrier for each rank."""
        shared = _Shared(threading.Barrier(world_size))
        return [cls(rank, shared, timeout) for rank in range(world_size)]

    def share(self, value: str) -> str:
        """Rank 0's value."""
        if self.rank == 0:
            self._shared.value = value
        self.wait()
        answer = self._shared.value
        self.wait()
        return answer

    def wait(self) -> None:
        """Meet the other threads."""
        try:
            self._shared.meeting.wait(self._timeout)
        except threading.BrokenBarrierError:
            if not self._shared.problem:
                raise _late("another rank", self._timeout) from None
            # Any thread can break the meeting; only rank 0 can say that there will be no commit.
            if self.rank == 0:
                self._shared.given_up = True
            raise _failed(self._shared.problem, given_up=self._shared.given_up) from None

    def leave(self, problem: str) -> None:
        """Break the meeting."""
        self._shared.problem = self._shared.problem or f"rank {self.rank}: {problem}"
        self._shared.given_up |= self.rank == 0
        self._shared.meeting.abort()


@dataclass(slots=True)
class _Shared:
    meeting: threading.Barrier
    problem: str = ""
    value: str = ""
    given_up: bool = False


class FileBarrier:
    """Ranks that are processes which see one folder; it must be empty at the start and belong to
    this job alone.

    Rank 0 reads one small file of each rank, the others one of rank 0: nothing grows with ranks
    squared.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        world_size: int,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        if not 0 <= rank < world_size:
            raise UsageError(f"the rank has to be from 0 to below {world_size}", value=rank)
        self.rank = rank
        self.world_size = world_size
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._timeout = timeout
        self._round = 0

    def share(self, value: str) -> str:
        """Rank 0's value."""
        if self.rank == 0:
            self._say("shared", value)
        answer = self._hear("shared", 0)
        self._next()
        return answer

    def wait(self) -> None:
        """Meet the other processes."""
        if self.rank == 0:
            for rank in range(1, self.world_size):
                self._hear("here", rank)
            self._say("go", "")
        else:
            self._say("here", "")
            self._hear("go", 0)
        self._next()

    def leave(self, problem: str) -> None:
        """Leave a note in the folder."""
        self._relay(f"rank {self.rank}: {problem}")

    def _next(self) -> None:
        # A file is removed two rounds late: by then everyone has left the round it belongs to.
        for what in ("shared", "here", "go"):
            (self._folder / f"{self._round - 2}-{what}-{self.rank}").unlink(missing_ok=True)
        self._round += 1

    def _relay(self, problem: str) -> None:
        """Say why there will be no step, unless this rank has said so before."""
        name = f"left-{self.rank}"
        with suppress(OSError):
            if not (self._folder / name).exists():
                self._write(name, problem)

    def _say(self, what: str, text: str) -> None:
        self._write(f"{self._round}-{what}-{self.rank}", text)

    def _write(self, name: str, text: str) -> None:
        temporary = self._folder / f".{name}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self._folder / name)

    def _hear(self, what: str, rank: int) -> str:
        message = self._folder / f"{self._round}-{what}-{rank}"
        farewell = self._folder / f"left-{rank}"
        deadline = time.monotonic() + self._timeout
        pause = 0.001
        while True:
            if message.exists():
                return message.read_text(encoding="utf-8")
            if farewell.exists():
                problem = farewell.read_text(encoding="utf-8")
                self._relay(problem)
                raise _failed(problem, given_up=rank == 0)
            if time.monotonic() > deadline:
                raise _late(f"rank {rank}", self._timeout)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)


def _failed(problem: str, *, given_up: bool) -> PeerError:
    kind = GivenUpError if given_up else PeerError
    return kind(f"there is no new step, because of {problem}")


def _late(who: str, timeout: float) -> PeerError:
    return PeerError(
        f"{who} did not come within {timeout:g} s",
        hint="look at the log of the rank that is missing; `ckpt ls RUN` shows what is committed",
    )
