"""How far each worker is, and who has to wait for whom."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from ckptkit.errors import PeerError

log = logging.getLogger("ckptkit.parallel")


class Clocks:
    """The steps of all workers, as one server counts them; safe for threads.

    A worker that is more than `staleness` steps ahead of the last one waits. One that dies, or
    that keeps others waiting for `timeout` seconds, ends the training for all, or with
    `goes_on` is no longer waited for.
    """

    def __init__(
        self, workers: Iterable[int], staleness: int | None, timeout: float, *, goes_on: bool
    ) -> None:
        self._steps = dict.fromkeys(workers, 0)
        self._active = set(self._steps)
        self._present = set(self._steps)
        self._staleness = staleness
        self._timeout = timeout
        self._goes_on = goes_on
        self._problem = ""
        self._changed = threading.Condition()

    @property
    def steps(self) -> dict[int, int]:
        """By worker, how many gradients have come."""
        with self._changed:
            return dict(self._steps)

    def go_on_from(self, steps: dict[int, int]) -> None:
        """Go on from what was counted before."""
        with self._changed:
            self._steps = dict(steps)

    def tick(self, worker: int) -> None:
        """Count a step, and return when the worker may begin the next one."""
        with self._changed:
            if worker not in self._active:
                self._rejoin(worker)
            self._steps[worker] += 1
            self._changed.notify_all()
            if self._staleness is not None:
                self._wait_for_others(worker, self._staleness)
            self.check()

    def check(self) -> None:
        """Raise if the training has ended for all."""
        if self._problem:
            raise PeerError(self._problem, hint='with on_loss="continue" the others go on')

    def leave(self, worker: int) -> None:
        """A worker has done its last step."""
        with self._changed:
            self._active.discard(worker)
            self._present.discard(worker)
            self._changed.notify_all()

    def lose(self, worker: int) -> None:
        """A worker is gone without a word."""
        with self._changed:
            if worker in self._present:
                self._present.discard(worker)
                self._give_up({worker}, "is gone")

    def wait_until_empty(self) -> None:
        """Return when no worker is left that may still ask, or when none has come for long."""
        with self._changed:
            while self._present and self._changed.wait(self._timeout):
                pass

    def _wait_for_others(self, worker: int, staleness: int) -> None:
        since, seen = time.monotonic(), -1
        while not self._problem:
            slowest = min((self._steps[w] for w in self._active), default=self._steps[worker])
            if self._steps[worker] - slowest <= staleness:
                return
            if slowest > seen:
                since, seen = time.monotonic(), slowest
            left = since + self._timeout - time.monotonic()
            if left <= 0:
                late = {w for w in self._active if self._steps[w] == slowest}
                self._give_up(late, f"did not come within {self._timeout:g} s")
            else:
                self._changed.wait(left)

    def _give_up(self, workers: set[int], why: str) -> None:
        who = ", ".join(f"worker {worker}" for worker in sorted(workers))
        self._active -= workers
        if self._goes_on:
            log.warning("%s %s; the others go on", who, why)
        else:
            self._problem = self._problem or f"{who} {why}"
        self._changed.notify_all()

    def _rejoin(self, worker: int) -> None:
        """One that was given up is back: nobody waits for what it has missed."""
        others = [self._steps[other] for other in self._active]
        self._steps[worker] = max(self._steps[worker], min(others, default=0))
        self._active.add(worker)
        self._present.add(worker)
