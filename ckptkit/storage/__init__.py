"""Bytes under a location: local files with direct I/O, memory, and decorators for tests."""

from __future__ import annotations

from ckptkit.storage.buffers import AlignedBuffer, BufferPool, default_pool
from ckptkit.storage.counting import CountingStore
from ckptkit.storage.factory import open_store
from ckptkit.storage.failing import FailingStore
from ckptkit.storage.local import LocalStore
from ckptkit.storage.location import Location
from ckptkit.storage.memory import MemoryStore
from ckptkit.storage.options import NO_OPTIONS, Address, Options
from ckptkit.storage.store import Abilities, Entry, Sink, Source, Store

__all__ = [
    "NO_OPTIONS",
    "Abilities",
    "Address",
    "AlignedBuffer",
    "BufferPool",
    "CountingStore",
    "Entry",
    "FailingStore",
    "LocalStore",
    "Location",
    "MemoryStore",
    "Options",
    "Sink",
    "Source",
    "Store",
    "default_pool",
    "open_store",
]
