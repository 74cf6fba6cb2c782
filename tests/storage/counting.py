"""A store that counts what is asked of another one."""

from __future__ import annotations

import threading
from collections import Counter

from ckptkit.storage import Store
from tests.storage.forwarding import ForwardingStore


class CountingStore(ForwardingStore):
    """Counts operations by name, and the bytes that were moved."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
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
