"""From a location to the store behind it."""

from __future__ import annotations

import os

from ckptkit.storage.local import LocalStore
from ckptkit.storage.location import Location
from ckptkit.storage.memory import MemoryStore
from ckptkit.storage.options import NO_OPTIONS, Address, Options, checked_names
from ckptkit.storage.store import Store


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
    # Here, because what reaches object stores costs time to import.
    from ckptkit.storage.objects.store import open_objects

    return open_objects(parsed, options)
