"""A client whose questions are repeated until they are answered, and whose answers are checked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    FormatError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.buffers import copy_bytes
from ckptkit.storage.keys import temporary_beside
from ckptkit.storage.location import Location
from ckptkit.storage.objects.answers import below
from ckptkit.storage.objects.client import Client, Stat, Transient, Upload, Uploads
from ckptkit.storage.objects.digest import Digest
from ckptkit.storage.objects.retrying import Retrying
from ckptkit.storage.objects.settings import Settings
from ckptkit.storage.ranges import checked_range
from ckptkit.storage.store import Entries, Names

T = TypeVar("T")

# For this much hashing it is worth asking whether the server does it.
WORTH_ASKING = 128 << 20
# What takes longer than an answer may take can never succeed.
_MOST_AT_ONCE = 64 << 20

_log = logging.getLogger("ckptkit.storage")


class Server:
    """One bucket or file system; keys are whole, below no prefix."""

    def __init__(self, client: Client, top: Location, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self._top = top
        self._retry = Retrying(settings.deadline)
        # Over https nobody can change a body on its way.
        self._checks_etags = settings.is_plain
        self._is_one = False
        self._asked_who_compares = False
        self._asking = threading.Lock()

    def where(self, key: str) -> str:
        """A key as users know it."""
        return below(self._top, key)

    def head(self, key: str) -> Stat:
        """Size and ETag of an object."""
        return self._ask("looking", key, lambda: self.client.head(key))

    def read(self, key: str, start: int, length: int) -> memoryview:
        """Exactly these bytes (not none) of an object, in one request."""
        return self._ask("reading", key, lambda: self._read_once(key, start, length))

    def fetch(self, key: str, start: int, length: int) -> memoryview:
        """The same bytes, as they came; copied only where one request cannot bring them."""
        if length <= _MOST_AT_ONCE:
            return self.read(key, start, length)
        buffer = memoryview(bytearray(length))
        self.read_into(key, start, buffer)
        return buffer

    def read_into(self, key: str, start: int, buffer: memoryview) -> None:
        """Fill the whole buffer from `start`."""
        for done in range(0, buffer.nbytes, _MOST_AT_ONCE):
            piece = buffer[done : done + _MOST_AT_ONCE]
            copy_bytes(self.read(key, start + done, piece.nbytes), piece)

    def read_whole(self, key: str, most: int) -> bytes:
        """A small object, in one request."""
        return self._ask("reading", key, lambda: self.client.get_whole(key, most))

    def put(self, key: str, data: memoryview) -> None:
        """Store an object whole, whatever is there."""
        self._ask("writing", key, lambda: self._put_once(key, data))

    def create(self, key: str, data: memoryview) -> None:
        """Store an object whole where the server says that there is none: AlreadyExistsError."""
        ours = False

        def attempt(number: int) -> None:
            nonlocal ours
            if ours:
                # Nobody else could take the name, but what lies there is not what was sent.
                return self._put_once(key, data)
            try:
                etag = self.client.put(key, data, create=True)
            except AlreadyExistsError:
                # An attempt whose answer was lost may have been the one that took the name.
                again = number > 1 or self.client.repeats
                if not again or not self._holds_once(key, data):
                    raise
                return None
            ours = True
            return self._check(key, data, etag)

        self._retry("creating", self.where(key), attempt)

    def holds(self, key: str, data: memoryview) -> bool:
        """Whether an object is exactly these bytes."""
        return self._ask("reading back", key, lambda: self._holds_once(key, data))

    def list(self, folder: str) -> Entries:
        """Every object below a folder."""
        found = self._ask("listing", folder, lambda: self.client.list(folder))
        self._believe(folder, found)
        return found

    def children(self, folder: str) -> Names:
        """The names directly below a folder."""
        found = self._ask("listing", folder, lambda: self.client.children(folder))
        self._believe(folder, found)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in any order."""
        self._ask("deleting", keys[0], lambda: self.client.delete(keys))

    def uploads(self, folder: str) -> Uploads:
        """The multipart uploads that were begun below a folder."""
        return self._ask("listing uploads", folder, lambda: self.client.uploads(folder))

    def abort(self, uploads: Iterable[Upload]) -> None:
        """Abort multipart uploads."""
        for upload in uploads:
            self._ask("aborting", upload.key, partial(self.client.abort, [upload]))

    def new_digest(self, key: str, size: int, piece_size: int) -> Digest | None:
        """What tells whether a server stored what it was sent; None where that needs no check."""
        if self._checks_etags and size >= WORTH_ASKING:
            self._ask_who_compares(key)
        return Digest(piece_size) if self._checks_etags else None

    def distrust_etags(self, key: str) -> None:
        """An object is as it was sent, but its ETag says otherwise: those of this server mean
        something else.
        """
        self._checks_etags = False
        _log.info("the ETags of %s are no MD5s; they are not looked at any more", self.where(key))

    def _believe(self, folder: str, found: Sequence[object]) -> None:
        """That nothing is there: web servers that answer anything with some page say it, too."""
        if not self._is_one and not found:
            self._refuse_others(temporary_beside(f"{folder}/x" if folder else "x"))
        self._is_one = True

    def _refuse_others(self, nothing: str) -> None:
        try:
            self.head(nothing)
        except CkptkitError:
            return
        raise StorageError(
            "what answers there is no object store: it has any object that it is asked for",
            where=self.where(nothing),
            hint="check the endpoint: another port or path of the server, a proxy, a login page",
        )

    def _ask_who_compares(self, key: str) -> None:
        with self._asking:
            if not self._asked_who_compares:
                if self.client.compares_bodies(temporary_beside(key)):
                    self._checks_etags = False
                self._asked_who_compares = True

    def _ask(self, operation: str, key: str, do: Callable[[], T]) -> T:
        return self._retry(operation, self.where(key), lambda _: do())

    def _holds_once(self, key: str, data: memoryview) -> bool:
        try:
            return self.client.get_whole(key, data.nbytes) == data
        except (NotFoundError, FormatError):
            return False

    def _read_once(self, key: str, start: int, length: int) -> memoryview:
        data = memoryview(self.client.get(key, start, length))
        if data.nbytes != length:
            checked_range(self.where(key), self.client.head(key).size, start, length)
            raise Transient(f"{data.nbytes} of {length} bytes came")
        return data

    def _put_once(self, key: str, data: memoryview) -> None:
        self._check(key, data, self.client.put(key, data, create=False))

    def _check(self, key: str, data: memoryview, etag: str | None) -> None:
        if (digest := self.new_digest(key, data.nbytes, max(1, data.nbytes))) is None:
            return
        digest.add(data)
        digest.end()
        if digest.differs(etag):
            if not self._holds_once(key, data):
                raise Transient("the server stored other bytes than were sent")
            self.distrust_etags(key)
