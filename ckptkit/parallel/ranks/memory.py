"""Ranks that are threads of one process: no sockets, and no two runs that differ."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.ranks.carrier import Carrier, combine
from ckptkit.parallel.ranks.communicator import Communicator
from ckptkit.parallel.ranks.job import of_thread

T = TypeVar("T")

_GRACE = 5.0  # a rank that neither communicates nor ends cannot be told that the others failed


def run_in_memory(
    function: Callable[..., T], *args: Any, world_size: int, timeout: float = 60.0
) -> list[T]:
    """Run `function(communicator, *args)` on so many ranks, threads of this process; what they
    return, by rank.

    The same program gives the same results every time, as far as each rank draws its random
    numbers from a generator of its own: torch's default one belongs to all threads. An exception
    on one rank ends the others in their next call, and comes out of here as it is, with a note
    saying on which rank; `timeout` seconds bound every wait, and the whole.
    """
    if world_size < 1:
        raise UsageError("a job has one rank or more", where="world_size", value=world_size)
    hub, finished = Hub(world_size), threading.Event()
    results: dict[int, T] = {}
    problems: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        communicator = Communicator(MemoryCarrier(hub, rank, world_size, timeout=timeout))
        of_thread.communicator = communicator
        try:
            results[rank] = function(communicator, *args)
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            problems[rank] = error
            hub.fail(f"rank {rank} failed: {type(error).__name__}: {error}")
        finally:
            of_thread.communicator = None
            hub.end()
        if problems or len(results) == world_size:
            finished.set()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    finished.wait(timeout)
    if problems:
        deadline = time.monotonic() + min(timeout, _GRACE)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if problems:
        # The first that a rank raised by itself: the others were ended by that.
        by_rank = sorted(problems, key=lambda rank: (hub.has_ended(problems[rank]), rank))
        problems[by_rank[0]].add_note(f"on rank {by_rank[0]} of {world_size}")
        raise problems[by_rank[0]]
    if late := [thread.name for thread in threads if thread.is_alive()]:
        what = f"{', '.join(late)} still ran after {timeout:g} s"
        hub.fail(what)
        raise PeerError(what, where="run_in_memory")
    return [results[rank] for rank in range(world_size)]


class Hub:
    """Where the threads of one job meet; the first failure ends all meetings of the job.

    Meetings and messages are found by a name, the same on all ranks: that of the group, and which
    meeting of it this is, or who sends what to whom.
    """

    def __init__(self, ranks: int) -> None:
        self._changed = threading.Condition()
        self._failure: PeerError | None = None
        self._running = ranks
        self._meetings: dict[object, dict[int, Any]] = {}
        self._messages: dict[object, deque[torch.Tensor]] = {}
        # By thread: whether it can go on, and what it waits for.
        self._waiting: dict[int, tuple[Callable[[], bool], Callable[[], str]]] = {}

    def meet(self, name: object, rank: int, size: int, value: T, timeout: float) -> list[T]:
        """The values of all ranks, once all have come to a meeting."""

        def missing() -> str:
            ranks = [str(other) for other in range(size) if other not in told]
            return f"rank {', '.join(ranks[:8])} did not come"

        with self._changed:
            told: dict[int, T] = self._meetings.setdefault(name, {})
            told[rank] = value
            if len(told) == size:
                del self._meetings[name]  # those who wait have what they need of it
            self._changed.notify_all()
            self._wait_for(lambda: len(told) == size, timeout, missing)
        return [told[other] for other in range(size)]

    def put(self, name: object, data: torch.Tensor) -> None:
        with self._changed:
            self._messages.setdefault(name, deque()).append(data)
            self._changed.notify_all()

    def take(self, name: object, timeout: float, why: str) -> torch.Tensor:
        """The oldest message that was left."""
        with self._changed:
            left = self._messages.setdefault(name, deque())
            self._wait_for(lambda: bool(left), timeout, lambda: why)
            return left.popleft()

    def fail(self, problem: str) -> None:
        """Wake all ranks with a problem, unless there was one before."""
        with self._changed:
            self._failure = self._failure or PeerError(problem)
            self._changed.notify_all()

    def has_ended(self, error: BaseException) -> bool:
        """Whether an error only says that there was a failure elsewhere."""
        failure = self._failure
        return failure is not None and isinstance(error, PeerError) and error.what == failure.what

    def end(self) -> None:
        """One rank has come to its end: nobody can wait for it any more."""
        with self._changed:
            self._running -= 1
            self._look_for_a_deadlock()

    def _wait_for(self, ready: Callable[[], bool], timeout: float, why: Callable[[], str]) -> None:
        """Wait, with `changed` held, until something is so; `why` says what is missing."""
        deadline = time.monotonic() + timeout
        me = threading.get_ident()
        try:
            while not ready():
                self._waiting[me] = (ready, why)
                self._look_for_a_deadlock()
                if self._failure is not None:
                    raise PeerError(self._failure.what)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise PeerError(f"{why()} within {timeout:g} s")
                self._changed.wait(left)
        finally:
            self._waiting.pop(me, None)

    def _look_for_a_deadlock(self) -> None:
        waiting = list(self._waiting.values())
        if len(waiting) < self._running or not waiting or any(ready() for ready, _ in waiting):
            return
        self.fail(f"no rank can go on: {'; '.join(sorted({why() for _, why in waiting}))}")


class MemoryCarrier:
    """Carries messages between threads, as copies: no rank sees what another one changes later."""

    name = "memory"
    device = torch.device("cpu")

    def __init__(
        self, hub: Hub, rank: int, size: int, *, timeout: float, group: tuple[object, ...] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._hub = hub
        self._group = group
        self._meetings = 0
        self._splits = 0

    def exchange(self, data: bytes) -> list[bytes]:
        return self._meet(data)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """Every rank adds up by itself, in the order of the ranks."""
        total, *others = self._meet(tensor.clone())
        total = total.clone()
        for other in others:
            combine(total, other, op)
        tensor.copy_(total)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        told = self._meet(data.clone() if self.rank == src else None)[src]
        if told is not None:
            data.copy_(told)

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:  # noqa: ARG002 - they come along
        told = self._meet([part.clone() for part in parts])
        return [row[self.rank].clone() for row in told]

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Leave a copy; never waits."""
        self._hub.put((self._group, self.rank, dst, tag), data.clone())

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        why = f"rank {src} sent nothing with tag {tag}"
        data.copy_(self._hub.take((self._group, src, self.rank, tag), self.timeout, why))

    def split(self, ranks: tuple[int, ...]) -> Carrier | None:
        """A group of the same hub, named after who is in it and which one it is."""
        self._splits += 1
        if self.rank not in ranks:
            return None
        group = (*self._group, self._splits, ranks)
        return MemoryCarrier(
            self._hub, ranks.index(self.rank), len(ranks), timeout=self.timeout, group=group
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _meet(self, value: T) -> list[T]:
        self._meetings += 1
        name = (self._group, self._meetings)
        return self._hub.meet(name, self.rank, self.size, value, self.timeout)
