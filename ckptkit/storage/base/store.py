"""What every store can do: the questions that the engine asks about bytes, and nothing else. And
what stores have in common: how keys, ranges and the parts of an object are checked.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Protocol, Self, TypeAlias, runtime_checkable

from ckptkit.errors import CorruptionError, FormatError, StorageError, UsageError
from ckptkit.storage.base.address import Address, Location, checked_key, folder_of
from ckptkit.storage.base.buffers import copy_bytes, default_pool


@dataclass(frozen=True, slots=True)
class Abilities:
    """How stores differ, so that callers ask instead of trying; the defaults are those of files."""

    part_size: int
    """The number of bytes per part that the store likes best."""
    exclusive_create: bool = True
    """`put(exclusive=True)` has exactly one winner among racing creators."""
    claims_names: bool = True
    """`create` takes the name at once: of two sinks of one name the second is refused, and what is
    seen may still be incomplete, or not durable. Elsewhere what is seen is whole and durable, what
    is not finished shows in `leftovers` alone, and the last to finish wins."""
    open_survives_delete: bool = True
    """`open` finds out whether there is an object, and what it opened outlives the name. Elsewhere
    each read asks for the name again, and nothing asks before."""
    has_folders: bool = True
    """A name is an object or a folder, and a folder may be empty."""
    clock_of_its_own: bool = False
    """`Stored.modified` is by the clock of a server, which may be wrong."""
    waits_for_answers: bool = False
    """A request is an answer waited for: few large ones are fast, many at a time, and what comes
    takes memory of its own. Elsewhere a read is a copy, and as many are fast as there are cores."""
    request_bytes: int = 2 << 20
    """Reads of about this many bytes at a time are fast."""
    gap_bytes: int = 4 << 10
    """So many bytes that nobody needs are read sooner than another request is made."""
    concurrency: int = 0
    """How many requests at a time are fast; 0: the store has no limit of its own."""


@dataclass(frozen=True, slots=True)
class Stored:
    key: str
    size: int
    modified: float
    """Unix seconds."""


# A method named `list` hides the builtin from annotations in the same class.
Names: TypeAlias = list[str]
Entries: TypeAlias = list[Stored]


class Source(AbstractContextManager["Source", None], Protocol):
    """One object, open for reading from any thread; close it once no read is running."""

    @property
    def size(self) -> int:
        """The number of bytes of the object."""

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        """Fill whole buffers, one after another, with what is there from `offset` on;
        CorruptionError where the object is too short.
        """

    def fetch(self, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes, in memory of the store's own: what came over a network is not
        copied.
        """

    def is_at_hand(self, offset: int) -> bool:
        """Whether a byte is in memory, or there is no telling; False where a device alone has it.
        Who asks again soon is told that it is: what is needed twice had better be in the cache.
        """

    def lend(
        self, offset: int, length: int, *, past_cache: bool = False
    ) -> AbstractContextManager[memoryview | None]:
        """These bytes where they lie in memory anyway, for as long as the block lasts; None where
        they do not, or nothing is won by it. With `past_cache`, where only a device has them, in
        memory that it brings them to sooner than the page cache would.
        """

    def close(self) -> None:
        """Free what the source holds; closing twice is fine."""


class Sink(Protocol):
    """One object being written: parts in any order from any thread, then `finish` or `abort`.

    Every part is written once and with exactly its length; parts of length zero may be left out.
    After a write that failed, only `abort` is left. Both endings wait for writes still running.
    """

    def write(self, part: int, data: memoryview) -> None:
        """Write part number `part`; the data may be reused as soon as this returns."""

    def filling(self, part: int) -> AbstractContextManager[memoryview]:
        """Memory to put part number `part` into, which is written when the block ends; what a sink
        keeps anyway is not copied then. Nothing is written where the block raises.
        """

    def finish(self) -> None:
        """Make the object durable, then visible; refused while parts are missing."""

    def abort(self) -> None:
        """Leave nothing behind; does nothing when called again or after `finish`, never raises."""


@runtime_checkable
class Store(Protocol):
    """Objects under one location, named by relative keys such as `data/7f3a/rank-00000.zip`.

    Keys are `/`-separated, without empty, `.` or `..` components; components that start with
    `.tmp-` are the store's own. A prefix is `""` (everything) or a key read as a folder, a
    trailing `/` allowed. All methods may be called from any thread, and raise nothing but
    `CkptkitError`s.
    """

    @property
    def location(self) -> Location:
        """Where the keys begin."""

    @property
    def address(self) -> Address:
        """What opens the same store in another process; it may hold credentials."""

    @property
    def abilities(self) -> Abilities:
        """What this store does well."""

    def children(self, prefix: str = "") -> Names:
        """The names directly below `prefix`, sorted; none where there is nothing."""

    def links(self, prefix: str = "") -> dict[str, str]:
        """The names directly below `prefix` that are symbolic links, and what they lead to.

        Reads follow them. `list` does not enter those that lead to folders, nothing is written or
        deleted behind one (StorageError), and `delete` of one takes the name. None where a store
        has no such thing.
        """

    def list(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """Every object below `prefix`, or without `deep` those directly below it, sorted by key;
        keys are relative to the location.
        """

    def size(self, key: str) -> int:
        """The number of bytes of an object; NotFoundError where there is none."""

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Exactly `length` bytes (None: to the end); CorruptionError where they are not there."""

    def read_whole(self, key: str, most: int) -> bytes:
        """A small object in one request; FormatError, before any of it is in memory, where it has
        more than `most` bytes.
        """

    def open(self, key: str, size: int | None = None) -> Source:
        """Open an object for reading; NotFoundError where there is none.

        A store that would have to ask for the size takes the caller's word for it: then an object
        that is missing or shorter is found by the reads.
        """

    def create(
        self, key: str, extents: Sequence[int], *, memory: int | None = None, again: bool = False
    ) -> Sink:
        """Begin a new object: the concatenation of parts of these lengths.

        Until `finish` the object is invisible, or (in a local folder) visible but incomplete. What
        is there when it is begun is never touched: AlreadyExistsError, from `finish` at the latest.
        Of two begun together `Abilities.claims_names` says which wins. `memory` roughly bounds what
        the sink buffers, provided parts come about in order. Parts filled in place count. Parts
        larger than what is sent at a time, and local files, do not.

        With `again` the name may be taken, then or later, by another writer of the same bytes: the
        object is invisible until `finish`, which replaces what is there as a whole.
        """

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        """Store a small object whole: atomic, and durable on return.

        Replaces what is there, or with `exclusive` raises AlreadyExistsError: of racing exclusive
        creators exactly one returns. An exclusive one that is killed may leave an empty object.
        """

    def learn(self, prefix: str = "") -> None:
        """Find out what of `abilities` only asking tells, by a scratch object below `prefix`;
        nothing where that is known. Whoever does not call it pays for it at the first exclusive
        `put`.
        """

    def sync(self, keys: Iterable[str]) -> None:
        """Make objects durable whose writer may have died before it could; NotFoundError where
        there is none.
        """

    def room(self) -> int | None:
        """The bytes that can still be written; None where there is no telling."""

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """What writes that were cut off left below `prefix`, sorted by key; without `deep` only
        what lies directly below it, where a store has folders.

        Writes under way are among it: only age tells them apart. The keys are for `delete` alone.
        A store that can leave nothing of its own returns an empty list.
        """

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects or leftovers, the first before any other, also across a crash; missing
        ones are fine.

        Folders left empty, those of missing keys included, go too where the store has folders.
        """


class KeyedStore:
    """What stores share in which a folder is only the beginning of a name: memory and servers."""

    def __init__(self, address: Address, folder: str) -> None:
        self.address = address
        self.location: Location = address.location
        self._folder = f"{folder}/" if folder else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.location)!r})"

    def links(self, prefix: str = "") -> dict[str, str]:
        folder_of(prefix)
        return {}

    def room(self) -> int | None:
        return None

    def _path(self, key: str) -> str:
        return self._folder + checked_key(key)

    def _below(self, prefix: str) -> str:
        return (self._folder + folder_of(prefix)).rstrip("/")

    def _where(self, key: str) -> str:
        return f"{self.location}/{key}"


class Closing(ABC):
    """A `with` block gives the thing itself, and closes it however the block ends."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LendsNothing(Closing):
    """A source whose bytes are never in memory anyway."""

    def is_at_hand(self, offset: int) -> bool:  # noqa: ARG002
        return True

    def lend(
        self,
        offset: int,  # noqa: ARG002
        length: int,  # noqa: ARG002
        *,
        past_cache: bool = False,  # noqa: ARG002
    ) -> AbstractContextManager[None]:
        return nullcontext()


def checked_range(where: str, size: int, start: int, length: int | None) -> int:
    """The number of bytes to read, once they are known to lie inside the object."""
    if start < 0 or (length is not None and length < 0):
        raise UsageError(
            "a byte range must not be negative",
            where=where,
            value=(start, length),
            hint="count from the start",
        )
    count = size - start if length is None else length
    if count < 0 or start + count > size:
        raise CorruptionError(
            f"the object has {size} bytes, too few for bytes {start} to {start + max(count, 0)}",
            where=where,
            hint="it was cut short, or what points into it is wrong; restore it from a copy",
        )
    return count


def checked_size(where: str, size: int, most: int) -> int:
    """The size of an object that is read whole, once it is known to be bounded."""
    if size > most:
        raise FormatError(
            f"the object has {size} bytes, at most {most} can be right",
            where=where,
            hint="it is not what its name says; restore it from a copy",
        )
    return size


def as_bytes(where: str, data: object) -> memoryview:
    """A flat view of the bytes of any contiguous buffer."""
    try:
        view = memoryview(data)  # type: ignore[arg-type]
        return view.cast("B") if view.nbytes else memoryview(b"")
    except TypeError as error:
        raise UsageError(
            "the data must be one contiguous run of bytes",
            where=where,
            hint="copy it first: bytes(data)",
        ) from error


# S3 takes 10,000 parts.
_MOST_PIECES = 9_000
_PIECE_STEP = 1 << 20


def piece_size(total: int, preferred: int) -> int:
    """The bytes that a server is sent at a time of an object of so many: as preferred, or as many
    as few enough pieces need.
    """
    needed = -(-total // _MOST_PIECES)
    return max(preferred, -(-needed // _PIECE_STEP) * _PIECE_STEP)


class Parts:
    """Which parts of one object are written, being written, or missing: each is written once and
    whole, and both endings wait for those being written.
    """

    def __init__(self, where: str, extents: Sequence[int]) -> None:
        self.sizes = [index(extent) for extent in extents]
        if self.sizes and min(self.sizes) < 0:
            least = min(self.sizes)
            raise UsageError("a part cannot have a negative length", where=where, value=least)
        self.total = sum(self.sizes)
        self.where = where
        self._offsets = list(accumulate(self.sizes, initial=0))
        self._largest = max(self.sizes, default=0)
        self._claimed = bytearray(len(self.sizes))
        self._missing = sum(1 for size in self.sizes if size)
        self._running = 0
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextmanager
    def claiming(self, part: int, size: int) -> Iterator[int]:
        """Claim a part of so many bytes: yields its offset; an error inside spoils the object."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._error is not None:
                raise self._spoiled() from self._error
            if size != self.size(part):
                raise self._misuse(f"part {part} has {self.sizes[part]} bytes, not {size}")
            if self._claimed[part]:
                raise self._misuse(f"part {part} was written before")
            self._claimed[part] = 1
            # Those of length zero are not missed.
            self._missing -= size > 0
            self._running += 1
        try:
            yield self._offsets[part]
        except BaseException as error:
            if self._error is None:
                self._error = error
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    @contextmanager
    def loan(self, part: int) -> Iterator[memoryview]:
        """Memory for a part, whose address suits its offset; all are of a size, to be used again
        for the next.
        """
        size = self.size(part)
        loan = default_pool().take(self._largest, congruent_to=self._offsets[part])
        # The slice is released before the loan ends: memory still looked at is not used again.
        with loan as memory, memory[:size] as data:
            yield data

    def size(self, part: int) -> int:
        if not 0 <= part < len(self.sizes):
            raise self._misuse(f"there is no part {part} of {len(self.sizes)}")
        return self.sizes[part]

    def complete(self) -> None:
        """Take no more parts, wait for those being written, and make sure that none is missing."""
        with self._changed:
            if self._closed:
                raise self._misuse("finished or aborted already")
            if self._missing:
                raise self._misuse(f"{self._missing} of {len(self.sizes)} parts were not written")
            self._wait()
        if self._error is not None:
            raise self._spoiled() from self._error

    def close(self) -> None:
        """Take no more parts and wait for those being written."""
        with self._changed:
            self._wait()
        # Its traceback knows whoever keeps this.
        self._error = None

    def _wait(self) -> None:
        # A descriptor closed under a running write may by then belong to another file.
        self._closed = True
        self._changed.wait_for(lambda: self._running == 0)

    def _misuse(self, what: str) -> UsageError:
        return UsageError(what, where=self.where, hint="write every part once, whole, then finish")

    def _spoiled(self) -> StorageError:
        return StorageError(
            "an earlier write to this object failed", where=self.where, hint="abort and start over"
        )


@dataclass(frozen=True, eq=False)
class BufferSink:
    """A new object that is in memory until it is finished, and then stored at once."""

    parts: Parts
    memory: memoryview
    publish: Callable[[], None]
    discard: Callable[[], None]

    def write(self, part: int, data: memoryview) -> None:
        view = as_bytes(self.parts.where, data)
        with self.parts.claiming(part, view.nbytes) as offset:
            copy_bytes(view, self.memory[offset : offset + view.nbytes])

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        size = self.parts.size(part)
        with (
            self.parts.claiming(part, size) as offset,
            self.memory[offset : offset + size] as memory,
        ):
            yield memory

    def finish(self) -> None:
        self.parts.complete()
        self.publish()

    def abort(self) -> None:
        self.parts.close()
        self.discard()
