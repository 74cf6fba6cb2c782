"""A store that passes everything on to another one, and lets those derived from it look at each
operation: of the store, and of what was opened or created on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from ckptkit.storage import Abilities, Address, Location, Sink, Source, Store
from ckptkit.storage.base.store import Entries, LendsNothing, Names

T = TypeVar("T")


class ForwardingStore:
    """`links`, `learn` and `room` are no operations; `abort` is one that is only counted."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        """Do one operation."""
        return action()

    def count(self, operation: str, *, read: int = 0, written: int = 0) -> None:
        """One operation has succeeded, and moved so many bytes."""

    def pass_on(
        self, operation: str, action: Callable[[], T], *, read: int = 0, written: int = 0
    ) -> T:
        result = self.attempt(operation, action)
        if isinstance(result, bytes | memoryview):
            read = len(result)
        self.count(operation, read=read, written=written)
        return result

    @property
    def location(self) -> Location:
        return self._store.location

    @property
    def address(self) -> Address:
        return self._store.address

    @property
    def abilities(self) -> Abilities:
        return self._store.abilities

    def links(self, prefix: str = "") -> dict[str, str]:
        return self._store.links(prefix)

    def learn(self, prefix: str = "") -> None:
        self._store.learn(prefix)

    def room(self) -> int | None:
        return self._store.room()

    def children(self, prefix: str = "") -> Names:
        return self.pass_on("children", lambda: self._store.children(prefix))

    def list(self, prefix: str = "", *, deep: bool = True) -> Entries:
        return self.pass_on("list", lambda: self._store.list(prefix, deep=deep))

    def size(self, key: str) -> int:
        return self.pass_on("size", lambda: self._store.size(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        return self.pass_on("read", lambda: self._store.read(key, start, length))

    def read_whole(self, key: str, most: int) -> bytes:
        return self.pass_on("read_whole", lambda: self._store.read_whole(key, most))

    def open(self, key: str, size: int | None = None) -> Source:
        """One operation, and one for each `read_into` or `fetch`."""
        return _Source(self, self.pass_on("open", lambda: self._store.open(key, size)))

    def create(
        self, key: str, extents: Sequence[int], *, memory: int | None = None, again: bool = False
    ) -> Sink:
        """One operation, and one for each part and for the end."""
        sink = self.pass_on(
            "create", lambda: self._store.create(key, extents, memory=memory, again=again)
        )
        return _Sink(self, sink)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        size = memoryview(data).nbytes
        self.pass_on("put", lambda: self._store.put(key, data, exclusive=exclusive), written=size)

    def sync(self, keys: Iterable[str]) -> None:
        self.pass_on("sync", lambda: self._store.sync(keys))

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:
        return self.pass_on("leftovers", lambda: self._store.leftovers(prefix, deep=deep))

    def delete(self, keys: Iterable[str]) -> None:
        """One operation, however many keys."""
        self.pass_on("delete", lambda: self._store.delete(keys))


class _Source(LendsNothing):
    """It lends nothing, so that all is asked for that is not in a cache."""

    def __init__(self, through: ForwardingStore, source: Source) -> None:
        self._through = through
        self._source = source

    @property
    def size(self) -> int:
        return self._source.size

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        size = sum(memoryview(buffer).nbytes for buffer in buffers)
        self._through.pass_on(
            "read_into", lambda: self._source.read_into(offset, *buffers), read=size
        )

    def fetch(self, offset: int, length: int) -> memoryview:
        return self._through.pass_on("read_into", lambda: self._source.fetch(offset, length))

    def close(self) -> None:
        self._source.close()


class _Sink:
    def __init__(self, through: ForwardingStore, sink: Sink) -> None:
        self._through = through
        self._sink = sink

    def write(self, part: int, data: memoryview) -> None:
        size = memoryview(data).nbytes
        self._through.pass_on("write", lambda: self._sink.write(part, data), written=size)

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        with ExitStack() as stack:
            memory = stack.enter_context(self._sink.filling(part))
            size = memory.nbytes
            yield memory
            self._through.pass_on("write", stack.close, written=size)

    def finish(self) -> None:
        self._through.pass_on("finish", self._sink.finish)

    def abort(self) -> None:
        self._sink.abort()
        self._through.count("abort")
