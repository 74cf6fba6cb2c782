"""Bytes under a location: `open_store` gives files with direct I/O (`local`), memory, or servers
(`objects/`); what all of them stand on is in `base/`. Memory is told here: it is a whole store, and
has nothing else to care for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ckptkit.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError
from ckptkit.storage.base.address import (
    NO_OPTIONS,
    Address,
    Location,
    Options,
    checked_names,
    deletable_key,
    folder_of,
)
from ckptkit.storage.base.buffers import AlignedBuffer, BufferPool, default_pool
from ckptkit.storage.base.store import (
    Abilities,
    BufferSink,
    Closing,
    Entries,
    KeyedStore,
    Names,
    Parts,
    Sink,
    Source,
    Store,
    Stored,
    as_bytes,
    checked_range,
    checked_size,
)
from ckptkit.storage.local import LocalStore

__all__ = [
    "NO_OPTIONS",
    "Abilities",
    "Address",
    "AlignedBuffer",
    "BufferPool",
    "LocalStore",
    "Location",
    "MemoryStore",
    "Options",
    "Sink",
    "Source",
    "Store",
    "Stored",
    "default_pool",
    "open_store",
]


def open_store(
    location: str | os.PathLike[str] | Location | Address, options: Options = NO_OPTIONS
) -> Store:
    """The store rooted at a location; nothing is created or read until the first call on it.

    Options of the object stores change nothing for a path: one set may serve two places.
    """
    if isinstance(location, Address):
        options = {**location.options, **options}
        location = location.location
    parsed = Location.parse(location)
    if parsed.scheme in ("file", "memory"):
        checked_names(options)
        return MemoryStore(parsed) if parsed.scheme == "memory" else LocalStore(parsed)
    from ckptkit.storage.objects.store import open_objects  # noqa: PLC0415 — costs time

    return open_objects(parsed, options)


@dataclass(slots=True, weakref_slot=True)
class _Shelf:
    """What all stores of one name share; paths are keys behind the folder of the location."""

    objects: dict[str, tuple[bytes | bytearray, float]] = field(default_factory=dict)
    """With the time of each."""
    pending: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def refuse(self, where: str, path: str, *, taken: bool) -> None:
        """A path is an object or a folder, as it is on disk; with `taken` it must be neither."""
        names = self.objects.keys() | self.pending
        if taken and path in names:
            raise AlreadyExistsError(
                "there is an object of this name", where=where, hint="delete it first"
            )
        parts = path.split("/")
        above = {"/".join(parts[:count]) for count in range(1, len(parts))}
        if above & names or any(name.startswith(f"{path}/") for name in names):
            raise StorageError(
                "a name cannot be an object and a folder", where=where, hint="choose another name"
            )


_named: dict[str, _Shelf] = {}
# What no URL names must not outlive the last store that shows it.
_unnamed: WeakValueDictionary[str, _Shelf] = WeakValueDictionary()
_registry_lock = threading.Lock()


class MemoryStore(KeyedStore):
    """A store in memory; stores of one `memory://` name in a process show the same objects.

    Without a location it is private: it lives as long as the stores that show it.
    """

    abilities = Abilities(part_size=1 << 20)

    def __init__(self, location: Location | None = None) -> None:
        place = location or Location("memory", f"private-{os.urandom(8).hex()}")
        if place.scheme != "memory":
            raise UsageError("not a memory location", where=str(place), hint="use open_store")
        name, _, folder = place.path.partition("/")
        # Only this process knows what is behind the address.
        super().__init__(Address(place), folder)
        with _registry_lock:
            found = _named.get(name) or _unnamed.get(name) or _Shelf()
            if location is None:
                _unnamed[name] = found
            elif name not in _unnamed:
                _named[name] = found
        self._shelf = found

    def children(self, prefix: str = "") -> Names:
        folder = folder_of(prefix)
        start = len(folder) + 1 if folder else 0
        return sorted({it.key[start:].partition("/")[0] for it in self.list(prefix)})

    def list(self, prefix: str = "", *, deep: bool = True) -> Entries:
        below, root = self._below(prefix), len(self._folder)
        start = f"{below}/" if below else ""
        with self._shelf.lock:
            found = [item for item in self._shelf.objects.items() if item[0].startswith(start)]
        if not deep:
            found = [(path, item) for path, item in found if "/" not in path[len(start) :]]
        return [Stored(path[root:], len(data), at) for path, (data, at) in sorted(found)]

    def size(self, key: str) -> int:
        return len(self._get(key))

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        data = self._get(key)
        count = checked_range(self._where(key), len(data), start, length)
        return bytes(memoryview(data)[start : start + count])

    def read_whole(self, key: str, most: int) -> bytes:
        data = self._get(key)
        checked_size(self._where(key), len(data), most)
        return bytes(data)

    def open(self, key: str, size: int | None = None) -> MemorySource:  # noqa: ARG002 — is known
        """Open an object for reading; it stays readable when its name is deleted or replaced."""
        return MemorySource(self._where(key), self._get(key))

    def create(
        self,
        key: str,
        extents: Sequence[int],
        *,
        memory: int | None = None,  # noqa: ARG002
        again: bool = False,
    ) -> BufferSink:
        path, where = self._path(key), self._where(key)
        parts = Parts(where, extents)
        with self._shelf.lock:
            self._shelf.refuse(where, path, taken=not again)
            self._shelf.pending.add(path)
        data = bytearray(parts.total)

        def discard() -> None:
            with self._shelf.lock:
                self._shelf.pending.discard(path)

        def publish() -> None:
            with self._shelf.lock:
                self._shelf.pending.discard(path)
                self._shelf.objects[path] = data, time.time()

        return BufferSink(parts, memoryview(data), publish, discard)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        path, where = self._path(key), self._where(key)
        item = bytes(as_bytes(where, data)), time.time()
        with self._shelf.lock:
            self._shelf.refuse(where, path, taken=exclusive)
            self._shelf.objects[path] = item

    def learn(self, prefix: str = "") -> None:
        """Nothing: all is known."""

    def sync(self, keys: Iterable[str]) -> None:
        """Only that they are there: nothing here outlives the process."""
        for key in keys:
            self._get(key)

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:  # noqa: ARG002
        """Nothing: what is not finished dies with the process."""
        folder_of(prefix)
        return []

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._folder + deletable_key(key)
            with self._shelf.lock:
                self._shelf.objects.pop(path, None)

    def _get(self, key: str) -> bytes | bytearray:
        path = self._path(key)
        with self._shelf.lock:
            found = self._shelf.objects.get(path)
        if found is None:
            raise NotFoundError(
                "no such object", where=self._where(key), hint="memory:// lives in one process only"
            )
        return found[0]


class MemorySource(Closing):
    def __init__(self, where: str, data: bytes | bytearray) -> None:
        self._where = where
        self._data = memoryview(data).toreadonly()
        self.size = len(data)

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        views = [as_bytes(self._where, buffer) for buffer in buffers]
        checked_range(self._where, self.size, offset, sum(view.nbytes for view in views))
        for view in filter(len, views):
            view[:] = self._data[offset : offset + view.nbytes]
            offset += view.nbytes

    def fetch(self, offset: int, length: int) -> memoryview:
        checked_range(self._where, self.size, offset, length)
        return self._data[offset : offset + length]

    def is_at_hand(self, offset: int) -> bool:  # noqa: ARG002
        return True

    def lend(
        self,
        offset: int,
        length: int,
        *,
        past_cache: bool = False,  # noqa: ARG002
    ) -> AbstractContextManager[memoryview]:
        return nullcontext(self.fetch(offset, length))

    def close(self) -> None:
        self._data.release()
