"""Learning at once how processes end that others will reap."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def watch(pid: int, told: Callable[[int], None]) -> None:
    """Call back with the exit code of a child when it ends, without reaping it."""
    if hasattr(os, "waitid"):
        threading.Thread(target=_wait, args=(pid, told), daemon=True).start()


def _wait(pid: int, told: Callable[[int], None]) -> None:
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        return  # reaped already: who did that knows the code
    if found is not None:
        told(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
