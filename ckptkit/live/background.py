"""Work that is done in a background thread, and whose failure is never lost."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 — what it registers has to come last
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

from ckptkit.checkpoint.ranks import in_one_line

log = logging.getLogger("ckptkit.live")

# Enough for the training to win where both want the processor, not enough to starve the save.
_NICER = 5


class _Settling(Protocol):
    def settle(self) -> None: ...


_unsettled: WeakSet[_Settling] = WeakSet()


def _settle_all() -> None:
    for background in list(_unsettled):
        background.settle()


# Called before the pools' own, which were registered earlier, when concurrent.futures was loaded.
threading._register_atexit(_settle_all)  # type: ignore[attr-defined]


class Background:
    """Runs one piece of work in a thread; `wait` raises what it raised, once."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether work is under way."""
        return self._thread is not None and self._thread.is_alive()

    def run(self, work: Callable[[], None], name: str) -> None:
        """Begin work; what ran before has to be waited for first."""

        def run() -> None:
            _give_way()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 — handed to whoever waits
                self._error = error
                # At once as well: a job that ends without another call would never say it.
                log.error("saving %s failed: %s", name, error)

        # A process that ends by itself first lets its checkpoint finish. A thread that is merely
        # no daemon would come too late: thread pools refuse work before such threads are joined.
        _unsettled.add(self)
        self._thread = threading.Thread(target=run, name=f"ckptkit {name}")
        self._thread.start()

    def settle(self, seconds: float | None = None) -> None:
        """Return when nothing runs, or after so many seconds; what went wrong is still raised by
        `wait`.
        """
        if self._thread is not None:
            self._thread.join(seconds)

    def wait(self) -> None:
        """Return when nothing runs; raises the error of what ran."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


class Rounds:
    """Runs pieces of work in a thread, in the order in which their turns were taken, however many
    wait; the error of each is kept by its number, counted from 1, until somebody takes it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._turns: deque[_Turn] = deque()
        self._is_running = False
        self._taken = self._done = 0
        self._errors: dict[int, BaseException] = {}

    def turn(self, work: Callable[[], None]) -> Callable[[], None]:
        """Take the next turn; what is returned, and has to be called some time from any thread,
        lets the work begin, which what comes after waits for.
        """
        turn = _Turn(work)
        with self._changed:
            self._taken += 1
            self._turns.append(turn)
        _unsettled.add(self)

        def begin() -> None:
            with self._changed:
                turn.may_begin = True
                self._go_on()

        return begin

    def settle(self) -> None:
        """Return when all is done; errors are still there to be taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._done == self._taken)

    def newest_failure(self) -> tuple[int, BaseException] | None:
        """The number and the error of the last piece of work that failed, as far as it is known."""
        with self._changed:
            number = max(self._errors, default=0)
            return (number, self._errors[number]) if number else None

    def take(self, number: int | None = None) -> BaseException | None:
        """Wait until this many are done, or all; the last error among these, all of which are
        forgotten.
        """
        with self._changed:
            wanted = self._taken if number is None else number
            self._changed.wait_for(lambda: self._done >= wanted)
            taken = [self._errors.pop(each) for each in sorted(self._errors) if each <= wanted]
            return taken[-1] if taken else None

    def give_up(self) -> None:
        """Begin nothing more, and let nobody wait for what runs."""
        with self._changed:
            self._turns.clear()
            self._errors.clear()
            self._done = self._taken
            self._changed.notify_all()
        _unsettled.discard(self)

    def _go_on(self) -> None:
        if self._is_running or not (self._turns and self._turns[0].may_begin):
            return
        self._is_running = True
        # A daemon, which `give_up` can leave behind; otherwise the end of the process waits for it.
        threading.Thread(target=self._run, name=f"ckptkit {self._name}", daemon=True).start()

    def _run(self) -> None:
        _give_way()
        while True:
            with self._changed:
                if not (self._turns and self._turns[0].may_begin):
                    self._is_running = False
                    return
                turn = self._turns[0]
            error: BaseException | None = None
            try:
                turn.work()
            except BaseException as problem:  # noqa: BLE001 — handed to whoever takes it
                error = problem
                # At once as well: a job that ends without another call would never say it.
                log.error("the %s failed: %s", self._name, in_one_line(problem))
            with self._changed:
                if not self._turns:
                    self._is_running = False
                    return  # given up meanwhile
                self._turns.popleft()
                self._done += 1
                if error is not None:
                    self._errors[self._done] = error
                self._changed.notify_all()


@dataclass(slots=True)
class _Turn:
    work: Callable[[], None]
    may_begin: bool = False


def _give_way() -> None:
    """Let the training have the processor first; the threads that this one starts inherit it."""
    if sys.platform == "linux":  # elsewhere priorities are those of whole processes
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
