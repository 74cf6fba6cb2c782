"""Looking at bytes before they are relied on: chunks too large to be checked where they are read,
and packs that an interrupted run has left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from ckptkit.checkpoint.check.pack import PackBytes, PackFile
from ckptkit.checkpoint.places import data_prefix, described
from ckptkit.checkpoint.read.packs import PackRecord, read_record
from ckptkit.checkpoint.read.stream import check_chunk
from ckptkit.checkpoint.reshard.copying import Route
from ckptkit.checkpoint.reshard.engines import Slice
from ckptkit.checkpoint.reshard.target import Target
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.checkpoint.write.commit import committed_save_id
from ckptkit.errors import FormatError, NotFoundError, PeerError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import pack_name
from ckptkit.storage import Store

# What has not been written for so long is taken for abandoned.
QUIET_SECONDS = 5.0


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
    share_out(rows, partial(check_chunk, route.checkpoint), min(route.budget.workers, len(rows)))


def finished_packs(
    target: Target,
    store: Store,
    prefix: str,
    share: Slice | None = None,
    *,
    progress: Progress | None = None,
) -> set[int]:
    """The ranks, of a share or of all, whose packs are there, whole and of these bytes; what is
    left of others is removed.
    """
    folder = data_prefix(prefix, target.save.save_id)
    there = set(store.children(folder))
    finished = set()
    every = range(target.world_size)
    for rank in every if share is None else share.of(every):
        if pack_name(rank) not in there:
            continue
        key = f"{folder}/{pack_name(rank)}"
        if not _is_finished(target, store, folder, rank, progress):
            # Elsewhere than in a file system nobody is still writing what can be seen.
            waited = store.abilities.is_file_system
            if waited:
                _wait_until_quiet(store, key)
            # Another run may have finished it meanwhile, or even have made the step.
            if not (waited and _is_finished(target, store, folder, rank, progress)):
                if committed_save_id(store, prefix) == target.save.save_id:
                    raise _at_work(described(store, key))
                store.delete([key])
                continue
        if store.abilities.is_file_system:
            # Its writer may have died between the last byte and making it durable.
            store.sync([key])
        finished.add(rank)
    return finished


def _is_finished(
    target: Target, store: Store, folder: str, rank: int, progress: Progress | None
) -> bool:
    found = _record(target, store, folder, rank)
    key = f"{folder}/{pack_name(rank)}"
    if found is None:
        return False
    file = PackFile(store, key, found.pack.size, progress=progress)
    try:
        return not file.faults(PackBytes.of_rank(found, described(store, key)))
    except FormatError:
        return False


def _record(target: Target, store: Store, folder: str, rank: int) -> PackRecord | None:
    """The record of a pack, if it is the one that the pack has to have."""
    tables = ArrayTables()
    tables.add(target.table, len(target.recipe.strategy.mesh.axes))
    try:
        found = read_record(store, folder, rank, target.save.save_id, tables)
    except (FormatError, NotFoundError):
        return None
    record = found.record
    same = record.save.strategy == target.save.strategy
    same = same and record.table.digest == target.table.digest
    chunks = target.chunks_of(rank)
    numbers = np.repeat(np.arange(len(chunks)), [len(each) for each in chunks])
    expected = np.concatenate([*chunks, np.zeros(0, np.int64)])
    same = same and np.array_equal(record.array, numbers)
    return found if same and np.array_equal(record.chunk, expected) else None


def _wait_until_quiet(store: Store, key: str) -> None:
    """Return when nobody has written an unfinished pack for a while: it may belong to another run,
    which must not lose it.
    """
    if not store.abilities.modified_times:
        return
    last = _modified(store, key)
    age = QUIET_SECONDS if last is None else time.time() - last
    if age < QUIET_SECONDS:
        # Whatever the server's clock says: what has not changed since then is quiet.
        time.sleep(min(QUIET_SECONDS, QUIET_SECONDS - age))
        if _modified(store, key) not in (last, None):
            raise _at_work(described(store, key))


def _modified(store: Store, key: str) -> float | None:
    folder = key.rpartition("/")[0]
    return next((entry.modified for entry in store.list(folder) if entry.key == key), None)


def _at_work(where: str) -> PeerError:
    return PeerError(
        "another reshard of the same step is writing here",
        where=where,
        hint="wait for it; the same command again goes on with what it leaves, should it fail",
    )
