"""From a location to the store behind it."""

from __future__ import annotations

import os

from ckptkit.storage.local import LocalStore
from ckptkit.storage.location import Location
from ckptkit.storage.memory import MemoryStore
from ckptkit.storage.store import Store


def open_store(location: str | os.PathLike[str] | Location) -> Store:
    """The store rooted at a location; nothing is created or read until the first call on it."""
    parsed = Location.parse(location)
    return MemoryStore(parsed) if parsed.scheme == "memory" else LocalStore(parsed)
