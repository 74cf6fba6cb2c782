"""A client whose questions are repeated until they are answered, and whose answers are checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias
from ckptkit.errors import StorageError
from ckptkit.storage.store import Entries, Names

import hashlib
import re

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar
from ckptkit.errors import StorageError

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from ckptkit.errors import AlreadyExistsError, CkptkitError, NotFoundError
from ckptkit.storage.location import temporary_beside
from ckptkit.storage.objects.errors import taken

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
from ckptkit.storage.location import temporary_beside
from ckptkit.storage.location import Location
from ckptkit.storage.objects.errors import below
from ckptkit.storage.options import Settings
from ckptkit.storage.store import checked_range
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

_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([0-9]+))?"?')


class Digest:
    """The ETag that S3 gives an object: its MD5, or of several pieces that of their MD5s."""

    def __init__(self, piece_size: int) -> None:
        self._size = piece_size
        self._pieces: list[bytes] = []
        self._piece = _md5()
        self._taken = 0

    def add(self, data: memoryview) -> None:
        """Take what comes next."""
        while data.nbytes:
            count = min(self._size - self._taken, data.nbytes)
            self._piece.update(data[:count])
            self._taken += count
            data = data[count:]
            if self._taken == self._size:
                self._end_piece()

    def end(self) -> None:
        """That was all."""
        if self._taken or not self._pieces:
            self._end_piece()

    def differs(self, etag: str | None) -> bool:
        """Whether this is the ETag of other bytes; one of another form tells nothing."""
        match = _ETAG.fullmatch(etag or "")
        if match is None:
            return False
        if match[2] is None:
            return len(self._pieces) == 1 and match[1] != self._pieces[0].hex()
        whole = _md5(b"".join(self._pieces)).hexdigest()
        return int(match[2]) == len(self._pieces) and match[1] != whole

    def piece_differs(self, number: int, data: bytes | memoryview) -> bool:
        """Whether piece number `number` is not these bytes."""
        return _md5(data).digest() != self._pieces[number]

    def _end_piece(self) -> None:
        self._pieces.append(self._piece.digest())
        self._piece = _md5()
        self._taken = 0


def _md5(data: bytes | memoryview = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


class Transient(Exception):  # noqa: N818 — no error until the retries are used up
    """What may work when it is tried again; private to the object stores.

    The reason is shown to users. `within` bounds the seconds where more will hardly help.
    """

    def __init__(self, reason: str, *, within: float = math.inf) -> None:
        super().__init__(reason)
        self.reason = reason
        self.within = within


class UnsupportedError(StorageError):
    """The server does not know what was asked; to users a StorageError like others."""


@dataclass(frozen=True, slots=True)
class Stat:
    """What a server says of one object."""

    size: int
    etag: str | None


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    identity: str
    modified: float
    """Unix seconds: when it was begun, or its newest part arrived."""
    size: int


Uploads: TypeAlias = list[Upload]


class Client(Protocol):
    """One bucket, or one file system of fsspec; keys are whole, below no prefix.

    An implementation asks once: it never retries by itself what can be retried here, and raises
    `Transient` for it. Everything else it cannot do is a `CkptkitError`, NotFoundError for an
    object or a bucket that is not there. It shows no credentials. Any thread may call it.
    """

    @property
    def exclusive(self) -> bool:
        """Whether `put(create=True)` says so to the server; servers that do not listen exist."""

    @property
    def repeats(self) -> bool:
        """Whether it may ask more than once after all: then a refusal may be its own doing."""

    @property
    def copies(self) -> bool:
        """Whether it keeps a copy of each piece of an upload while that is sent."""

    def get(self, key: str, start: int, length: int) -> bytes | memoryview:
        """At most `length` (not 0) bytes from `start`; fewer where the object ends before."""

    def get_whole(self, key: str, most: int) -> bytes:
        """The whole object; FormatError, before its body is in memory, if larger than `most`."""

    def head(self, key: str) -> Stat:
        """Size and ETag."""

    def put(self, key: str, data: memoryview, *, create: bool) -> str | None:
        """Store an object whole and return its ETag, if it is known.

        With `create` the server is asked to refuse a name that is taken: AlreadyExistsError.
        """

    def upload(
        self, key: str, blocks: Iterator[memoryview], piece_size: int, concurrency: int
    ) -> str | None:
        """Store the bytes of all blocks, of any lengths, as one object; its ETag.

        They are sent in pieces of `piece_size` bytes, several at a time, and each block is let go
        of once the server has it. An error of the iterator, or of a piece, leaves nothing on the
        server as far as possible.
        """

    def list(self, folder: str) -> Entries:
        """Every object below `folder/` (everything for ""), in any order."""

    def children(self, folder: str) -> Names:
        """The names directly below `folder/`, in any order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in any order; missing ones are fine."""

    def compares_bodies(self, scratch: str) -> bool | None:
        """Whether the server refuses a body that is not the one that was signed; None where that
        cannot be found out. Asks by an object of a name that nobody uses.
        """

    def uploads(self, folder: str) -> Uploads:
        """The multipart uploads below `folder/` that were begun; none where there is no asking."""

    def abort(self, uploads: Iterable[Upload]) -> None:
        """Abort multipart uploads; missing ones are fine."""
