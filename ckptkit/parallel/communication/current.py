"""The communicator that this code runs under: of its thread, else of its process."""

from __future__ import annotations

import threading

from ckptkit.errors import UsageError
from ckptkit.parallel.communication.communicator import Communicator


class _Of(threading.local):
    thread: Communicator | None = None


_of = _Of()
_of_process: list[Communicator] = []


def current_communicator() -> Communicator:
    """The communicator of this rank: the one that `init` made, or in a thread of `run_in_memory`
    that thread's own.
    """
    found = known()
    if found is None:
        raise UsageError(
            "there is no communicator yet",
            hint="call ckptkit.parallel.init() first, or run this by run_in_memory",
        )
    return found


def known() -> Communicator | None:
    """The same, or None where there is none."""
    return _of.thread or next(iter(_of_process), None)


def is_of_thread() -> bool:
    """Whether this thread is a rank of its own."""
    return _of.thread is not None


def set_for_thread(communicator: Communicator | None) -> None:
    """Say which rank this thread is."""
    _of.thread = communicator


def set_for_process(communicator: Communicator | None) -> None:
    """Say which rank this process is."""
    _of_process[:] = [] if communicator is None else [communicator]
