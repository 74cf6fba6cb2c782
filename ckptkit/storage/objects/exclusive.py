"""Creating an object exclusively, also where the server does not know how."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ckptkit.errors import AlreadyExistsError, CkptkitError, NotFoundError
from ckptkit.storage.keys import temporary_beside
from ckptkit.storage.objects.answers import taken
from ckptkit.storage.objects.client import Transient, UnsupportedError
from ckptkit.storage.objects.server import Server

# Racing creators put within moments of each other; the last one is the one that stays.
SETTLE_SECONDS = 0.2
# A server that looks, and then takes the name, lets both of two creators win most races, not all:
# Swift's S3 interface four of five. All of so many it passes about once in 400,000 times.
RACES = 8

_log = logging.getLogger("ckptkit.storage")


class ExclusiveCreate:
    """Asks the server to refuse a name that is taken, and finds out first whether it does."""

    def __init__(self, server: Server, folder: str) -> None:
        self._server = server
        self._folder = folder
        self._listens: bool | None = None
        self._probing = threading.Lock()

    @property
    def is_safe(self) -> bool:
        """Whether one of racing creators wins, as far as is known: `learn` finds out."""
        return self._listens is not False

    def learn(self, key: str) -> None:
        """Find out whether the server listens, by objects beside `key` that nobody else uses."""
        with self._probing:
            if self._listens is None:
                self._listens = self._probed([temporary_beside(key) for _ in range(1 + RACES)])

    def create(self, key: str, data: memoryview) -> None:
        """Store an object; AlreadyExistsError where there is one.

        Where `learn` found that racing creators are not told apart, two may both believe that they
        won, if one of them is slower than `SETTLE_SECONDS` between looking and writing.
        """
        self.learn(key)
        if self._listens:
            self._server.create(key, data)
        else:
            self._create_and_look(key, data)

    def _probed(self, scratch: list[str]) -> bool:
        if not self._server.client.exclusive:
            return self._warned()
        try:
            self._server.create(scratch[0], memoryview(b"1"))
            self._server.create(scratch[0], memoryview(b"2"))
        except AlreadyExistsError:
            # It refuses whoever comes later; now those that come at once.
            with ThreadPoolExecutor(2) as creators:
                both = any(self._both_win(key, creators) for key in scratch[1:])
            return not both or self._warned()
        except UnsupportedError:
            # Some servers do not ignore what they do not know.
            return self._warned()
        else:
            return self._warned()
        finally:
            self._discard(scratch)

    def _both_win(self, key: str, creators: ThreadPoolExecutor) -> bool:
        start = threading.Barrier(2)

        def wins(byte: int) -> bool:
            start.wait()
            try:
                # Not asked again: servers tell the loser of a race so by 409, too.
                self._server.client.put(key, memoryview(bytes([byte])), create=True)
            except (AlreadyExistsError, Transient):
                return False
            return True

        return all(list(creators.map(wins, b"12")))

    def _discard(self, scratch: list[str]) -> None:
        try:
            self._server.delete(scratch)
        except CkptkitError as error:
            where = self._server.where(scratch[0])
            _log.warning("the scratch object %s may stay: %s", where, error.what)

    def _warned(self) -> bool:
        _log.warning(
            "%s does not refuse to replace objects in a race: two jobs that save one step at once "
            "are told apart only by looking again",
            self._server.where(self._folder),
        )
        return False

    def _create_and_look(self, key: str, data: memoryview) -> None:
        try:
            self._server.head(key)
        except NotFoundError:
            self._server.put(key, data)
        else:
            raise taken(self._server.where(key))
        time.sleep(SETTLE_SECONDS)
        if not self._server.holds(key, data):
            raise taken(self._server.where(key))
