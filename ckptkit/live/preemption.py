"""SIGTERM: the scheduler takes the machine back, and a job has a minute to leave something."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ckptkit.errors import UsageError
from ckptkit.live.state.ranks import World

log = logging.getLogger("ckptkit.live")

MODES = ("finish", "save")
_EXIT_CODE = 128 + signal.SIGTERM


class Preemption:
    """Listens for SIGTERM while it is installed.

    `finish` lets the save under way end and then leaves the process. `save` only notes it: the
    loop asks `should_stop` once in every step, and is told to stop at the same step on all ranks.
    """

    def __init__(self, world: World, name: str, mode: str, finish: Callable[[], None]) -> None:
        if mode not in MODES:
            raise UsageError(f'on_sigterm is "{MODES[0]}" or "{MODES[1]}"', value=mode)
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals reach the main thread only",
                hint="make the Checkpointer there, or leave on_sigterm out",
            )
        store = world.rendezvous
        self._store = None if store is None else PrefixStore(name, store)
        self._mode = mode
        self._finish = finish
        self._requested = False
        self._is_saving = False
        self._frame: FrameType | None = None
        self._announced = False
        self._before: Any = signal.signal(signal.SIGTERM, self._on_signal)

    def should_stop(self, step: int) -> bool:
        """Whether this is the step after which to save and leave, on all ranks alike.

        Ranks may be one step apart, as those that exchange gradients are.
        """
        if self._store is None:
            return self._requested
        if self._requested and not self._announced:
            self._announced = True
            # A step that no rank has asked about yet, whichever is ahead.
            self._store.compare_set("stop", "", str(step + 2))
        if not self._store.check(["stop"]):
            return False
        return step >= int(self._store.get("stop"))

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Note the signal only, and leave at the end: what is done inside is a save."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False
        if self._requested and self._mode == "finish":
            self._leave()

    def remove(self) -> None:
        """Give the signal back to whom it belonged."""
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        self._requested = True
        log.warning("SIGTERM: %s", "saving once more" if self._mode == "save" else "finishing")
        self._frame = frame
        if self._mode == "finish" and not self._is_saving:
            self._leave()

    def _leave(self) -> None:
        self._finish()
        if callable(self._before):
            self._before(signal.SIGTERM, self._frame)
        raise SystemExit(_EXIT_CODE)
