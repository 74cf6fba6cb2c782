"""How the ranks of one job meet, whatever carries what they say."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ckptkit.errors import CkptkitError, GivenUpError, PeerError, UsageError
from ckptkit.format.encoding import dumps, unpack
from ckptkit.model import Strategy
from ckptkit.storage.base.disk import refusals

DEFAULT_TIMEOUT = 600.0


class Ranks(ABC):
    """All ranks of a job, as one of them meets the others; every rank makes the same calls in the
    same order.

    A rank that does not come within the time-out is a PeerError on the others, never a hang. Once
    a rank has left, every call on every rank raises: they meet until the first failure.

    What is said are the plain values that a checkpoint may hold (`ckptkit.format.encoding`), so no
    rank can make another one run code.
    """

    rank: int
    world_size: int
    failure = "there is no new step"
    """What it means that a rank has failed."""
    _told: Failure | None = None
    """The first failure, once this rank knows of one: there is nothing more to meet for."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    def share(self, answer: Callable[[], Any]) -> Any:
        """Rank 0's answer, on every rank; only rank 0 works it out."""
        self._check_together()
        return unpack(self._tell(dumps(answer()) if self.rank == 0 else b""), "rank 0")

    def collect(self, value: object) -> list[Any]:
        """What all ranks have to say, in their order, on rank 0; nothing on the others."""
        self._check_together()
        heard = self._meet(dumps(value))
        return [unpack(data, f"rank {rank}") for rank, data in enumerate(heard)]

    def agree(self, mine: object, conclude: Callable[[list[Any]], Any]) -> Any:
        """What rank 0 concludes of what all ranks have to say."""
        heard = self.collect(mine)
        return self.share(lambda: conclude(heard))

    def wait(self) -> None:
        """Return when all ranks are here."""
        self._check_together()
        self._meet(None)

    def _check_together(self) -> None:
        # What a rank said after it has left, others would take for what they wait for.
        if self._told is not None:
            raise self._told.error(self.failure, PeerError)

    @abstractmethod
    def leave(self, problem: BaseException | str) -> Failure:
        """Tell the others that this rank has failed, without waiting for them; never raises.

        Gives what is known of the first failure.
        """

    def settle(self) -> None:  # noqa: B027 — most cannot be ended by another thread
        """From here on nothing but rank 0's word counts: it is too late to cancel."""

    def forget(self) -> None:  # noqa: B027 — most leave nothing behind
        """Remove what was said, once no rank can ask for it any more."""

    def end(self) -> None:  # noqa: B027 — most leave nothing behind
        """Ask for nothing any more: the last rank that says so removes what was said."""

    @abstractmethod
    def _tell(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""

    @abstractmethod
    def _meet(self, data: bytes | None) -> list[bytes]:
        """Return when all ranks are here: on rank 0 with their bytes in order, unless there are
        none, on the others with nothing.
        """


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank has left, as the others are told of it."""

    rank: int
    kind: str
    """The type of the error; nothing where there was none."""
    what: str
    where: str = ""
    value: str = ""
    hint: str = ""

    @classmethod
    def of(cls, rank: int, problem: BaseException | str) -> Failure:
        kind = "" if isinstance(problem, str) else type(problem).__name__
        if not isinstance(problem, CkptkitError):
            return cls(rank, kind, str(problem))
        return cls(rank, kind, problem.what, problem.where, problem.value, problem.hint)

    @classmethod
    def heard(cls, data: bytes) -> Failure:
        """What `said` has made."""
        return cls(*unpack(data, "another rank"))

    def said(self) -> bytes:
        rank, *texts = astuple(self)
        # Names of files need not be Unicode, and what cannot be said keeps the others waiting.
        return dumps([rank, *(text.encode(errors="backslashreplace").decode() for text in texts)])

    @property
    def error_type(self) -> type[CkptkitError]:
        """The type that the error has there, if one of it can be made of what is said alone."""
        unseen: list[type[CkptkitError]] = [CkptkitError]
        while unseen:
            kind = unseen.pop()
            unseen += kind.__subclasses__()
            is_ours = kind.__name__ == self.kind and kind.__module__.startswith("ckptkit.")
            if is_ours and kind.__init__ is CkptkitError.__init__:
                return kind
        return GivenUpError

    def __str__(self) -> str:
        return f"rank {self.rank}: {f'{self.kind}: ' if self.kind else ''}{self.what}"

    def error(self, meaning: str, kind: type[CkptkitError] = GivenUpError) -> CkptkitError:
        """What the other ranks raise: what it means for them, and all that is known of it."""
        error = kind(f"{meaning}, because of {self}", where=self.where, hint=self.hint)
        error.value, error.has_value = self.value, bool(self.value)
        return error


@contextmanager
def failing_together(ranks: Ranks) -> Iterator[None]:
    """Tell the others what goes wrong here, so that they do not wait for this rank. What another
    one told first is raised as an error of the type that it has there: all ranks go on alike.
    """
    try:
        yield
    except Exception as error:
        first = ranks.leave(error)
        kind = first.error_type
        if first.rank == ranks.rank or type(error) is kind:
            raise
        # The other may have given up because of this very error. One of ours may be what a job goes
        # on after, which all ranks have to.
        if first.kind == GivenUpError.__name__ and not isinstance(error, CkptkitError):
            raise
        raise first.error(ranks.failure, kind) from error
    except BaseException as error:
        ranks.leave(error)
        raise


def in_one_line(error: BaseException) -> str:
    """An error in a log."""
    return f"{type(error).__name__}: {error}".replace("\n", "; ")


class OneRank(Ranks):
    """A job of a single rank."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._cancelled = ""

    def cancel(self, problem: str) -> None:
        """Let the next call raise that has to meet the others."""
        self._cancelled = problem

    def leave(self, problem: BaseException | str) -> Failure:
        return Failure.of(0, problem)

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


class _Barrier(Ranks):
    """Ranks that leave each other notes where all of them look, until the first failure.

    Rank 0 looks for one note of each rank, the others for one of rank 0: nothing grows with ranks
    squared.
    """

    def __init__(self, rank: int, world_size: int, notes: _Notes, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self._notes = notes
        self._timeout = timeout
        self._round = 0
        self._said: list[str] = []

    def leave(self, problem: BaseException | str) -> Failure:
        return self._relay(Failure.of(self.rank, problem))

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
        for name in self._said:
            if not name.startswith(current):
                self._notes.pop(name, None)
        self._said = [name for name in self._said if name.startswith(current)]
        self._round += 1
        if self.rank > 0 or data is None:
            return []
        return [data, *(heard[rank] for rank in range(1, self.world_size))]

    def _relay(self, failure: Failure) -> Failure:
        """Say why there will be no step: always the first that this rank knows of."""
        self._told = self._told or failure
        with suppress(OSError):
            self._notes[f"left-{self.rank}"] = self._told.said()
        return self._told

    def _say(self, what: str, data: bytes) -> None:
        name = f"{self._round}-{what}-{self.rank}"
        self._notes[name] = data
        self._said.append(name)

    def _hear(self, what: str, ranks: set[int]) -> dict[int, bytes]:
        """What each of some ranks says in this round."""
        heard: dict[int, bytes] = {}
        deadline = time.monotonic() + self._timeout
        pause = 0.001
        while len(heard) < len(ranks):
            names = set(self._notes)
            gone = sorted(rank for rank in ranks if f"left-{rank}" in names)
            # Looked for again after the farewells: a rank speaks before it leaves, never after.
            names |= set(self._notes) if gone else set()
            for rank in ranks - heard.keys():
                name = f"{self._round}-{what}-{rank}"
                if name in names:
                    heard[rank] = self._notes[name]
            missing = sorted(ranks - heard.keys())
            for rank in gone:
                if rank in missing:
                    failure = self._relay(Failure.heard(self._notes[f"left-{rank}"]))
                    # Only rank 0 commits: when it has left nothing will ever be committed.
                    raise failure.error(self.failure, PeerError if rank else GivenUpError)
            if missing and time.monotonic() > deadline:
                raise late(f"rank {missing[0]}", self._timeout)
            if missing:
                # Soon where ranks are close together, seldom where one is late and there are many:
                # hundreds may list this folder, over a network.
                time.sleep(pause)
                pause = min(pause * 1.5, 0.005 * self.world_size, 0.05)
        return heard


class ThreadBarrier(_Barrier):
    """Ranks that are threads of one process: `ThreadBarrier.group(4)` makes one for each."""

    @classmethod
    def group(cls, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> list[ThreadBarrier]:
        """One barrier for each rank."""
        notes: dict[str, bytes] = {}
        return [cls(rank, world_size, notes, timeout) for rank in range(world_size)]


class FileBarrier(_Barrier):
    """Ranks that are processes which see one folder. It must be empty at the start, and serves one
    job, for as many saves as it likes, until the first failure.

    Meant for up to some hundred ranks; a job has faster ways to meet.
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
        path = Path(folder)
        with refusals(str(path)):
            path.mkdir(parents=True, exist_ok=True)
        super().__init__(rank, world_size, _Folder(path), timeout)
        # Only this rank writes such names, so what is there is of an earlier job or barrier.
        if any(path.glob(f"*-{rank}")):
            raise UsageError(
                f"rank {rank} has met others in this folder before",
                where=str(path),
                hint="give every job, and every restart of it, an empty folder; "
                "one FileBarrier serves all saves of a job",
            )


@dataclass(frozen=True, slots=True)
class _Folder:
    """Notes that are small files, where threads share a dictionary."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        return (file.name for file in self.path.iterdir())

    def __getitem__(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def __setitem__(self, name: str, data: bytes) -> None:
        temporary = self.path / f".{name}"
        # Made, never opened: where many may write, a link may lie in wait at its name.
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(self.path / name)

    def pop(self, name: str, default: None) -> None:  # noqa: ARG002 — as of a dictionary
        (self.path / name).unlink(missing_ok=True)


_Notes: TypeAlias = dict[str, bytes] | _Folder


def late(who: str, timeout: float) -> PeerError:
    """The error where ranks did not come in time."""
    return PeerError(
        f"{who} did not come within {timeout:g} s",
        hint="look at the log of the rank that is missing; `ckpt ls RUN` shows what is committed",
    )
