"""The signal by which a scheduler takes a machine back: a save that is under way ends before the
process does, or all ranks save once more.
"""

from __future__ import annotations

import logging
import os
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


class Preemption:
    """Listens for SIGTERM, with which a scheduler takes the machine back in a minute.

    `finish` lets the save under way end and then leaves the process. `save` only notes it: the
    loop asks `should_stop` once in every step, and is told to stop at the same step on all ranks.
    """

    def __init__(self, world: World, name: str, mode: str, finish: Callable[[], None]) -> None:
        if mode not in ("finish", "save"):
            raise UsageError('on_sigterm is "finish" or "save"', value=mode)
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals reach the main thread only",
                hint="make the Checkpointer there, or leave on_sigterm out",
            )
        store = world.rendezvous
        self._rendezvous = None if store is None else PrefixStore(name, store)
        self._mode = mode
        self._finish = finish
        self._requested = False
        self._is_saving = False
        self._frame: FrameType | None = None
        self._announced = False
        self._process = os.getpid()
        self._before: Any = signal.signal(signal.SIGTERM, self._on_signal)

    def should_stop(self, step: int) -> bool:
        """Whether this is the step after which to save and leave, on all ranks alike.

        Ranks may be one step apart, as those that exchange gradients are.
        """
        if self._rendezvous is None:
            return self._requested
        if self._requested and not self._announced:
            self._announced = True
            # A step that no rank has asked about yet, whichever is ahead.
            self._rendezvous.compare_set("stop", "", str(step + 2))
        if not self._rendezvous.check(["stop"]):
            return False
        return step >= int(self._rendezvous.get("stop"))

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
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A copy of the process, as workers are: whoever ends it waits until it has ended.
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)
            return
        self._requested = True
        log.warning("SIGTERM: %s", "saving once more" if self._mode == "save" else "finishing")
        self._frame = frame
        if self._mode == "finish" and not self._is_saving:
            self._leave()

    def _leave(self) -> None:
        self._finish()
        if callable(self._before):
            self._before(signal.SIGTERM, self._frame)
        raise SystemExit(128 + signal.SIGTERM)
