"""The folder of a foreign checkpoint, as its reader sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.storage import Store, Stored

# Metadata is read whole, so it is bounded: no checkpoint that exists has a tenth of that.
MOST_BYTES = 1 << 30


class Folder:
    """Files of a store by key, and reads of their metadata."""

    def __init__(self, store: Store, files: Mapping[str, Stored], only: str | None = None) -> None:
        """With `only` the checkpoint is that one file."""
        self.store = store
        self.files = files
        self.only = only
        self.seen: Any = hashlib.sha256()
        """Of all metadata that was read."""

    def where(self, key: str) -> str:
        """A file's place, for messages."""
        return str(self.store.location / key)

    def size(self, key: str) -> int:
        """The bytes of a file; FormatError where it is missing."""
        if key not in self.files:
            raise FormatError(
                "a file of the checkpoint is missing",
                where=self.where(key),
                hint="it was not copied along; copy the folder again",
            )
        return self.files[key].size

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Some metadata of a file, which is neither cut short nor larger than metadata is."""
        size = self.size(key)
        length = size - start if length is None else length
        if start < 0 or length < 0 or start + length > size:
            raise FormatError(
                f"the file has {size} bytes, its metadata needs those to {start + length}",
                where=self.where(key),
                hint="it was cut short; copy it again",
            )
        if length > MOST_BYTES:
            raise FormatError(
                f"metadata of more than {MOST_BYTES} bytes", where=self.where(key), value=length
            )
        data = self.store.read(key, start, length)
        self.seen.update(data)
        return data
