"""An object being written: streamed to the server in pieces while its parts come in."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

from ckptkit.errors import CkptkitError, CorruptionError, NotFoundError, StorageError
from ckptkit.storage.objects.client import Transient
from ckptkit.storage.objects.digest import Digest
from ckptkit.storage.objects.server import Server
from ckptkit.storage.objects.window import Stopped, Window
from ckptkit.storage.parts import Parts

# S3 takes 10,000 parts.
_MOST_PIECES = 9_000
_PIECE_STEP = 1 << 20
# An engine that sends a piece again may say nothing, for as long as its deadline is.
_PATIENCE = 30.0

_log = logging.getLogger("ckptkit.storage")


def piece_size(total: int, preferred: int) -> int:
    """The bytes per part of an upload: as preferred, or as many as few enough parts need."""
    needed = -(-total // _MOST_PIECES)
    return max(preferred, -(-needed // _PIECE_STEP) * _PIECE_STEP)


class ObjectSink:
    """A new object of several pieces, invisible until it is finished."""

    def __init__(self, server: Server, key: str, parts: Parts, memory: int | None) -> None:
        self._server = server
        self._key = key
        self._where = server.where(key)
        self._parts = parts
        preferred, many = server.settings.part_size, server.settings.concurrency
        self._size = piece_size(self._parts.total, preferred)
        # What the engine copies needs the same memory twice.
        each = self._size * (2 if server.client.copies else 1)
        most = max(2, many + 2 if memory is None else memory // each)
        self._concurrency = min(many, most, -(-self._parts.total // self._size))
        self._digest = server.new_digest(key, self._parts.total, self._size)
        seen = self._digest.add if self._digest else None
        self._window = Window(parts.sizes, self._size, most * self._size, seen)
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._etag: str | None = None
        self._error: BaseException | None = None
        self._ended = False

    def write(self, part: int, data: memoryview) -> None:
        """Copy one part; what is whole is on its way."""
        with self._parts.writing(part, data) as (_, view), self._under_way():
            self._window.write(part, view)

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        """Memory that is sent from, unless the part is longer than what is sent at a time."""
        size = self._parts.size(part)
        with self._parts.claiming(part, size), self._under_way():
            if self._window.is_one_block(part):
                with self._window.filling(part) as memory:
                    yield memory
                return
            with self._parts.loan(part) as memory:
                with self._window.coming():
                    yield memory
                self._window.write(part, memory)

    def finish(self) -> None:
        """Make the object visible, once the server has every piece of it."""
        self._parts.complete()
        self._window.seal()
        self._start()
        self._join()
        self._settle()
        self._ended = True
        self._window.close()

    def abort(self) -> None:
        """Abort the upload on the server, too."""
        # First, or those that wait for memory would be waited for.
        self._window.stop()
        self._parts.close()
        if self._ended:
            return
        self._ended = True
        self._join()
        self._window.close()
        # Its traceback knows this sink.
        self._error = None

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        """While something is sent. Where that fails nobody waits for anything any more."""
        try:
            # Before, because whoever waits for memory waits for what is sent.
            self._start()
            yield
        except Stopped:
            raise self._refusal() from self._error
        except BaseException as error:
            self._stop(error)
            raise

    def _stop(self, error: BaseException) -> None:
        """All else fails, too, by the first error."""
        if self._error is None:
            self._error = error
        self._window.stop()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                # A daemon: a program that forgot to end a sink must be able to end.
                thread = threading.Thread(target=self._run, name="upload", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        try:
            blocks = self._window.blocks()
            with _watched(self._window, self._where):
                self._etag = self._server.client.upload(
                    self._key, blocks, self._size, self._concurrency
                )
        except BaseException as error:  # noqa: BLE001 — whoever writes or finishes raises it
            self._stop(error)

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _settle(self) -> None:
        """Whether the object is there, whatever became of the last answer."""
        if self._error is not None and not self._is_there():
            raise self._refusal() from self._error
        if self._digest is not None:
            self._digest.end()
            if self._digest.differs(self._etag):
                self._read_back(self._digest)

    def _is_there(self) -> bool:
        """Whether the upload was completed, though the answer was lost.

        Then asking again finds no such upload. `create` found no object of this name, or one of
        the same bytes, and packs are never written twice: one of this size is this one.
        """
        if not self._window.is_empty:
            return False
        try:
            found = self._server.head(self._key)
        except NotFoundError:
            return False
        self._etag = found.etag
        return found.size == self._parts.total

    def _read_back(self, digest: Digest) -> None:
        """An ETag is wrong: either it is of another kind, or a piece was damaged on its way."""
        for number, start in enumerate(range(0, self._parts.total, self._size)):
            length = min(self._size, self._parts.total - start)
            if digest.piece_differs(number, self._server.read(self._key, start, length)):
                self._server.delete([self._key])
                raise CorruptionError(
                    f"the server stored other bytes than were sent, from byte {start} on",
                    where=self._where,
                    hint="something between here and the server damages data; use https",
                )
        self._server.distrust_etags(self._key)

    def _refusal(self) -> CkptkitError:
        if isinstance(self._error, CkptkitError):
            return copy(self._error)
        if not isinstance(self._error, Transient | Stopped | None):
            what = f"the upload was given up: {self._error!r}"
            return StorageError(what, where=self._where, hint="mend that, and start over")
        reason = self._error.reason if isinstance(self._error, Transient) else "it broke off"
        return StorageError(
            f"the upload failed: {reason}",
            where=self._where,
            hint="check the endpoint and the network, then save again; "
            "a slow one needs fewer bytes at a time (concurrency) or a longer timeout",
        )


@contextmanager
def _watched(window: Window, where: str) -> Iterator[None]:
    """Say so while a server takes nothing of what it is sent."""
    ended = threading.Event()

    def watch() -> None:
        last, waited = window.under_way, 0.0
        while not ended.wait(_PATIENCE):
            now = window.under_way
            waits_for_us = not now[1] and not window.is_empty
            waited = 0.0 if now != last or waits_for_us else waited + _PATIENCE
            last = now
            if waited:
                _log.warning(
                    "writing of %s: the server has taken nothing for %.0f s, still trying",
                    where, waited,
                )  # fmt: skip

    threading.Thread(target=watch, name="upload watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
