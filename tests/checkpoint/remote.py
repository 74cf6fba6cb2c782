"""A store like that of an object server, in memory: what it is asked is counted, an open source has
asked nothing, and what cut-off writes have left can be made up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptkit.storage import Abilities, MemoryStore, Sink, Store
from ckptkit.storage.base.store import Entries, LendsNothing
from tests.storage.counting import CountingStore

MIB = 1 << 20
# A method named `list` hides the builtin.
Keys = list[tuple[str, ...]]
Sizes = list[int | None]


class RemoteStore(CountingStore):
    """Few large requests are fast, many at a time; only reads tell whether there is something."""

    def __init__(self, store: Store | None = None, **abilities: object) -> None:
        super().__init__(store or MemoryStore())
        self.behind = self._store
        self.at_once = 0
        """The most reads that ran at the same time."""
        self.pause = 0.0
        self.late = 0.0
        """By so many seconds the server's clock is behind."""
        self.left: Entries = []
        self.deleted: Keys = []
        self.sinks: Sizes = []
        self._running = 0
        self._abilities = replace(
            self._store.abilities,
            claims_names=False,
            open_survives_delete=False,
            has_folders=False,
            clock_of_its_own=True,
            waits_for_answers=True,
            part_size=16 * MIB,
            request_bytes=16 * MIB,
            gap_bytes=256 << 10,
            concurrency=16,
            **abilities,  # type: ignore[arg-type]
        )

    @property
    def abilities(self) -> Abilities:
        return self._abilities

    def open(self, key: str, size: int | None = None) -> Unasked:
        """An open source that has not looked whether the object is there, if its size is known."""
        return Unasked(self, key, self.size(key) if size is None else size)

    def create(
        self, key: str, extents: Sequence[int], *, memory: int | None = None, again: bool = False
    ) -> Sink:
        """Noted, with the memory that the sink may have."""
        self.sinks.append(memory)
        return super().create(key, extents, memory=memory, again=again)

    def list(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """By the server's clock."""
        return [
            replace(it, modified=it.modified - self.late) for it in super().list(prefix, deep=deep)
        ]

    def leftovers(self, prefix: str = "", *, deep: bool = True) -> Entries:
        """What was made up."""
        self.count("leftovers")
        return [entry for entry in self.left if entry.key.startswith(prefix)]

    def delete(self, keys: Iterable[str]) -> None:
        """Noted."""
        keys = tuple(keys)
        self.deleted.append(keys)
        self.left = [entry for entry in self.left if entry.key not in keys]
        super().delete(keys)

    def fetch(self, key: str, offset: int, buffer: memoryview) -> None:
        """One read."""
        with self._lock:
            self._running += 1
            self.at_once = max(self.at_once, self._running)
        try:
            if self.pause:
                time.sleep(self.pause)
            with self._store.open(key) as source:
                source.read_into(offset, buffer)
            self.count("read_into", read=buffer.nbytes)
        finally:
            with self._lock:
                self._running -= 1


@dataclass(slots=True)
class Unasked(LendsNothing):
    """A source of a `RemoteStore`."""

    store: RemoteStore
    key: str
    size: int

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        for buffer in buffers:
            self.store.fetch(self.key, offset, buffer)
            offset += buffer.nbytes

    def fetch(self, offset: int, length: int) -> memoryview:
        buffer = memoryview(bytearray(length))
        self.store.fetch(self.key, offset, buffer)
        return buffer

    def close(self) -> None:
        pass
