"""How fast a source is read and a destination written: a short look, for an estimate."""

from __future__ import annotations

import secrets
import time

import numpy as np

from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.sources import Sources
from ckptkit.storage import Store, default_pool

_READ, _WRITTEN, _PART = 64 << 20, 64 << 20, 8 << 20


def seconds_for(checkpoint: Checkpoint, store: Store, bytes_read: int, bytes_written: int) -> float:
    """About how long it takes to move so many bytes, with reading and writing beside each
    other.
    """
    reading = bytes_read / _reading_speed(checkpoint) if bytes_read else 0.0
    writing = bytes_written / _writing_speed(store) if bytes_written else 0.0
    return max(reading, writing)


def _reading_speed(checkpoint: Checkpoint) -> float:
    manifest = checkpoint.manifest
    sources = Sources(checkpoint.store, checkpoint.prefix, manifest)
    # Of chunks all over the step: its beginning may be in a cache, and the rest not.
    rows = np.linspace(0, len(manifest.pack) - 1, 64).astype(np.int64)
    done, began = 0, time.perf_counter()
    try:
        with default_pool().take(_PART) as memory:
            for row in np.unique(rows).tolist():
                size = min(_PART, int(manifest.length[row]))
                with sources.use(int(manifest.pack[row])) as source, memory[:size] as data:
                    source.read_into(int(manifest.offset[row]), data)
                done += size
                if done >= _READ:
                    break
    finally:
        sources.close()
    return max(1, done) / max(1e-9, time.perf_counter() - began)


def _writing_speed(store: Store) -> float:
    """By an object that is given up before anyone can see it."""
    parts = [_PART] * (_WRITTEN // _PART)
    sink = store.create(f"probe-{secrets.token_hex(8)}", parts)
    try:
        began = time.perf_counter()
        with default_pool().take(_PART) as memory:
            np.frombuffer(memory, np.uint8)[:] = 1
            for number in range(len(parts)):
                sink.write(number, memory)
        seconds = time.perf_counter() - began
    finally:
        sink.abort()
    return _WRITTEN / max(1e-9, seconds)
