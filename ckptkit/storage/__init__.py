"""Bytes under a location: files with direct I/O, memory, and servers in `objects/`; what all of
them stand on is in `base/`.
"""

from __future__ import annotations

import os

from ckptkit.storage.base.address import NO_OPTIONS, Address, Location, Options, checked_names
from ckptkit.storage.base.buffers import AlignedBuffer, BufferPool, default_pool
from ckptkit.storage.base.store import Abilities, Sink, Source, Store, Stored
from ckptkit.storage.local import LocalStore
from ckptkit.storage.memory import MemoryStore

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
