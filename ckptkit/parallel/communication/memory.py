"""A transport between the threads of one process: no sockets, and no two runs that differ."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ckptkit.errors import PeerError
from ckptkit.parallel.communication.transport import Transport
from ckptkit.parallel.communication.values import combine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting:
    ready: Callable[[], bool]
    why: Callable[[], str]


class Hub:
    """Where the threads of one job meet; the first failure ends all meetings of the job."""

    def __init__(self, ranks: int) -> None:
        self.changed = threading.Condition()
        self._failure: PeerError | None = None
        self._groups: dict[object, Group] = {}
        self._running = ranks
        self._waiting: dict[int, _Waiting] = {}

    def fail(self, problem: str) -> None:
        """Wake all ranks with a problem, unless there was one before."""
        with self.changed:
            self._failure = self._failure or PeerError(problem)
            self.changed.notify_all()

    def end(self) -> None:
        """One rank has come to its end: nobody can wait for it any more."""
        with self.changed:
            self._running -= 1
            self._look_for_a_deadlock()

    def is_behind(self, error: BaseException) -> bool:
        """Whether an error only says that there was a failure elsewhere."""
        failure = self._failure
        return failure is not None and isinstance(error, PeerError) and error.what == failure.what

    def group(self, name: object, size: int) -> Group:
        """The group of a name, the same object on all of its ranks."""
        with self.changed:
            return self._groups.setdefault(name, Group(self, size))

    def wait_for(self, ready: Callable[[], bool], timeout: float, why: Callable[[], str]) -> None:
        """Wait, with `changed` held, until something is so; `why` says what is missing."""
        deadline = time.monotonic() + timeout
        me = threading.get_ident()
        while not ready():
            if self._failure is None:
                self._waiting[me] = _Waiting(ready, why)
                self._look_for_a_deadlock()
            if self._failure is not None:
                self._waiting.pop(me, None)
                raise PeerError(self._failure.what)
            left = deadline - time.monotonic()
            if left <= 0:
                del self._waiting[me]
                raise PeerError(f"{why()} within {timeout:g} s")
            self.changed.wait(left)
        self._waiting.pop(me, None)

    def _look_for_a_deadlock(self) -> None:
        waiting = list(self._waiting.values())
        if len(waiting) < self._running or not waiting or any(one.ready() for one in waiting):
            return
        told = "; ".join(sorted({one.why() for one in waiting}))
        self.fail(f"no rank can go on: {told}")


class Group:
    """The meetings and messages of some ranks."""

    def __init__(self, hub: Hub, size: int) -> None:
        self.hub = hub
        self.size = size
        self._meetings: dict[int, dict[int, object]] = {}
        self._left: dict[int, int] = {}
        self._messages: dict[tuple[int, int, int], deque[torch.Tensor]] = {}

    def meet(self, rank: int, number: int, value: T, timeout: float) -> list[T]:
        """The values of all ranks, once all have come to a meeting."""
        with self.hub.changed:
            told = self._meetings.setdefault(number, {})
            told[rank] = value
            self.hub.changed.notify_all()
            self.hub.wait_for(
                lambda: len(told) == self.size,
                timeout,
                lambda: f"{self._missing(told)} did not come",
            )
            self._left[number] = self._left.get(number, 0) + 1
            if self._left[number] == self.size:
                del self._meetings[number], self._left[number]
        return [told[other] for other in range(self.size)]  # type: ignore[misc] # all of one call

    def put(self, src: int, dst: int, tag: int, data: torch.Tensor) -> None:
        """Leave a message."""
        with self.hub.changed:
            self._messages.setdefault((src, dst, tag), deque()).append(data)
            self.hub.changed.notify_all()

    def take(self, src: int, dst: int, tag: int, timeout: float) -> torch.Tensor:
        """The oldest message that was left."""
        with self.hub.changed:
            waiting = self._messages.setdefault((src, dst, tag), deque())
            self.hub.wait_for(
                lambda: bool(waiting), timeout, lambda: f"rank {src} sent nothing with tag {tag}"
            )
            return waiting.popleft()

    def _missing(self, told: dict[int, object]) -> str:
        ranks = [str(rank) for rank in range(self.size) if rank not in told]
        return f"rank {', '.join(ranks[:8])}"


class MemoryTransport:
    """Carries messages between threads, as copies: no rank sees what another one changes later."""

    name = "memory"
    device = torch.device("cpu")

    def __init__(
        self, hub: Hub, rank: int, size: int, *, timeout: float, name: tuple[object, ...] = ()
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._name = name
        self._group = hub.group(name, size)
        self._meetings = 0
        self._splits = 0

    def exchange(self, data: bytes) -> list[bytes]:
        """One meeting."""
        return self._meet(data)

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        """One meeting; every rank adds up by itself, in the order of the ranks."""
        total, *others = self._meet(tensor.clone())
        total = total.clone()
        for other in others:
            combine(total, other, op)
        tensor.copy_(total)

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """One meeting, to which the others bring nothing."""
        told = self._meet(data.clone() if self.rank == src else None)[src]
        if told is not None:
            data.copy_(told)

    def all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:  # noqa: ARG002 - they come along
        """One meeting."""
        told = self._meet([part.clone() for part in parts])
        return [row[self.rank].clone() for row in told]

    def send(self, data: torch.Tensor, dst: int, tag: int) -> None:
        """Leave a copy; never waits."""
        self._group.put(self.rank, dst, tag, data.clone())

    def recv(self, data: torch.Tensor, src: int, tag: int) -> None:
        """Wait for it."""
        data.copy_(self._group.take(src, self.rank, tag, self.timeout))

    def split(self, ranks: tuple[int, ...]) -> Transport | None:
        """A group of the same hub, named after who is in it and which one it is."""
        self._splits += 1
        if self.rank not in ranks:
            return None
        name = (*self._name, self._splits, ranks)
        return MemoryTransport(
            self._group.hub, ranks.index(self.rank), len(ranks), timeout=self.timeout, name=name
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _meet(self, value: T) -> list[T]:
        self._meetings += 1
        return self._group.meet(self.rank, self._meetings, value, self.timeout)
