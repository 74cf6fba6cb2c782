"""A store that counts what is asked of another one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from ckptkit.storage.location import Location
from ckptkit.storage.options import Address
from ckptkit.storage.store import Abilities, Closing, Entries, Names, Sink, Source, Store


class CountingStore:
    """Passes everything on and counts operations by name, and the bytes that were moved."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.operations: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0

    @property
    def requests(self) -> int:
        """All operations together."""
        return self.operations.total()

    def reset(self) -> None:
        """Count from zero again."""
        with self._lock:
            self.operations.clear()
            self.bytes_read = self.bytes_written = 0

    def count(self, operation: str, *, read: int = 0, written: int = 0) -> None:
        """Count one operation that succeeded, and its bytes."""
        with self._lock:
            self.operations[operation] += 1
            self.bytes_read += read
            self.bytes_written += written

    @property
    def location(self) -> Location:
        """Where the counted store is."""
        return self._store.location

    @property
    def address(self) -> Address:
        """What opens the store behind."""
        return self._store.address

    @property
    def abilities(self) -> Abilities:
        """What the counted store does well."""
        return self._store.abilities

    def children(self, prefix: str = "") -> Names:
        """Counted as `children`."""
        names = self._store.children(prefix)
        self.count("children")
        return names

    def links(self, prefix: str = "") -> dict[str, str]:
        """Not counted."""
        return self._store.links(prefix)

    def list(self, prefix: str = "") -> Entries:
        """Counted as `list`."""
        entries = self._store.list(prefix)
        self.count("list")
        return entries

    def size(self, key: str) -> int:
        """Counted as `size`."""
        size = self._store.size(key)
        self.count("size")
        return size

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Counted as `read`, with its bytes."""
        data = self._store.read(key, start, length)
        self.count("read", read=len(data))
        return data

    def read_whole(self, key: str, most: int) -> bytes:
        """Counted as `read_whole`, with its bytes."""
        data = self._store.read_whole(key, most)
        self.count("read_whole", read=len(data))
        return data

    def open(self, key: str, size: int | None = None) -> Source:
        """Counted as `open`; each read of the source as `read_into`."""
        source = _CountingSource(self, self._store.open(key, size))
        self.count("open")
        return source

    def create(
        self, key: str, extents: Sequence[int], *, memory: int | None = None, again: bool = False
    ) -> Sink:
        """Counted as `create`; the sink's calls as `write`, `finish` and `abort`."""
        sink = _CountingSink(self, self._store.create(key, extents, memory=memory, again=again))
        self.count("create")
        return sink

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        """Counted as `put`, with its bytes."""
        self._store.put(key, data, exclusive=exclusive)
        self.count("put", written=memoryview(data).nbytes)

    def sync(self, keys: Iterable[str]) -> None:
        """Counted as `sync`, once however many keys."""
        self._store.sync(keys)
        self.count("sync")

    def learn(self, prefix: str = "") -> None:
        """Not counted."""
        self._store.learn(prefix)

    def room(self) -> int | None:
        """Not counted."""
        return self._store.room()

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """Counted as `leftovers`."""
        entries = self._store.leftovers(prefix, deep=deep)
        self.count("leftovers")
        return entries

    def delete(self, keys: Iterable[str]) -> None:
        """Counted as `delete`, once however many keys."""
        self._store.delete(keys)
        self.count("delete")


class _CountingSource(Closing):
    def __init__(self, counting: CountingStore, source: Source) -> None:
        self._counting = counting
        self._source = source

    @property
    def size(self) -> int:
        return self._source.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._source.read_into(offset, buffer)
        self._counting.count("read_into", read=memoryview(buffer).nbytes)

    def fetch(self, offset: int, length: int) -> memoryview:
        data = self._source.fetch(offset, length)
        self._counting.count("read_into", read=data.nbytes)
        return data

    def close(self) -> None:
        self._source.close()


class _CountingSink:
    def __init__(self, counting: CountingStore, sink: Sink) -> None:
        self._counting = counting
        self._sink = sink

    def write(self, part: int, data: memoryview) -> None:
        self._sink.write(part, data)
        self._counting.count("write", written=memoryview(data).nbytes)

    @contextmanager
    def filling(self, part: int) -> Iterator[memoryview]:
        with self._sink.filling(part) as memory:
            size = memory.nbytes
            yield memory
        self._counting.count("write", written=size)

    def finish(self) -> None:
        self._sink.finish()
        self._counting.count("finish")

    def abort(self) -> None:
        self._sink.abort()
        self._counting.count("abort")
