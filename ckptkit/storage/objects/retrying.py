"""Trying again what a server could not do just then, until it can or the time is up."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from ckptkit.errors import StorageError
from ckptkit.storage.objects.client import Transient

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 15.0

_log = logging.getLogger("ckptkit.storage")


class Retrying:
    """Calls again after pauses that double, with jitter so that ranks do not come back together.

    No attempt begins once `deadline` seconds have passed. Every repetition is logged.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __call__(self, operation: str, where: str, do: Callable[[int], T]) -> T:
        """What `do` returns; it is told the number of its attempt, from 1."""
        began = time.monotonic()
        attempt = 1
        while True:
            try:
                return do(attempt)
            except Transient as transient:
                reason, longest = transient.reason, min(transient.within, self._deadline)
            pause = _pause(attempt)
            spent = time.monotonic() - began
            if spent + pause > longest:
                raise _given_up(operation, where, reason, attempt, spent)
            _log.warning(
                "%s of %s failed (%s); attempt %d in %.1f s",
                operation, where, reason, attempt + 1, pause,
            )  # fmt: skip
            time.sleep(pause)
            attempt += 1


def _pause(attempt: int) -> float:
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt, 30))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 — no secret


def _given_up(operation: str, where: str, reason: str, attempts: int, spent: float) -> StorageError:
    times = "once" if attempts == 1 else f"{attempts} times in {spent:.1f} s"
    return StorageError(
        f"{operation} failed: {reason} (tried {times})",
        where=where,
        hint="check the endpoint and the network (over a slow line less concurrency helps); "
        "the option deadline says how long to try",
    )
