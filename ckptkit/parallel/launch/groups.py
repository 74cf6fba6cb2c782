"""Ending processes together with all that they have started."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress


def end_groups(leaders: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to the process groups of these leaders, as far as there still are such."""
    for pid in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


def end_later(leaders: Iterable[int], seconds: float) -> threading.Timer:
    """Kill the groups after a while; cancel it if they end by themselves."""
    timer = threading.Timer(seconds, end_groups, (list(leaders), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    return timer
