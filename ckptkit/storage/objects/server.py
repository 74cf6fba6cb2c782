"""A server as the stores need it: asked again until it answers, its answers checked, and what it
can do found out once.

A client (`obstore`, `fsspec`) asks once, but for the parts of an upload. `ObjectServer` decides
what to make of the answer.
"""

from __future__ import annotations

import hashlib
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    FormatError,
    NotFoundError,
    StorageError,
)
from ckptkit.storage.base.address import Location, Settings, temporary_beside
from ckptkit.storage.base.store import Entries, Names, checked_range
from ckptkit.storage.objects.amazon import BotocoreBucket, Upload
from ckptkit.storage.objects.errors import Transient, UnsupportedError, below, trouble

T = TypeVar("T")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 15.0
# Racing creators put within moments of each other; the last one is the one that stays.
SETTLE_SECONDS = 0.2
# A server that looks, and then takes the name, lets both of two creators win most races, not all:
# Swift's S3 interface four of five. All of so many it passes about once in 400,000 times. On a busy
# machine two creators may come one after the other; of four, two nearly always meet.
RACES, CREATORS = 8, 4
# For this much hashing it is worth asking whether the server does it.
WORTH_ASKING = 128 << 20
_DAMAGED = "the server stored other bytes than were sent"
_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([0-9]+))?"?')

_log = logging.getLogger("ckptkit.storage")


@dataclass(frozen=True, slots=True)
class Stat:
    """What a server says of one object."""

    size: int
    etag: str | None


class Client(Protocol):
    """One bucket, or one file system of fsspec; keys are whole, below no prefix.

    An implementation asks once: it never retries by itself what can be retried here, and raises
    `Transient` for it. The parts of an upload it sends again by itself. Everything else it cannot
    do is a `CkptkitError`, NotFoundError for an object or a bucket that is not there. It shows no
    credentials. Any thread may call it.
    """

    exclusive: bool
    """Whether `put(exclusive=True)` says so to the server; some replace an object all the same."""
    repeats: bool
    """Whether it may ask more than once after all: then a refusal may be its own doing."""
    copies: bool
    """Whether it keeps a copy of each piece of an upload while that is sent."""
    botocore: BotocoreBucket | None
    """Asks what only Amazon's own library can ask; None elsewhere than at S3."""
    known: Known
    """What all stores that are reached by it have found out."""

    def get(self, key: str, start: int, length: int) -> bytes | memoryview:
        """At most `length` (not 0) bytes from `start`; fewer where the object ends before."""

    def get_whole(self, key: str, most: int) -> bytes:
        """The whole object; FormatError, before its body is in memory, if larger than `most`."""

    def head(self, key: str) -> Stat:
        """Size and ETag."""

    def put(self, key: str, data: memoryview, *, exclusive: bool) -> str | None:
        """Store an object whole and return its ETag, if it is known.

        With `exclusive` the server is asked to refuse a name that is taken: AlreadyExistsError.
        """

    def upload(
        self,
        key: str,
        blocks: Iterator[memoryview],
        piece_size: int,
        concurrency: int,
    ) -> str | None:
        """Store the bytes of all blocks, of any lengths, as one object; its ETag.

        They are sent in pieces of `piece_size` bytes, several at a time, and each block is let go
        of once the server has it. An error of the iterator, or of a piece, leaves nothing on the
        server as far as possible.
        """

    def list(self, folder: str, *, deep: bool) -> Entries:
        """Every object below `folder/` (everything for ""), or without `deep` those directly below
        it, in any order.
        """

    def children(self, folder: str) -> Names:
        """What is directly below `folder/`, in any order: keys, and the beginnings that others
        have in common, with a slash at their end or without.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, in any order; missing ones are fine."""


@dataclass(slots=True)
class Known:
    """What a server can do, as far as it has been found out; None where nobody has asked."""

    is_store: bool | None = None
    """Web servers that answer anything with some page say of each folder that it is empty, too."""
    refuses_to_replace: bool | None = None
    """Where it is asked to, in a race too."""
    compares_bodies: bool | None = None
    """It refuses a body other than the one that its head announces: over plain http by the
    signature, over https by a CRC-64. None: perhaps it does."""
    etags_tell: bool = True
    """Its ETags are MD5s, and tell what it has stored."""
    asking: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is asked, so that nobody else asks the same."""


class ObjectServer:
    """One bucket or file system; keys are whole, below no prefix."""

    def __init__(self, client: Client, top: Location, settings: Settings, place: Location) -> None:
        self.client = client
        self.settings = settings
        self.known = client.known
        self._top = top
        self._place = place

    def where(self, key: str) -> str:
        """A key as users know it."""
        return below(self._top, key)

    def _ask(self, operation: str, key: str, do: Callable[[], T]) -> T:
        return retried(self.settings.deadline, operation, self.where(key), do)

    # Reading

    def head(self, key: str) -> Stat:
        return self._ask("looking", key, lambda: self.client.head(key))

    def read(self, key: str, start: int, length: int) -> memoryview:
        """Exactly these bytes (not none) of an object, in one request."""

        def read_once() -> memoryview:
            data = memoryview(self.client.get(key, start, length))
            if data.nbytes != length:
                checked_range(self.where(key), self.client.head(key).size, start, length)
                raise Transient(f"{data.nbytes} of {length} bytes came")
            return data

        return self._ask("reading", key, read_once)

    def read_whole(self, key: str, most: int) -> bytes:
        """A small object, in one request."""
        return self._ask("reading", key, lambda: self.client.get_whole(key, most))

    def list(self, folder: str, *, deep: bool) -> Entries:
        return self._listing(folder, partial(self.client.list, folder, deep=deep))

    def children(self, folder: str) -> Names:
        """The names directly below a folder."""
        start = len(folder) + 1 if folder else 0
        found = self._listing(folder, partial(self.client.children, folder))
        return [key[start:].rstrip("/") for key in found]

    def _listing(self, folder: str, ask: Callable[[], T]) -> T:
        """What a listing says. The first that says that nothing is there is believed only once
        something else is missing too: a login page says so of each folder, and has each object.
        """
        found = self._ask("listing", folder, ask)
        if not found and not self.known.is_store:
            nothing = temporary_beside(f"{folder}/x" if folder else "x")
            try:
                self.head(nothing)
            except CkptkitError:
                pass
            else:
                raise StorageError(
                    "what answers there is no object store: it has any object that it is asked for",
                    where=self.where(nothing),
                    hint="check the endpoint: another port or path of the server, a proxy, "
                    "a login page",
                )
        self.known.is_store = True
        return found

    # Writing

    def put(self, key: str, data: memoryview) -> None:
        """Store an object whole, whatever is there."""

        def attempt() -> None:
            if self._is_damaged(key, data, self.client.put(key, data, exclusive=False)):
                raise Transient(_DAMAGED)

        self._ask("writing", key, attempt)

    def refuse_taken(self, key: str) -> None:
        """AlreadyExistsError where there is such an object."""
        with suppress(NotFoundError):
            self.head(key)
            raise trouble("taken", self.where(key))

    def put_exclusive(self, key: str, data: memoryview) -> None:
        """Store an object; AlreadyExistsError where there is one.

        Where `learn` found that racing creators are not told apart, two may both believe that they
        won, if one of them is slower than `SETTLE_SECONDS` between looking and writing.
        """
        self.learn(key)
        if self.known.refuses_to_replace:
            self._create(key, data)
            return
        self.refuse_taken(key)
        self._create(key, data, exclusive=False)
        time.sleep(SETTLE_SECONDS)
        if not self._ask("reading back", key, lambda: self._holds(key, data)):
            raise trouble("taken", self.where(key))

    def learn(self, key: str) -> None:
        """Find out whether the server refuses to replace an object, by objects beside `key` that
        nobody else uses.
        """
        with self.known.asking:
            if self.known.refuses_to_replace is not None:
                return
            scratch = [temporary_beside(key) for _ in range(1 + RACES)]
            refuses = self.client.exclusive and self._refuses_to_replace(scratch)
            self.known.refuses_to_replace = refuses
        if not self.known.refuses_to_replace:
            _log.warning(
                "%s does not refuse to replace objects in a race: two jobs that save one step at "
                "once are told apart only by looking again",
                self._place,
            )

    def _refuses_to_replace(self, scratch: Names) -> bool:
        # All threads go at one moment: a server that looks first and then writes lets several win.
        meeting = threading.Barrier(CREATORS)

        def wins(key: str, byte: int) -> bool:
            meeting.wait()
            try:
                # Not asked again: servers tell the loser of a race so by 409, too.
                self.client.put(key, memoryview(bytes([byte])), exclusive=True)
            except (AlreadyExistsError, Transient):
                return False
            return True

        try:
            self._create(scratch[0], memoryview(b"1"))
            self._create(scratch[0], memoryview(b"2"))
        except AlreadyExistsError:
            # It refuses whoever comes later; now those that come at once.
            with ThreadPoolExecutor(CREATORS) as creators:
                races = (creators.map(partial(wins, key), range(CREATORS)) for key in scratch[1:])
                try:
                    return all(sum(race) <= 1 for race in races)
                finally:
                    # Where one could not start, or Ctrl-C came, the others would wait for it.
                    meeting.abort()
        except UnsupportedError:
            pass  # some servers do not ignore what they do not know
        finally:
            try:
                self.delete(scratch)
            except CkptkitError as error:
                where = self.where(scratch[0])
                _log.warning("the scratch object %s may stay: %s", where, error.what)
        return False

    def _create(self, key: str, data: memoryview, *, exclusive: bool = True) -> None:
        """Store an object whole; if `exclusive`, where the server says that there is none, else
        AlreadyExistsError. What it has damaged at every attempt is deleted: nobody can read it, and
        it has the name.
        """
        # Whether the name is this rank's: an earlier attempt took it, or nobody asks.
        ours = not exclusive
        attempts = 0
        damaged: set[str | None] = set()  # ETags

        def attempt() -> None:
            nonlocal ours, attempts
            attempts += 1
            try:
                # Once it is ours nobody else could take the name, but what lies there is not what
                # was sent.
                etag = self.client.put(key, data, exclusive=not ours)
            except AlreadyExistsError:
                # An attempt whose answer was lost may have been the one that took the name.
                again = attempts > 1 or self.client.repeats
                if not again or not self._holds(key, data):
                    raise
                return
            ours = True
            if self._is_damaged(key, data, etag):
                damaged.add(etag)
                raise Transient(_DAMAGED)

        try:
            self._ask("creating", key, attempt)
        except StorageError:
            # Not what has another ETag: it may be whole, its answer lost, or by now another job's.
            with suppress(CkptkitError, Transient):
                if damaged and self.client.head(key).etag in damaged:
                    self.client.delete([key])
            raise

    def _holds(self, key: str, data: memoryview) -> bool:
        try:
            return self.client.get_whole(key, data.nbytes) == data
        except (NotFoundError, FormatError):
            return False

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("deleting", keys[0], lambda: self.client.delete(keys))

    def uploads(self, folder: str) -> Sequence[Upload]:
        """The multipart uploads that were begun below a folder: Google and Azure forget theirs
        after a week, and list none.
        """
        botocore = self.client.botocore
        if botocore is None:
            return ()
        return self._ask("listing uploads", folder, lambda: botocore.uploads(folder))

    def abort(self, uploads: Iterable[Upload]) -> None:
        """Abort some that `uploads` found."""
        if botocore := self.client.botocore:
            for upload in uploads:
                self._ask("aborting", upload.key, partial(botocore.abort, upload))

    # Whether what arrived is what was sent

    def body_check(self, key: str, size: int, piece_size: int) -> BodyCheck | None:
        """What tells whether the server stored what it was sent. None where nobody need ask: over
        https a body cannot be changed on its way, and some servers compare by themselves. Whether
        this one does is asked before its first large body, by small objects beside `key`.
        """
        known, botocore = self.known, self.client.botocore
        if botocore and size >= WORTH_ASKING:
            with known.asking:
                if known.compares_bodies is None:
                    known.compares_bodies = botocore.compares_bodies(temporary_beside(key))
        needs_none = known.compares_bodies or not (self.settings.is_plain and known.etags_tell)
        return None if needs_none else BodyCheck(piece_size)

    def distrust_etags(self, key: str) -> None:
        """An object is as it was sent, but its ETag says otherwise: those of this server mean
        something else.
        """
        self.known.etags_tell = False
        _log.info("the ETags of %s are no MD5s; they are not looked at any more", self.where(key))

    def _is_damaged(self, key: str, data: memoryview, etag: str | None) -> bool:
        """Whether the server stored other bytes than were sent."""
        expected = self.body_check(key, data.nbytes, max(1, data.nbytes))
        if expected is None:
            return False
        expected.add(data)
        if not expected.differs(etag):
            return False
        if not self._holds(key, data):
            return True
        self.distrust_etags(key)
        return False


def retried(deadline: float, operation: str, where: str, do: Callable[[], T]) -> T:
    """What `do` returns, called until it raises no `Transient`.

    Calls again after pauses that double, with jitter so that ranks do not come back together. No
    attempt begins once `deadline` seconds have passed, or what the trouble says, where that is less
    (`Transient.within`). Every repetition is logged.
    """
    began = time.monotonic()
    attempt = 1
    reason = earlier = ""
    while True:
        try:
            return do()
        except Transient as transient:
            # A last attempt may end for another reason than those before, which tells more.
            earlier = earlier if transient.reason == reason else reason
            reason, longest = transient.reason, min(transient.within, deadline)
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempt, 30))
        pause *= random.uniform(0.5, 1.0)  # noqa: S311 — no secret
        spent = time.monotonic() - began
        if spent + pause > longest:
            times = "once" if attempt == 1 else f"{attempt} times in {spent:.1f} s"
            before = earlier and f", before that {earlier}"
            raise StorageError(
                f"{operation} failed: {reason}{before} (tried {times})",
                where=where,
                hint="check the endpoint and the network (over a slow line less concurrency "
                "helps); the option deadline says how long to try",
            )
        _log.warning(
            "%s of %s failed (%s); attempt %d in %.1f s",
            operation, where, reason, attempt + 1, pause,
        )  # fmt: skip
        time.sleep(pause)
        attempt += 1


@dataclass(eq=False)
class BodyCheck:
    """Compares what was sent with the ETag that S3 gives an object: its MD5, or of several pieces
    that of their MD5s.
    """

    _piece_size: int
    _pieces: list[hashlib._Hash] = field(default_factory=list)
    _missing: int = 0
    """What the last piece takes yet."""

    def add(self, data: memoryview) -> None:
        """Take what comes next."""
        while data.nbytes:
            if not self._missing:
                self._pieces.append(_md5())
                self._missing = self._piece_size
            count = min(self._missing, data.nbytes)
            self._pieces[-1].update(data[:count])
            self._missing -= count
            data = data[count:]

    def differs(self, etag: str | None) -> bool:
        """Whether this is the ETag of other bytes than those, which are all now; one of another
        form tells nothing.
        """
        match = _ETAG.fullmatch(etag or "")
        if match is None:
            return False
        pieces = self._pieces or [_md5()]  # an empty object has one piece, of no bytes
        if match[2] is None:
            return len(pieces) == 1 and match[1] != pieces[0].hexdigest()
        whole = _md5(b"".join(piece.digest() for piece in pieces)).hexdigest()
        return int(match[2]) == len(pieces) and match[1] != whole

    def piece_differs(self, number: int, data: bytes | memoryview) -> bool:
        return _md5(data).digest() != self._pieces[number].digest()


def _md5(data: bytes | memoryview = b"") -> hashlib._Hash:
    # Where MD5 is forbidden (FIPS) it is so for security, which this is not.
    return hashlib.md5(data, usedforsecurity=False)
