"""The questions to an object server that both engines answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ckptkit.errors import StorageError
from ckptkit.storage.store import Entries, Names


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
