"""What the ranks print, with their numbers before it, and the first failure before its noise."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections.abc import Callable

from ckptkit.parallel.launch.job import said

Show = Callable[[str, str], None]
"""Called with "stdout" or "stderr", and a line."""

PATIENCE = 1.0
"""Seconds after which a traceback is shown that its rank has outlived."""
GRACE = 5.0
"""Seconds that a rank may take to end once it has failed: an older traceback is not why it ends."""

_TRACEBACK = "Traceback (most recent call last):"
_OF_TORCH = re.compile(r"^\[rank\d+\]: ?")  # torch's own prefix, once it knows the rank


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
        """A line of a rank."""
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

    def ended(self, rank: int, code: int) -> None:
        """A rank has ended so."""
        with self._lock:
            self._ended.setdefault(rank, (time.monotonic(), code))
            if code == 0:
                self._release(rank)
                self._since.pop(rank, None)

    def has_failure(self) -> bool:
        """Whether a rank has failed."""
        with self._lock:
            return any(code for _, code in self._ended.values())

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
            self._show("stderr", f"{said(*first)}, before any other rank failed:")
            self._release(first[0])

    def finish(self, *, interrupted: bool = False) -> None:
        """Show what is left; what an interruption made the ranks say is of no interest."""
        with self._lock:
            for rank in sorted(self._held, key=self._since.__getitem__):
                if not (interrupted and self._held[rank][-1].startswith("KeyboardInterrupt")):
                    self._release(rank)
            self._held.clear()

    def note(self, text: str) -> None:
        """A line of no rank."""
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
