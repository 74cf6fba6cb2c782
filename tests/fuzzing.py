"""Hostile things, one for each number: a program that tries many, and the test that starts it."""

from __future__ import annotations

import faulthandler
import random
import resource
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from ckptkit.errors import CkptkitError

SPARE = 1 << 30
USED = 64 << 20
SECONDS = 10.0


class Hung(BaseException):
    """One of them took too much processor time."""


def hung(number: int, frame: object) -> None:
    raise Hung


def main(
    warm: Callable[[], object], attempt: Callable[[random.Random], object], *, wall: float
) -> int:
    """Try `sys.argv[2]` of them, the first of the number `sys.argv[1]`, after `warm` has loaded
    what all need. Those that end in anything but success or one of ckptkit's errors are printed.
    The process has little memory to spare, of which each uses less, little processor time, and
    `wall` seconds.
    """
    first, count = map(int, sys.argv[1:])
    warnings.simplefilter("error")
    signal.signal(signal.SIGPROF, hung)
    warm()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))
    failures = accepted = 0
    for number in range(first, first + count):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        faulthandler.dump_traceback_later(wall, exit=True)
        most = most_used()
        wrong = ""
        try:
            attempt(random.Random(number))
            accepted += 1
        except CkptkitError:
            pass
        except BaseException:  # noqa: BLE001 — an alarm too
            wrong = traceback.format_exc(limit=-8)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
        if not wrong and (used := most_used() - most) > USED:
            wrong = f"{used} bytes of memory"
        if wrong:
            failures += 1
            print(f"number {number}:\n{wrong}")  # noqa: T201 — a program
        if failures == 5:
            break
    print(f"{accepted} accepted")  # noqa: T201 — as above
    return 1 if failures else 0


def most_used() -> int:
    """The most memory that the process has used at once until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def accepted(module: str, first: int, count: int) -> int:
    """Start such a program, which finds nothing wrong; how many of them were accepted."""
    command = [sys.executable, "-m", module, str(first), str(count)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return int(found.stdout.split()[-2])
