"""From a location to the store behind it."""

from __future__ import annotations

import os

from ckptkit.errors import UsageError
from ckptkit.storage.local import LocalStore
from ckptkit.storage.location import Location
from ckptkit.storage.memory import MemoryStore
from ckptkit.storage.options import NO_OPTIONS, Address, Options
from ckptkit.storage.store import Store


def open_store(
    location: str | os.PathLike[str] | Location | Address, options: Options = NO_OPTIONS
) -> Store:
    """The store rooted at a location; nothing is created or read until the first call on it."""
    if isinstance(location, Address):
        options = {**location.options, **options}
        location = location.location
    parsed = Location.parse(location)
    if parsed.scheme not in ("file", "memory"):
        raise UsageError("no store for this kind of URL", value=f"{parsed.scheme}://")
    return MemoryStore(parsed) if parsed.scheme == "memory" else LocalStore(parsed)
