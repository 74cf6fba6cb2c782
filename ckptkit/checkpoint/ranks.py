"""How the ranks of one job meet, whatever carries what they say."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptkit.errors import CkptkitError, GivenUpError, PeerError, UsageError
from ckptkit.format.leaves import dumps, unpack
from ckptkit.model import Strategy

DEFAULT_TIMEOUT = 600.0


class Ranks(ABC):
    """All ranks of a job, as one of them meets the others; every rank makes the same calls in the
    same order.

    A rank that does not come within the time-out is a PeerError on the others, never a hang. Once
    a rank has left, every call on every rank raises: they meet until the first failure.

    What is said are the plain values that a checkpoint may hold (`ckptkit.format.leaves`), so no
    rank can make another one run code.
    """

    rank: int
    world_size: int
    failure = "there is no new step"
    """What it means that a rank has failed."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    def share(self, answer: Callable[[], Any]) -> Any:
        """Rank 0's answer, on every rank; only rank 0 works it out."""
        return unpack(self._tell(dumps(answer()) if self.rank == 0 else b""), "rank 0")

    def collect(self, value: object) -> list[Any]:
        """What all ranks have to say, in their order, on rank 0; nothing on the others."""
        heard = self._meet(dumps(value))
        return [unpack(data, f"rank {rank}") for rank, data in enumerate(heard)]

    def agree(self, mine: object, conclude: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 concludes of what all ranks have to say."""
        heard = self.collect(mine)
        return self.share(lambda: conclude(heard))

    def wait(self) -> None:
        """Return when all ranks are here."""
        self._meet(None)

    @abstractmethod
    def leave(self, problem: str) -> str:
        """Tell the others that this rank has failed, without waiting for them; never raises.

        Gives what is known of the first failure: which rank's it was, and the problem.
        """

    def forget(self) -> None:  # noqa: B027 — most leave nothing behind
        """Remove what was said, once no rank can ask for it any more."""

    @abstractmethod
    def _tell(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""

    @abstractmethod
    def _meet(self, data: bytes | None) -> list[bytes]:
        """Return when all ranks are here: on rank 0 with their bytes in order, unless there are
        none, on the others with nothing.
        """


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Tell the others what goes wrong here, so that they do not wait for this rank. What another
    one told first is raised as an error of the type that it has there: all ranks go on alike.
    """
    try:
        yield
    except Exception as error:
        first = ranks.leave(in_one_line(error))
        rank, _, said = first.partition(": ")
        if rank == f"rank {ranks.rank}":
            raise
        kind = _kinds().get(said.partition(":")[0], GivenUpError)
        if type(error) is kind:
            raise
        raise kind(f"{ranks.failure}, because of {first}") from error
    except BaseException as error:
        ranks.leave(in_one_line(error))
        raise


def in_one_line(error: BaseException) -> str:
    """An error as other ranks are told of it."""
    return f"{type(error).__name__}: {error}".replace("\n", "; ")


def _kinds() -> dict[str, type[CkptkitError]]:
    """The types of error, by name, that are made of what is said alone."""
    found: dict[str, type[CkptkitError]] = {}
    unseen: list[type[CkptkitError]] = [CkptkitError]
    while unseen:
        kind = unseen.pop()
        unseen += kind.__subclasses__()
        if kind.__init__ is CkptkitError.__init__ and kind.__module__.startswith("ckptkit."):
            found[kind.__name__] = kind
    return found


class OneRank(Ranks):
    """A job of a single rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._cancelled = ""

    def cancel(self, problem: str) -> None:
        """Let the next call raise that has to meet the others."""
        self._cancelled = problem

    def leave(self, problem: str) -> str:
        return f"rank 0: {problem}"

    def _tell(self, data: bytes) -> bytes:
        return data

    def _meet(self, data: bytes | None) -> list[bytes]:
        if self._cancelled:
            raise GivenUpError(f"{self.failure}: {self._cancelled}")
        return [] if data is None else [data]


def ranks_for(strategy: Strategy, rank: int, ranks: Ranks | None) -> Ranks:
    """How the ranks of a strategy meet, once it is known to fit them; one alone needs nobody."""
    count = strategy.world_size
    if not 0 <= rank < count:
        raise UsageError(f"{strategy} has the ranks 0 to {count - 1}", value=rank)
    if ranks is None:
        if count > 1:
            raise UsageError(
                f"{strategy} has {count} ranks, which need a barrier to meet at",
                hint="pass barrier=FileBarrier(folder, rank, world_size)",
            )
        return OneRank()
    if (ranks.rank, ranks.world_size) != (rank, count):
        raise UsageError(
            f"the barrier does not fit rank {rank} of {count}",
            value=(ranks.rank, ranks.world_size),
        )
    return ranks


class ThreadBarrier(Ranks):
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

    def leave(self, problem: str) -> str:
        room = self._room
        with room.changed:
            first = next(iter(room.left.values()), f"rank {self.rank}: {problem}")
            room.left.setdefault(self.rank, first)
            room.changed.notify_all()
        return first

    def _tell(self, data: bytes) -> bytes:
        room, number = self._room, self._round
        self._round += 1
        with room.changed:
            if self.rank == 0:
                room.shared[number] = data
                room.changed.notify_all()
            room.changed.wait_for(lambda: number in room.shared or 0 in room.left, self._timeout)
            if number in room.shared:
                return room.shared[number]
            raise self._missed()

    def _meet(self, data: bytes | None) -> list[bytes]:
        room, number = self._room, self._round
        self._round += 1
        with room.changed:
            said = room.said.setdefault(number, {})
            said[self.rank] = data or b""
            room.changed.notify_all()
            # Rank 0 listens to all, the others to rank 0, who alone can say that there is no step.
            room.changed.wait_for(
                lambda: (
                    len(said) == self.world_size
                    or (bool(room.left) if self.rank == 0 else 0 in room.left)
                ),
                self._timeout,
            )
            if len(said) < self.world_size:
                raise self._missed()
            is_asked = self.rank == 0 and data is not None
            return [said[rank] for rank in range(self.world_size)] if is_asked else []

    def _missed(self) -> PeerError:
        if not self._room.left:
            return late("another rank", self._timeout)
        first = next(iter(self._room.left.values()))
        return _failed(self.failure, first, given_up=0 in self._room.left)


@dataclass(slots=True)
class _Room:
    """What the threads of one group share."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    shared: dict[int, bytes] = field(default_factory=dict)
    said: dict[int, dict[int, bytes]] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)


class FileBarrier(Ranks):
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

    def leave(self, problem: str) -> str:
        return self._relay(f"rank {self.rank}: {problem}")

    def _tell(self, data: bytes) -> bytes:
        if self.rank == 0:
            self._say("shared", data)
        else:
            data = self._hear("shared", {0})[0]
        self._round += 1
        return data

    def _meet(self, data: bytes | None) -> list[bytes]:
        heard: dict[int, bytes] = {}
        if self.rank == 0:
            heard = self._hear("here", set(range(1, self.world_size)))
            self._say("go", b"")
        else:
            self._say("here", data or b"")
            self._hear("go", {0})
        # All are here, so all have read what was said in earlier rounds.
        current = f"{self._round}-"
        for path in self._said:
            if not path.name.startswith(current):
                path.unlink(missing_ok=True)
        self._said = [path for path in self._said if path.name.startswith(current)]
        self._round += 1
        if self.rank > 0 or data is None:
            return []
        return [data, *(heard[rank] for rank in range(1, self.world_size))]

    def _relay(self, problem: str) -> str:
        """Say why there will be no step, unless this rank has said so before."""
        path = self._folder / f"left-{self.rank}"
        with suppress(OSError):
            if path.exists():
                return path.read_text(encoding="utf-8")
            _write(path, problem.encode())
        return problem

    def _say(self, what: str, data: bytes) -> None:
        path = self._folder / f"{self._round}-{what}-{self.rank}"
        _write(path, data)
        self._said.append(path)

    def _hear(self, what: str, ranks: set[int]) -> dict[int, bytes]:
        """What each of some ranks says in this round."""
        heard: dict[int, bytes] = {}
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
                    heard[rank] = (self._folder / name).read_bytes()
            missing = sorted(ranks - heard.keys())
            for rank in gone:
                if rank in missing:
                    problem = (self._folder / f"left-{rank}").read_text(encoding="utf-8")
                    self._relay(problem)
                    raise _failed(self.failure, problem, given_up=rank == 0)
            if missing and time.monotonic() > deadline:
                raise late(f"rank {missing[0]}", self._timeout)
            if missing:
                # Soon where ranks are close together, seldom where one is late and there are many:
                # hundreds may list this folder, over a network.
                time.sleep(pause)
                pause = min(pause * 1.5, 0.005 * self.world_size, 0.05)
        return heard

    def _names(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()}


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}")
    # Made, never opened: where many may write, a link may lie in wait at its name.
    with temporary.open("xb") as file:
        file.write(data)
    temporary.replace(path)


def _failed(failure: str, problem: str, *, given_up: bool) -> PeerError:
    # Only rank 0 commits: when it has left nothing will ever be committed.
    kind = GivenUpError if given_up else PeerError
    return kind(f"{failure}, because of {problem}")


def late(who: str, timeout: float) -> PeerError:
    """The error where ranks did not come in time."""
    return PeerError(
        f"{who} did not come within {timeout:g} s",
        hint="look at the log of the rank that is missing; `ckpt ls RUN` shows what is committed",
    )
