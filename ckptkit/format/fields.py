"""Taking fields out of a decoded document: every one is checked, none is left over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckptkit.errors import CkptkitError, FormatError
from ckptkit.model import doc as document

LIMIT = 1 << 63


class Fields:
    """A map from a document, whose keys are taken one by one."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError("not a map", where=where, value=value)
        self._left = dict(value)
        self._where = where

    def at(self, key: str) -> str:
        """Where a key stands, for messages: `arrays.3.shape`."""
        return f"{self._where}.{key}" if self._where else key

    def has(self, key: str) -> bool:
        """Whether an optional key is there."""
        return key in self._left

    def any(self, key: str) -> Any:
        """The value as it is; the caller checks it."""
        if key not in self._left:
            raise FormatError("the field is missing", where=self.at(key))
        return self._left.pop(key)

    def integer(self, key: str, *, below: int = LIMIT) -> int:
        """An integer in [0, below)."""
        value = self.any(key)
        if type(value) is int and 0 <= value < below:
            return value
        return document.integer(value, self.at(key), most=below - 1)

    def number(self, key: str) -> float:
        """A finite float."""
        value = self.any(key)
        if type(value) not in (int, float) or not -(2**63) <= value < 2**64:
            raise FormatError("not a finite number", where=self.at(key), value=value)
        return float(value)

    def text(self, key: str) -> str:
        """A string."""
        value = self.any(key)
        return value if type(value) is str else document.text(value, self.at(key))

    def items(self, key: str) -> list[Any]:
        """A list."""
        value = self.any(key)
        if not isinstance(value, list):
            raise FormatError("not a list", where=self.at(key), value=value)
        return value

    def bytes(self, key: str) -> bytes:
        """A bin."""
        value = self.any(key)
        if not isinstance(value, bytes):
            raise FormatError("not bytes", where=self.at(key), value=type(value).__name__)
        return value

    def finish(self) -> None:
        """Refuse what this version does not know: it could change the meaning of the rest."""
        if self._left:
            raise FormatError(
                "fields that this version of the format does not have",
                where=self._where,
                value=list(self._left),
            )


@contextmanager
def located(where: str) -> Iterator[None]:
    """What is wrong inside is said to be in a file: `FILE: arrays.3.shape`."""
    try:
        yield
    except CkptkitError as error:
        error.where = f"{where}: {error.where}" if error.where else where
        raise


def extent(value: object, where: str) -> tuple[int, int]:
    """An (offset, length) pair."""
    if not isinstance(value, list) or len(value) != 2:
        raise FormatError("not an offset and a length", where=where, value=value)
    offset, length = document.integers(value, where, most=LIMIT - 1)
    return offset, length
