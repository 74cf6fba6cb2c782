"""Creating an object exclusively, also where the server does not know how."""

from __future__ import annotations

import logging
import threading
import time

from ckptkit.errors import AlreadyExistsError, CkptkitError, NotFoundError
from ckptkit.storage.keys import temporary_beside
from ckptkit.storage.objects.answers import taken
from ckptkit.storage.objects.client import UnsupportedError
from ckptkit.storage.objects.server import Server

# Racing creators put within moments of each other; the last one is the one that stays.
SETTLE_SECONDS = 0.2

_log = logging.getLogger("ckptkit.storage")


class ExclusiveCreate:
    """Asks the server to refuse a name that is taken, and finds out first whether it listens."""

    def __init__(self, server: Server, folder: str) -> None:
        self._server = server
        self._folder = folder
        self._listens: bool | None = None
        self._probing = threading.Lock()

    @property
    def is_safe(self) -> bool:
        """Whether one of racing creators wins, as far as is known: `learn` finds out."""
        return self._listens is not False

    def learn(self, scratch: str) -> None:
        """Find out whether the server listens, by an object of a name that nobody uses."""
        with self._probing:
            if self._listens is None:
                self._listens = self._probed(scratch)

    def create(self, key: str, data: memoryview) -> None:
        """Store an object; AlreadyExistsError where there is one.

        On a server that ignores the condition two racing creators may both believe that they won,
        if one of them is slower than `SETTLE_SECONDS` between looking and writing.
        """
        self.learn(temporary_beside(key))
        if self._listens:
            self._server.create(key, data)
        else:
            self._create_and_look(key, data)

    def _probed(self, scratch: str) -> bool:
        if not self._server.client.exclusive:
            return self._warned()
        try:
            self._server.create(scratch, memoryview(b"1"))
            self._server.create(scratch, memoryview(b"2"))
        except AlreadyExistsError:
            return True
        except UnsupportedError:
            # Some servers do not ignore what they do not know.
            return self._warned()
        else:
            return self._warned()
        finally:
            self._discard(scratch)

    def _discard(self, scratch: str) -> None:
        try:
            self._server.delete([scratch])
        except CkptkitError as error:
            _log.warning("the scratch object %s stays: %s", self._server.where(scratch), error.what)

    def _warned(self) -> bool:
        _log.warning(
            "%s does not refuse to replace objects: two jobs that save one step at once are told "
            "apart only by looking again",
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
