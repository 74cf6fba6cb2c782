"""How long a reshard would take: a little of it is tried."""

from __future__ import annotations

import secrets
import time

import numpy as np

from ckptkit.checkpoint.places import data_prefix
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.reshard.copy import Budget
from ckptkit.checkpoint.reshard.target import ReshardCost
from ckptkit.checkpoint.workers import share_out
from ckptkit.format.manifest import pack_name
from ckptkit.storage import Store, default_pool

# How much of a source is read, and at most written.
_PROBE_BYTES, _PROBE_PARTS, _PROBE_CHUNKS = 8 << 20, 16, 64


def seconds_of(
    source: Checkpoint, store: Store, prefix: str, budget: Budget, cost: ReshardCost
) -> float:
    """About how long it takes to read and to write, beside each other: a little of both is tried.

    What is written is a pack that is given up before anyone can take it for one; where even that is
    cut off, `prune` finds it.
    """
    manifest, reading, writing = source.manifest, 0.0, 0.0
    if cost.bytes_read:
        # Chunks all over the step: its beginning may be in a cache, and the rest not.
        spread = np.linspace(0, len(manifest.pack) - 1, _PROBE_CHUNKS).astype(np.int64)
        rows: list[int] = np.unique(spread).tolist()
        sizes = np.minimum(manifest.length[rows], _PROBE_BYTES).astype(np.int64).tolist()

        def read(row: int) -> None:
            size, offset = min(_PROBE_BYTES, int(manifest.length[row])), int(manifest.offset[row])
            with (
                default_pool().take(_PROBE_BYTES) as memory,
                memory[:size] as data,
                source.packs.use(int(manifest.pack[row])) as opened,
            ):
                opened.read_into(offset, data)

        with source:
            began = time.perf_counter()
            share_out(rows, read, budget.workers * budget.pace.requests)
            reading = cost.bytes_read * _passed(began) / max(1, sum(sizes))
    if cost.bytes_written:
        size = min(_PROBE_BYTES, cost.bytes_written)
        parts = min(_PROBE_PARTS, cost.bytes_written // size)
        key = f"{data_prefix(prefix, f'probe-{secrets.token_hex(8)}')}/{pack_name(0)}"
        sink = store.create(key, [size] * parts, memory=budget.sink_bytes)
        is_kept = store.abilities.waits_for_answers

        def write(part: int) -> None:
            with default_pool().take(size) as memory:
                np.frombuffer(memory, np.uint8)[:] = part
                sink.write(part, memory)

        try:
            began = time.perf_counter()
            share_out(range(parts), write, budget.workers)
            if is_kept:
                # What a sink keeps is on its way only, and there when it is finished.
                sink.finish()
            writing = cost.bytes_written * _passed(began) / (size * parts)
        finally:
            sink.abort()
            if is_kept:
                store.delete([key])
    return max(reading, writing)


def _passed(began: float) -> float:
    return max(1e-9, time.perf_counter() - began)
