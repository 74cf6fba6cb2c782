"""How the ranks of a job meet without a collective: over the store that torch.distributed began
with, so that a background thread can do it while the training communicates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from ckptkit.checkpoint.barrier import DEFAULT_TIMEOUT, Barrier, SoloBarrier
from ckptkit.errors import CkptkitError, GivenUpError, PeerError
from ckptkit.live.saying import in_one_line
from ckptkit.live.world import World

_DONE, _FAILED = "+", "-"
_LONGEST_PAUSE = 0.25
_SHORTEST_PAUSE = 0.0005
_PAUSE_PER_RANK = 0.000005  # thousands of ranks must not keep the store from answering
_SHARE_OF_WAIT = 0.1  # what looking seldom adds to a wait


class StoreBarrier:
    """A barrier over a `torch.distributed` store; every save takes a name of its own.

    Each meeting has one key, and whoever sets it first decides for all how it ended: nobody can
    see a success that another rank saw fail.
    """

    def __init__(
        self,
        world: World,
        name: str,
        timeout: float = DEFAULT_TIMEOUT,
        failure: str = "there is no new step",
    ) -> None:
        assert world.store is not None  # noqa: S101 — only `barrier_of` makes one
        self.rank = world.rank
        self.world_size = world.size
        self._store: Store = PrefixStore(f"ckptkit/{name}", world.store)
        self._timeout = timeout
        self._failure = failure
        self._shares = 0
        self._meetings = 0
        self._cancelled = ""
        self._told = ""

    def share(self, value: str) -> str:
        """Rank 0's value; only rank 0 decides how this ends."""
        key = f"share/{self._shares}"
        self._shares += 1
        if self.rank == 0:
            self._set(key, _DONE + value)
            return value
        return self._outcome(key, lambda: self._late("rank 0"))

    def wait(self) -> None:
        """Meet the other ranks."""
        number = self._meetings
        self._meetings += 1
        key = f"meeting/{number}"
        self._set(f"{key}/{self.rank}", "")
        if self._cancelled:
            self._decide(key, self._cancelled)
        elif self._count(f"{key}/count") == self.world_size:
            self._decide(key, _DONE)
        self._outcome(key, lambda: self._give_up_waiting(key))

    def collect(self, data: bytes) -> list[bytes]:
        """The data of all ranks, in their order, on rank 0; on the others their own."""
        key = f"collected/{self._meetings}"
        with _reachable():
            self._store.set(f"{key}/{self.rank}", data)  # type: ignore[arg-type] # bytes do
        self.wait()
        if self.rank != 0:
            return [data]
        with _reachable():
            return [bytes(self._store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def leave(self, problem: str) -> None:
        """Decide the next meeting, and where this is rank 0 what it would share next."""
        verdict = _FAILED + (self._told or f"rank {self.rank}: {problem}")
        try:
            # Of several ranks that fail at once the first is heard, by the others of them too.
            verdict = self._decide(f"meeting/{self._meetings}", verdict)
            if self.rank == 0:
                self._decide(f"share/{self._shares}", verdict)
        except (RuntimeError, PeerError):
            # The store is gone, and with it rank 0: the others notice by themselves.
            pass
        self._told = self._told or verdict[1:]

    def as_told(self, error: Exception) -> Exception:
        """What to raise for an error of this rank, or one that it heard of: all ranks raise an
        error of the type that the first one has which failed, as they all go on from there.
        """
        rank, _, said = self._told.partition(": ")
        if rank in ("", f"rank {self.rank}"):
            return error
        kind = _kinds().get(said.partition(":")[0], GivenUpError)
        if type(error) is kind:
            return error
        return kind(f"{self._failure}, because of {self._told}")

    def cancel(self, problem: str) -> None:
        """From another thread: end the meeting that this rank waits for, or the next one. What
        rank 0 says is not waited for any longer either, although it may still say it.
        """
        self._cancelled = f"{_FAILED}rank {self.rank}: {problem}"

    def forget(self) -> None:
        """Remove what this barrier left in the store, once no rank can look at it any more."""
        for number in range(self._shares):
            self._store.delete_key(f"share/{number}")
        for number in range(self._meetings):
            for rank in range(self.world_size):
                self._store.delete_key(f"meeting/{number}/{rank}")
                self._store.delete_key(f"collected/{number}/{rank}")
            for key in (f"meeting/{number}", f"meeting/{number}/count"):
                self._store.delete_key(key)

    def _give_up_waiting(self, key: str) -> PeerError | None:
        ranks = range(self.world_size)
        missing = [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]
        who = ", ".join(f"rank {rank}" for rank in missing[:8]) or "another rank"
        problem = self._late(who)
        verdict = self._decide(key, f"{_FAILED}rank {self.rank}: {in_one_line(problem)}")
        return None if verdict == _DONE else problem

    def _outcome(self, key: str, late: Callable[[], PeerError | None]) -> str:
        """What was decided under a key; `late` says what it means that nothing was."""
        started = time.monotonic()
        shortest = _SHORTEST_PAUSE + _PAUSE_PER_RANK * self.world_size
        while not self._has(key):
            waited = time.monotonic() - started
            if self._cancelled:
                if key.startswith("share"):  # rank 0's alone to decide
                    raise GivenUpError(f"{self._failure}, because of {self._cancelled[1:]}")
                self._decide(key, self._cancelled)
                break
            if waited > self._timeout:
                problem = late()
                if problem is not None:
                    self._told = f"rank {self.rank}: {in_one_line(problem)}"
                    raise problem
                break
            time.sleep(min(max(shortest, _SHARE_OF_WAIT * waited), _LONGEST_PAUSE))
        verdict = self._get(key)
        if verdict.startswith(_FAILED):
            # What ends a meeting in failure is seen by rank 0 too, which then never commits.
            self._told = verdict[1:]
            raise GivenUpError(f"{self._failure}, because of {self._told}")
        return verdict[1:]

    def _late(self, who: str) -> PeerError:
        return PeerError(
            f"{who} did not come within {self._timeout:g} s",
            hint="look at the log of the rank that is missing; `ckpt ls RUN` shows what is "
            "committed",
        )

    def _decide(self, key: str, verdict: str) -> str:
        with _reachable():
            return bytes(self._store.compare_set(key, "", verdict)).decode()

    def _set(self, key: str, value: str) -> None:
        with _reachable():
            self._store.set(key, value)

    def _get(self, key: str) -> str:
        with _reachable():
            return bytes(self._store.get(key)).decode()

    def _has(self, key: str) -> bool:
        with _reachable():
            return bool(self._store.check([key]))

    def _count(self, key: str) -> int:
        with _reachable():
            return int(self._store.add(key, 1))


JobBarrier = StoreBarrier | SoloBarrier
"""Where the ranks of a job meet, and what another thread may cancel."""


class _reachable:  # noqa: N801 — reads as a statement
    """Turns a lost store into an error that says what that means."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, dist.DistError):
            raise PeerError(
                "the job's store does not answer: the rank or agent that holds it is gone",
                hint="look at the log of rank 0",
            ) from error


# By process group, the names that this rank has yet to take: a process may be in several jobs, one
# after another, and not with the same others.
_names: WeakKeyDictionary[dist.ProcessGroup, Iterator[str]] = WeakKeyDictionary()


def next_name(world: World, what: str) -> str:
    """A name for one call, the same on all ranks because all make the same calls."""
    group = dist.group.WORLD if world.store is not None else None
    if world.store is None or group is None:
        return what
    if group not in _names:
        # A store may outlive a process group, and what the ranks of that said must not be heard.
        generation = world.store.add(f"ckptkit/generation/{world.rank}", 1)
        _names[group] = (f"{generation}.{number}" for number in count(1))
    return f"{next(_names[group])}-{what}"


@contextmanager
def leaving(barrier: Barrier) -> Iterator[None]:
    """Tell the others what goes wrong here, so that they do not wait for this rank; what one of
    them told is raised as an error of the type that it has there.
    """
    try:
        yield
    except BaseException as error:
        barrier.leave(in_one_line(error))
        if isinstance(error, Exception) and isinstance(barrier, StoreBarrier):
            common = barrier.as_told(error)
            if common is not error:
                raise common from error
        raise


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


def barrier_of(
    world: World, name: str, timeout: float, failure: str = "there is no new step"
) -> JobBarrier:
    """A barrier of all ranks of a job; every rank has to ask for the same name."""
    return StoreBarrier(world, name, timeout, failure) if world.size > 1 else SoloBarrier()
