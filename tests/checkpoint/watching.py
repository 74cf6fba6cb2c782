"""Stores that record what is asked of them, or wait for a word at one operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckptkit.storage import Store
from tests.storage.failing import FailingStore

T = TypeVar("T")

NEVER = 1 << 60


class RecordingStore(FailingStore):
    """Notes the operations in order, those on keys with the key."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, fail_at=NEVER)
        self.log: list[str] = []

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        self.log.append(operation)
        return super().attempt(operation, action)

    def put(
        self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
    ) -> None:
        super().put(key, data, exclusive=exclusive)
        self.log[-1] = f"put {key}"

    def _delete(self, key: str) -> None:
        super()._delete(key)
        self.log[-1] = f"delete {key}"


class MeetingStore(FailingStore):
    """Lets nobody begin one kind of operation before a number of callers want it."""

    def __init__(self, store: Store, operation: str, callers: int) -> None:
        super().__init__(store, fail_at=NEVER)
        self._operation = operation
        self._meeting = threading.Barrier(callers)

    def attempt(self, operation: str, action: Callable[[], T]) -> T:
        if operation == self._operation:
            self._meeting.wait(20)
        return super().attempt(operation, action)


def operations_of(store: Store, action: Callable[[Store], object]) -> Sequence[str]:
    """The kinds of operations that an action asks of a store, in order."""
    recording = RecordingStore(store)
    action(recording)
    return [entry.partition(" ")[0] for entry in recording.log]
