"""What the ranks of a job print, and how it ended."""

from __future__ import annotations

import fcntl
import math
import os
import re
import selectors
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

Show = Callable[[str, str], None]
"""Called with "stdout" or "stderr", and a line."""

PATIENCE = 1.0
"""Seconds after which a traceback is shown that its rank has outlived."""
GRACE = 5.0
"""Seconds that a rank may take to end once it has failed: an older traceback is not why it ends."""

_TRACEBACK = "Traceback (most recent call last):"
_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")  # torch's own prefix, once it knows the rank
_LONGEST = 2**20  # of a line that never ends
_AT_ONCE = 65536  # bytes
_TURN = 0.05
_LAST_LINES = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    ok: bool
    restarts: int = 0
    failed_rank: int | None = None
    """The one that failed first."""
    exit_code: int | None = None
    """That rank's; minus the number of the signal that ended it, as Python has it."""

    @property
    def reason(self) -> str:
        """Which rank failed, and how, in a few words."""
        if self.ok:
            return "all ranks ended well"
        who = "a rank" if self.failed_rank is None else f"rank {self.failed_rank}"
        code = self.exit_code
        if code is None:
            return f"{who} failed"
        if code >= 0:
            return f"{who} ended with exit code {code}"
        try:
            return f"{who} was ended by signal {-code} ({signal.Signals(-code).name})"
        except ValueError:
            return f"{who} was ended by signal {-code}"


class Output:
    """Shows lines as they come, but keeps tracebacks until it is known who failed first.

    One failure makes the other ranks fail too, and their tracebacks, in any order, hide the one
    that matters. A traceback of a rank that goes on is shown a little later.
    """

    def __init__(self, show: Show) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._held: dict[int, list[str]] = {}
        self._ended: dict[int, tuple[float, int]] = {}
        self._since: dict[int, float] = {}
        """By rank, when its last traceback began."""
        self._told = False

    def line(self, rank: int, stream: str, text: str) -> None:
        """Show a line of a rank, or keep it where it belongs to a traceback."""
        with self._lock:
            if stream == "stderr":
                text = _OF_TORCH.sub("", text)
                if rank not in self._held and _TRACEBACK in text:
                    self._held[rank] = []
                    self._since[rank] = time.monotonic()
                if rank in self._held:
                    self._held[rank].append(text)
                    return
            elif rank not in self._held:
                # It was shown, and the rank goes on: on stderr it may be what its end says.
                self._since.pop(rank, None)
            self._show(stream, f"[rank {rank}] {text}")

    def ended(self, rank: int, code: int, at: float | None = None) -> None:
        """Note when a rank ended (None: now), with its exit code; what was noted first stays."""
        with self._lock:
            self._ended.setdefault(rank, (time.monotonic() if at is None else at, code))
            if code == 0:
                self._release(rank)
                self._since.pop(rank, None)

    def tick(self) -> None:
        """Show tracebacks that their ranks have outlived."""
        with self._lock:
            late = time.monotonic() - PATIENCE
            for rank in [r for r in self._held if self._since[r] < late]:
                if rank not in self._ended:
                    self._release(rank)

    def first_failure(self) -> tuple[int, int | None] | None:
        """The rank that failed first, by its traceback if there is one, else by its end; and how it
        ended, None where that is not what it failed of.
        """
        with self._lock:
            times = {rank: at for rank, (at, code) in self._ended.items() if code}
            if not times:
                return None
            first = min(times.values())
            for rank, since in self._since.items():
                if times.get(rank, first) - since <= GRACE:
                    times[rank] = since
            rank = min(times, key=lambda r: (times[r], r))
            at, code = self._ended.get(rank, (math.inf, None))
            if at > first and code == -signal.SIGTERM:
                # It was slow to die of what its traceback says, and was made to end with the rest.
                code = None
            return rank, code

    def tell(self) -> None:
        """Show the first failure, once; the tracebacks of the others come with `finish`."""
        first = self.first_failure()
        with self._lock:
            if first is None or self._told:
                return
            self._told = True
            reason = Outcome(ok=False, failed_rank=first[0], exit_code=first[1]).reason
            self._show("stderr", f"{reason}, before any other rank failed:")
            self._release(first[0])

    def finish(self, *, interrupted: bool = False) -> None:
        """Show what is left; what an interruption made the ranks say is of no interest."""
        with self._lock:
            for rank in sorted(self._held, key=self._since.__getitem__):
                if not (interrupted and self._held[rank][-1].startswith("KeyboardInterrupt")):
                    self._release(rank)
            self._held.clear()

    def note(self, text: str) -> None:
        """Show a line that is of no rank."""
        with self._lock:
            self._show("stderr", text)

    def start_again(self) -> None:
        """Forget how the ranks ended: they are started anew."""
        self.finish()
        with self._lock:
            self._ended.clear()
            self._since.clear()
            self._told = False

    def _release(self, rank: int) -> None:
        for text in self._held.pop(rank, []):
            self._show("stderr", f"[rank {rank}] {text}")


class Streams:
    """One thread that reads all pipes and hands over their lines.

    When a line cannot be handed over, the rest is read and dropped, so that nobody waits to print.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._ending = threading.Event()
        self._problem: Exception | None = None
        self._rest: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._run, name="ckptkit-streams", daemon=True)
        self._thread.start()

    def add(self, fd: int, take: Callable[[str], None]) -> None:
        """Read a pipe, which is closed here when it ends."""
        with self._lock:
            self._rest[fd] = b""
            self._selector.register(fd, selectors.EVENT_READ, take)

    def drain(self) -> None:
        """Wait until all that was printed so far has been handed over; not for ever, as a rank may
        print without end.
        """
        for _ in range(2):  # the first turn may have begun before
            self._idle.clear()
            self._idle.wait(_LAST_LINES)

    def check(self) -> None:
        """Raise what went wrong with a line, if anything did."""
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Hand over all there is, however long that takes whoever reads it, and stop reading;
        raises what went wrong.
        """
        self._ending.set()
        self._thread.join()
        with self._lock:
            for key in list(self._selector.get_map().values()):
                # Not to its end: what a rank has left behind may print for ever.
                left = _waiting(key.fd)
                while left > 0 and (count := self._read(key, min(left, _AT_ONCE))):
                    left -= count
                self._end(key)
            self._selector.close()
        self.check()

    def _run(self) -> None:
        ready = True
        while not self._ending.wait(0 if ready else _TURN):
            with self._lock:
                found = self._selector.select(0) if self._selector.get_map() else []
                for key, _ in found:
                    with suppress(BlockingIOError):
                        if not self._read(key, _AT_ONCE):
                            self._end(key)
            ready = bool(found)
            if not ready:
                self._idle.set()

    def _read(self, key: selectors.SelectorKey, most: int) -> int:
        """Hand over the lines of one read; returns how many bytes came, none at the end."""
        data = os.read(key.fd, most)
        *lines, rest = (self._rest[key.fd] + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._rest[key.fd] = rest
        for line in lines:
            self._hand_over(key, line)
        return len(data)

    def _end(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)
        rest = self._rest.pop(key.fd)
        os.close(key.fd)
        if rest:
            self._hand_over(key, rest)

    def _hand_over(self, key: selectors.SelectorKey, line: bytes) -> None:
        if self._problem is None:
            # Of what was drawn over and over, as progress bars are, what it came to.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            try:
                key.data(text)
            except Exception as error:  # noqa: BLE001 - raised by the thread that asks
                self._problem = error


def _waiting(fd: int) -> int:
    """The bytes that are in a pipe, and not read yet."""
    count = bytearray(4)  # a C int
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)
