"""A store that fails at one chosen operation, to test what a crash or a refusal leaves behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, TypeVar

from ckptkit.errors import StorageError, UsageError
from ckptkit.storage.location import Location
from ckptkit.storage.options import Address
from ckptkit.storage.store import Abilities, Closing, Entries, Names, Sink, Source, Store

T = TypeVar("T")

EXIT_CODE = 17


class FailingStore:
    """Passes everything on, but the operation number `fail_at` (counted from 1) fails.

    It fails before it is done, or with `after` once it is done: as when only the answer is lost.
    `how="exit"` ends the process on the spot with `EXIT_CODE`, as a kill would.
    """

    def __init__(
        self,
        store: Store,
        *,
        fail_at: int,
        how: Literal["raise", "exit"] = "raise",
        after: bool = False,
    ) -> None:
        if fail_at < 1 or how not in ("raise", "exit"):
            raise UsageError(
                "no such failure", value=(fail_at, how), hint='fail_at >= 1, how "raise" or "exit"'
            )
        self._store = store
        self._fail_at = fail_at
        self._how = how
        self._after = after
        self._lock = threading.Lock()
        self.operations = 0

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        """Do one operation, unless it is the one that fails."""
        with self._lock:
            self.operations += 1
            fails = self.operations == self._fail_at
        if fails and not self._after:
            self._fail(operation)
        result = action()
        if fails:
            self._fail(operation)
        return result

    def _fail(self, operation: str) -> None:
        if self._how == "exit":
            os._exit(EXIT_CODE)
        raise StorageError(
            f"made to fail at operation {self._fail_at}, {operation}",
            where=str(self.location),
            hint="this store fails on purpose",
        )

    @property
    def location(self) -> Location:
        """Where the store behind is."""
        return self._store.location

    @property
    def address(self) -> Address:
        """What opens the store behind."""
        return self._store.address

    @property
    def abilities(self) -> Abilities:
        """What the store behind does well."""
        return self._store.abilities

    def children(self, prefix: str = "") -> Names:
        """One operation."""
        return self.attempt("children", lambda: self._store.children(prefix))

    def links(self, prefix: str = "") -> dict[str, str]:
        """No operation."""
        return self._store.links(prefix)

    def list(self, prefix: str = "") -> Entries:
        """One operation."""
        return self.attempt("list", lambda: self._store.list(prefix))

    def size(self, key: str) -> int:
        """One operation."""
        return self.attempt("size", lambda: self._store.size(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """One operation."""
        return self.attempt("read", lambda: self._store.read(key, start, length))

    def read_whole(self, key: str, most: int) -> bytes:
        """One operation."""
        return self.attempt("read_whole", lambda: self._store.read_whole(key, most))

    def open(self, key: str, size: int | None = None) -> Source:
        """One operation, and one for each `read_into`."""
        return _FailingSource(self, self.attempt("open", lambda: self._store.open(key, size)))

    def create(
        self, key: str, extents: Sequence[int], *, memory: int | None = None, again: bool = False
    ) -> Sink:
        """One operation, and one for each `write` and `finish`."""
        sink = self.attempt(
            "create", lambda: self._store.create(key, extents, memory=memory, again=again)
        )
        return _FailingSink(self, sink)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        """One operation."""
        self.attempt("put", lambda: self._store.put(key, data, exclusive=exclusive))

    def sync(self, keys: Iterable[str]) -> None:
        """One operation."""
        self.attempt("sync", lambda: self._store.sync(keys))

    def learn(self, prefix: str = "") -> None:
        """No operation."""
        self._store.learn(prefix)

    def room(self) -> int | None:
        """No operation."""
        return self._store.room()

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """One operation."""
        return self.attempt("leftovers", lambda: self._store.leftovers(prefix, deep=deep))

    def delete(self, keys: Iterable[str]) -> None:
        """One operation for each key, so that a deletion can fail half-way."""
        for key in keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        self.attempt("delete", lambda: self._store.delete([key]))


class _FailingSource(Closing):
    def __init__(self, failing: FailingStore, source: Source) -> None:
        self._failing = failing
        self._source = source

    @property
    def size(self) -> int:
        return self._source.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._failing.attempt("read_into", lambda: self._source.read_into(offset, buffer))

    def fetch(self, offset: int, length: int) -> memoryview:
        return self._failing.attempt("read_into", lambda: self._source.fetch(offset, length))

    def close(self) -> None:
        self._source.close()


class _FailingSink:
    def __init__(self, failing: FailingStore, sink: Sink) -> None:
        self._failing = failing
        self._sink = sink

    def write(self, part: int, data: memoryview) -> None:
        self._failing.attempt("write", lambda: self._sink.write(part, data))

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        with ExitStack() as stack:
            yield stack.enter_context(self._sink.filling(part))
            self._failing.attempt("write", stack.close)

    def finish(self) -> None:
        self._failing.attempt("finish", self._sink.finish)

    def abort(self) -> None:
        self._sink.abort()
