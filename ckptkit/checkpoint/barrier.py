"""How the ranks of one save wait for each other: two questions, whatever carries the answers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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


class Gathering(Barrier, Protocol):
    """A barrier at which rank 0 also hears what the others have to say."""

    def collect(self, data: bytes) -> list[bytes]:
        """The data of all ranks, in their order, on rank 0; on the others their own."""


class SoloBarrier:
    """The barrier of a single rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._cancelled = ""

    def share(self, value: str) -> str:
        """The value itself."""
        return value

    def wait(self) -> None:
        """Nobody to wait for."""
        if self._cancelled:
            raise GivenUpError(f"there is no new step: {self._cancelled}")

    def cancel(self, problem: str) -> None:
        """Let the next call of `wait` raise."""
        self._cancelled = problem

    def collect(self, data: bytes) -> list[bytes]:
        """The data itself."""
        return [data]

    def leave(self, problem: str) -> None:
        """Nobody to tell."""


class ThreadBarrier:
    """Ranks that are threads of one process: `ThreadBarrier.group(4)` makes one for each."""

    def __init__(self, rank: int, world_size: int, room: _Room, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._room = room
        self._timeout = timeout
        self._round = 0

    @classmethod
    def group(cls, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> list[ThreadBarrier]:
        """One barrier for each rank."""
        room = _Room()
        return [cls(rank, world_size, room, timeout) for rank in range(world_size)]

    def share(self, value: str) -> str:
        """Rank 0's value."""
        room, number = self._room, self._round
        self._round += 1
        with room.changed:
            if self.rank == 0:
                room.shared[number] = value
                room.changed.notify_all()
            room.changed.wait_for(lambda: number in room.shared or 0 in room.left, self._timeout)
            if number in room.shared:
                return room.shared[number]
            raise self._missed()

    def wait(self) -> None:
        """Meet the other threads."""
        room, number = self._room, self._round
        self._round += 1
        with room.changed:
            arrived = room.arrived[number] = room.arrived.get(number, 0) + 1
            if arrived == self.world_size:
                room.changed.notify_all()
            room.changed.wait_for(self._all_here(number), self._timeout)
            if room.arrived[number] < self.world_size:
                raise self._missed()

    def collect(self, data: bytes) -> list[bytes]:
        """The data of all threads, for rank 0."""
        with self._room.changed:
            said = self._room.said.setdefault(self._round, {})
            said[self.rank] = data
        self.wait()
        return [said[rank] for rank in range(self.world_size)] if self.rank == 0 else [data]

    def leave(self, problem: str) -> None:
        """Leave word, and wake those who wait."""
        with self._room.changed:
            first = next(iter(self._room.left.values()), f"rank {self.rank}: {problem}")
            self._room.left.setdefault(self.rank, first)
            self._room.changed.notify_all()

    def _all_here(self, number: int) -> Callable[[], bool]:
        # Rank 0 listens to all, the others to rank 0, who alone can say that it is over.
        room, is_first = self._room, self.rank == 0

        def done() -> bool:
            over = bool(room.left) if is_first else 0 in room.left
            return over or room.arrived[number] == self.world_size

        return done

    def _missed(self) -> PeerError:
        if not self._room.left:
            return _late("another rank", self._timeout)
        return _failed(next(iter(self._room.left.values())), given_up=0 in self._room.left)


class _Room:
    """What the threads of one group share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.shared: dict[int, str] = {}
        self.arrived: dict[int, int] = {}
        self.said: dict[int, dict[int, bytes]] = {}
        self.left: dict[int, str] = {}


class FileBarrier:
    """Ranks that are processes which see one folder. It must be empty at the start, and serves one
    job, for as many saves as it likes, until the first failure.

    Rank 0 looks for one small file of each rank, the others for one of rank 0: nothing grows with
    ranks squared. Meant for up to some hundred ranks; a job has faster ways to meet.
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
        self._said: list[Path] = []
        # Only this rank writes such names, so what is there is of an earlier job or barrier.
        if any(self._folder.glob(f"*-{rank}")):
            raise UsageError(
                f"rank {rank} has met others in this folder before",
                where=str(self._folder),
                hint="give every job, and every restart of it, an empty folder; "
                "one FileBarrier serves all saves of a job",
            )

    def share(self, value: str) -> str:
        """Rank 0's value."""
        if self.rank == 0:
            self._say("shared", value)
            answer = value
        else:
            answer = self._hear("shared", {0})[0]
        self._round += 1
        return answer

    def wait(self) -> None:
        """Meet the other processes."""
        if self.rank == 0:
            self._hear("here", set(range(1, self.world_size)))
            self._say("go", "")
        else:
            self._say("here", "")
            self._hear("go", {0})
        # All are here, so all have read what was said in earlier rounds.
        current = f"{self._round}-"
        for path in self._said:
            if not path.name.startswith(current):
                path.unlink(missing_ok=True)
        self._said = [path for path in self._said if path.name.startswith(current)]
        self._round += 1

    def leave(self, problem: str) -> None:
        """Leave a note in the folder."""
        self._relay(f"rank {self.rank}: {problem}")

    def _relay(self, problem: str) -> None:
        """Say why there will be no step, unless this rank has said so before."""
        path = self._folder / f"left-{self.rank}"
        with suppress(OSError):
            if not path.exists():
                _write(path, problem)

    def _say(self, what: str, text: str) -> None:
        path = self._folder / f"{self._round}-{what}-{self.rank}"
        _write(path, text)
        self._said.append(path)

    def _hear(self, what: str, ranks: set[int]) -> dict[int, str]:
        """What each of some ranks says in this round."""
        heard: dict[int, str] = {}
        deadline = time.monotonic() + self._timeout
        pause = 0.001
        while len(heard) < len(ranks):
            names = self._names()
            gone = sorted(rank for rank in ranks if f"left-{rank}" in names)
            # Looked for again after the farewells: a rank speaks before it leaves, never after.
            names |= self._names() if gone else set()
            for rank in ranks - heard.keys():
                name = f"{self._round}-{what}-{rank}"
                if name in names:
                    heard[rank] = (self._folder / name).read_text(encoding="utf-8")
            missing = sorted(ranks - heard.keys())
            for rank in gone:
                if rank in missing:
                    problem = (self._folder / f"left-{rank}").read_text(encoding="utf-8")
                    self._relay(problem)
                    raise _failed(problem, given_up=rank == 0)
            if missing and time.monotonic() > deadline:
                raise _late(f"rank {missing[0]}", self._timeout)
            if missing:
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
        return heard

    def _names(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()}


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    # Made, never opened: where many may write, a link may lie in wait at its name.
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)


def _failed(problem: str, *, given_up: bool) -> PeerError:
    kind = GivenUpError if given_up else PeerError
    return kind(f"there is no new step, because of {problem}")


def _late(who: str, timeout: float) -> PeerError:
    return PeerError(
        f"{who} did not come within {timeout:g} s",
        hint="look at the log of the rank that is missing; `ckpt ls RUN` shows what is committed",
    )
