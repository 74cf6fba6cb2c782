"""How fast a source is read and a destination written: a short look, for an estimate."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ckptkit.checkpoint.places import data_prefix
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.reshard.budget import Budget
from ckptkit.format.manifest import pack_name
from ckptkit.storage import Store, default_pool

_PART = 8 << 20
_PARTS, _CHUNKS = 16, 64


def seconds_for(
    checkpoint: Checkpoint, place: tuple[Store, str], budget: Budget, nbytes: tuple[int, int]
) -> float:
    """About how long it takes to read and to write so many bytes, beside each other; the place is a
    store and the folder of a step in it.
    """
    workers = budget.workers
    read, written = nbytes
    reading = read / _reading_speed(checkpoint, workers * budget.pace.requests) if read else 0.0
    writing = written / _writing_speed(*place, budget, written) if written else 0.0
    return max(reading, writing)


def _reading_speed(checkpoint: Checkpoint, workers: int) -> float:
    manifest = checkpoint.manifest
    # Chunks all over the step: its beginning may be in a cache, and the rest not.
    rows = np.unique(np.linspace(0, len(manifest.pack) - 1, _CHUNKS).astype(np.int64)).tolist()
    sources = OpenPacks(checkpoint.store, checkpoint.prefix, manifest)

    def read(row: int) -> int:
        size = min(_PART, int(manifest.length[row]))
        pack, offset = int(manifest.pack[row]), int(manifest.offset[row])
        loan = default_pool().take(_PART)
        with loan as memory, memory[:size] as data, sources.use(pack) as source:
            source.read_into(offset, data)
        return size

    try:
        return _speed(read, rows, workers)
    finally:
        sources.close()


def _writing_speed(store: Store, prefix: str, budget: Budget, most: int) -> float:
    """Of at most so many bytes, by a pack that is given up before anyone can take it for one; where
    even that is cut off, `prune` finds it.
    """
    folder = data_prefix(prefix, f"probe-{secrets.token_hex(8)}")
    size = min(_PART, most)
    parts = min(_PARTS, most // size)
    key, is_kept = f"{folder}/{pack_name(0)}", not store.abilities.is_file_system
    sink = store.create(key, [size] * parts, memory=budget.ends.sink_bytes)

    def write(part: int) -> int:
        with default_pool().take(size) as memory:
            np.frombuffer(memory, np.uint8)[:] = part
            sink.write(part, memory)
        return size

    try:
        # What a sink keeps is on its way only, and there when it is finished.
        return _speed(write, range(parts), budget.workers, sink.finish if is_kept else None)
    finally:
        sink.abort()
        if is_kept:
            store.delete([key])


def _speed(
    work: Callable[[int], int],
    items: Sequence[int],
    workers: int,
    end: Callable[[], None] | None = None,
) -> float:
    """Bytes per second."""
    with ThreadPoolExecutor(workers) as executor:
        began = time.perf_counter()
        done = sum(executor.map(work, items))
        if end is not None:
            end()
        return max(1, done) / max(1e-9, time.perf_counter() - began)
