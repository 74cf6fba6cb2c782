"""Looking at bytes before they are relied on: chunks too large to be checked where they are read,
and packs that an interrupted run has left.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ckptkit.checkpoint.places import data_prefix
from ckptkit.checkpoint.reshard.copying import Route
from ckptkit.checkpoint.reshard.target import Target
from ckptkit.checkpoint.scan import scan_pack
from ckptkit.checkpoint.stored import check_chunk
from ckptkit.checkpoint.tail import PackRecord, read_record
from ckptkit.checkpoint.threads import Progress, run_threads
from ckptkit.errors import FormatError, NotFoundError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import pack_name
from ckptkit.storage import Store


def huge_chunks(target: Target, route: Route) -> list[int]:
    """The rows in the source's manifest of the chunks that are not read whole later."""
    manifest, rows = route.checkpoint.manifest, list[int]()
    for array in target.arrays:
        if route.budget.is_huge(array.chosen.source):
            number = array.chosen.number
            rows += range(int(manifest.starts[number]), int(manifest.starts[number + 1]))
    return rows


def check_chunks(route: Route, rows: Sequence[int]) -> None:
    """Compare chunks of the source with their checksums, a little of each at a time."""
    pending, lock, stopped = iter(rows), threading.Lock(), threading.Event()

    def work() -> None:
        while not stopped.is_set():
            with lock:
                row = next(pending, None)
            if row is None:
                return
            check_chunk(route.checkpoint.manifest, row, route.sources)

    run_threads(work, min(route.budget.workers, len(rows)), stopped)


def finished_packs(
    target: Target, store: Store, prefix: str, *, progress: Progress | None = None
) -> set[int]:
    """The ranks whose packs are there, whole and of these bytes; what is left of others is
    removed.
    """
    folder = data_prefix(prefix, target.save.save_id)
    there = set(store.children(folder))
    tables = ArrayTables()
    tables.add(target.table, len(target.recipe.strategy.mesh.axes))
    finished = set()
    for rank in range(target.world_size):
        key = f"{folder}/{pack_name(rank)}"
        if pack_name(rank) not in there:
            continue
        found = _record(target, store, folder, rank, tables)
        if found is not None and not scan_pack(store, key, found, progress=progress):
            # Its writer may have died between the last byte and making it durable.
            store.sync([key])
            finished.add(rank)
        else:
            store.delete([key])
    return finished


def _record(
    target: Target, store: Store, folder: str, rank: int, tables: ArrayTables
) -> PackRecord | None:
    try:
        found = read_record(store, folder, rank, target.save.save_id, tables)
    except (FormatError, NotFoundError):
        return None
    chunks = sum(len(chunks) for chunks in target.chunks_of(rank))
    return found if len(found.record.chunk) == chunks else None
