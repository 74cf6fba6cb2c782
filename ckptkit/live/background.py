"""One thing at a time, done in a background thread, whose failure is never lost."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 — what it registers has to come last
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

log = logging.getLogger("ckptkit.live")

# Enough for the training to win where both want the processor, not enough to starve the save.
_NICER = 5

_unsettled: WeakSet[Background] = WeakSet()


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

    def settle(self) -> None:
        """Return when nothing runs; what went wrong is still raised by `wait`."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Return when nothing runs; raises the error of what ran."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def _give_way() -> None:
    """Let the training have the processor first; the threads that this one starts inherit it."""
    if sys.platform == "linux":  # elsewhere priorities are those of whole processes
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, 0) + _NICER)
