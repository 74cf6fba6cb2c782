"""A store that fails at one chosen operation, to test what a crash or a refusal leaves behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from typing import Literal

from ckptkit.errors import StorageError, UsageError
from ckptkit.storage import Store
from tests.storage.forwarding import ForwardingStore, T

EXIT_CODE = 17


class FailingStore(ForwardingStore):
    """Operation number `fail_at` (counted from 1) fails.

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
        super().__init__(store)
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

    def delete(self, keys: Iterable[str]) -> None:
        """One operation for each key, so that a deletion can fail half-way."""
        for key in keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        super().delete([key])
