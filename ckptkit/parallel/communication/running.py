"""A job whose ranks are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ckptkit.errors import PeerError, UsageError
from ckptkit.parallel.communication.communicator import Communicator
from ckptkit.parallel.communication.current import set_for_thread
from ckptkit.parallel.communication.memory import Hub, MemoryTransport

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
    job = _Job(function, args, world_size, timeout)
    threads = [
        threading.Thread(target=job.rank, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    job.finished.wait(timeout)
    if job.problems:
        deadline = time.monotonic() + min(timeout, _GRACE)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if job.problems:
        raise job.first_problem()
    late = [thread.name for thread in threads if thread.is_alive()]
    if late:
        what = f"{', '.join(late)} still ran after {timeout:g} s"
        job.hub.fail(what)
        raise PeerError(what, where="run_in_memory")
    return [job.results[rank] for rank in range(world_size)]


class _Job:
    """What the ranks have come to so far."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], size: int, timeout: float
    ) -> None:
        self.hub = Hub(size)
        self.results: dict[int, Any] = {}
        self.problems: dict[int, BaseException] = {}
        self.finished = threading.Event()
        self._function = function
        self._args = args
        self._size = size
        self._timeout = timeout

    def rank(self, number: int) -> None:
        """What the thread of a rank does."""
        transport = MemoryTransport(self.hub, number, self._size, timeout=self._timeout)
        communicator = Communicator(transport)
        set_for_thread(communicator)
        try:
            self.results[number] = self._function(communicator, *self._args)
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            self.problems[number] = error
            self.hub.fail(f"rank {number} failed: {type(error).__name__}: {error}")
            self.finished.set()
        finally:
            set_for_thread(None)
            self.hub.end()
        if len(self.results) == self._size:
            self.finished.set()

    def first_problem(self) -> BaseException:
        """What a rank raised by itself; the others were ended by that."""
        problems = dict(sorted(self.problems.items()))
        own = [rank for rank, error in problems.items() if not self.hub.is_behind(error)]
        rank = own[0] if own else next(iter(problems))
        problems[rank].add_note(f"on rank {rank} of {self._size}")
        return problems[rank]
