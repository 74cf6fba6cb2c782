"""Reading what many processes print, line by line, in the order in which it comes."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Callable

_LONGEST = 2**20  # of a line that never ends
_TURN = 0.05


class Streams:
    """One thread that reads all pipes and hands over their lines.

    When a line cannot be handed over, the rest is read and dropped, so that nobody waits to print.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._ending = False
        self._problem: Exception | None = None
        self._rest: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._run, name="ckptkit-streams", daemon=True)
        self._thread.start()

    def add(self, fd: int, take: Callable[[str], None]) -> None:
        """Read a pipe, which is closed here when it ends."""
        with self._lock:
            self._rest[fd] = b""
            self._selector.register(fd, selectors.EVENT_READ, take)

    def drain(self, timeout: float = 2.0) -> None:
        """Wait until all that was printed so far has been handed over."""
        for _ in range(2):  # the first turn may have begun before
            self._idle.clear()
            self._idle.wait(timeout)

    def check(self) -> None:
        """Raise what went wrong with a line, if anything did."""
        if self._problem is not None:
            raise self._problem

    def close(self) -> None:
        """Hand over all there is, and stop reading; raises what went wrong."""
        self.drain()
        self._ending = True
        self._thread.join()
        with self._lock:
            for key in list(self._selector.get_map().values()):
                self._end(key)
            self._selector.close()
        self.check()

    def _run(self) -> None:
        while not self._ending:
            with self._lock:
                ready = self._selector.select(0) if self._selector.get_map() else []
                for key, _ in ready:
                    self._read(key)
            if not ready:
                self._idle.set()
                threading.Event().wait(_TURN)

    def _read(self, key: selectors.SelectorKey) -> None:
        try:
            data = os.read(key.fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._end(key)
            return
        *lines, rest = (self._rest[key.fd] + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._rest[key.fd] = rest
        for line in lines:
            self._hand_over(key, line)

    def _end(self, key: selectors.SelectorKey) -> None:
        self._selector.unregister(key.fd)
        rest = self._rest.pop(key.fd)
        os.close(key.fd)
        if rest:
            self._hand_over(key, rest)

    def _hand_over(self, key: selectors.SelectorKey, line: bytes) -> None:
        if self._problem is None:
            try:
                key.data(_text(line))
            except Exception as error:  # noqa: BLE001 - raised by the thread that asks
                self._problem = error


def _text(line: bytes) -> str:
    """A line; of one that was drawn over and over, as progress bars do, what it came to."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
