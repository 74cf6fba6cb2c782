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
from weakref import WeakSet

from ckptkit.checkpoint.ranks import in_one_line

log = logging.getLogger("ckptkit.live")

# Enough for the training to win where both want the processor, not enough to starve the save.
_NICER = 5


class Background:
    """Runs pieces of work in a thread, in the order in which their turns were taken, however many
    wait; the error of each is kept by its number, counted from 1, until somebody takes it.

    A process that ends by itself first lets all of them finish.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: deque[_Turn] = deque()
        self._has_thread = False
        self._thread: threading.Thread | None = None
        self._taken = self._done = 0
        self._errors: dict[int, BaseException] = {}

    @property
    def is_running(self) -> bool:
        """Whether work is under way, or waits for its turn."""
        return self._done < self._taken

    def run(self, work: Callable[[], None], what: str) -> None:
        """Take the next turn, and begin as soon as it has come."""
        self.turn(work, what)()

    def turn(self, work: Callable[[], None], what: str) -> Callable[[], None]:
        """Take the next turn; what is returned, and has to be called some time from any thread,
        lets the work begin, which what comes after waits for.
        """
        turn = _Turn(work, what)
        with self._changed:
            self._taken += 1
            self._turns.append(turn)
        _unsettled.add(self)

        def begin() -> None:
            with self._changed:
                turn.may_begin = True
                if not self._has_thread and self._turns and self._turns[0].may_begin:
                    self._has_thread = True
                    # A daemon, which `give_up` can leave behind; otherwise the end of the process
                    # waits for it.
                    name = f"ckptkit {self._turns[0].what}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()

        return begin

    def settle(self, seconds: float | None = None) -> None:
        """Return when all is done, or after so many seconds; errors are still there to be taken."""
        with self._changed:
            self._changed.wait_for(lambda: self._done == self._taken, seconds)

    def end(self) -> None:
        """Return when all is done, and the thread with it: one that still frees tensors while the
        interpreter ends would abort the process.
        """
        self.settle()
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Return when all is done; raises the last error."""
        error = self.take()
        if error is not None:
            raise error

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

    def _run(self) -> None:
        if sys.platform == "linux":  # elsewhere priorities are those of whole processes
            # The training has the processor first; the threads that this one starts inherit it.
            with suppress(OSError):
                thread = threading.get_native_id()
                priority = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
                os.setpriority(os.PRIO_PROCESS, thread, priority)
        while True:
            with self._changed:
                if not (self._turns and self._turns[0].may_begin):
                    self._has_thread = False
                    return
                turn = self._turns[0]
            error: BaseException | None = None
            try:
                turn.work()
            except BaseException as problem:  # noqa: BLE001 — handed to whoever takes it
                error = problem
                # At once as well: a job that ends without another call would never say it.
                log.error("%s failed: %s", turn.what, in_one_line(problem))
            with self._changed:
                if not self._turns:
                    self._has_thread = False
                    return  # given up meanwhile
                self._turns.popleft()
                self._done += 1
                if error is not None:
                    self._errors[self._done] = error
                self._changed.notify_all()


@dataclass(slots=True)
class _Turn:
    work: Callable[[], None]
    what: str
    may_begin: bool = False


_unsettled: WeakSet[Background] = WeakSet()


def _settle_all() -> None:
    for background in list(_unsettled):
        background.end()


# Before the thread pools' own end, which was registered earlier, when concurrent.futures was
# loaded: they take no more work after it. A thread that is merely no daemon is joined too late.
threading._register_atexit(_settle_all)  # type: ignore[attr-defined]
