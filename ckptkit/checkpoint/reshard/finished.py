"""What an earlier run of a reshard left: packs that are whole need not be copied again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ckptkit.checkpoint.check.pack import PackBytes, PackFile
from ckptkit.checkpoint.places import data_prefix, described, step_name
from ckptkit.checkpoint.read.packs import read_record
from ckptkit.checkpoint.reshard.target import ReshardTarget
from ckptkit.checkpoint.workers import Progress
from ckptkit.checkpoint.write.commit import committed_save_id
from ckptkit.errors import FormatError, NotFoundError, PeerError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import pack_name
from ckptkit.storage import Store

# What has not been written for so long is taken for abandoned.
QUIET_SECONDS = 5.0


def finished_packs(
    target: ReshardTarget, store: Store, ranks: Sequence[int], progress: Progress | None = None
) -> set[int]:
    """The ranks of these whose packs are there, whole and of these bytes; what is left of others is
    removed.
    """
    prefix, save_id = step_name(target.save.step), target.save.save_id
    folder = data_prefix(prefix, save_id)
    there = set(store.children(folder))
    finished = set()
    for rank in ranks:
        key = f"{folder}/{pack_name(rank)}"
        if pack_name(rank) not in there:
            continue
        if not _is_finished(target, store, folder, rank, progress):
            # Where a pack is visible before it is finished, another run may still be writing it.
            may_be_open = store.abilities.claims_names
            if may_be_open:
                _wait_until_quiet(store, key)
            # Another run may have finished it meanwhile, or even have made the step.
            if not (may_be_open and _is_finished(target, store, folder, rank, progress)):
                if committed_save_id(store, prefix) == save_id:
                    raise _at_work(described(store, key))
                store.delete([key])
                continue
        if store.abilities.claims_names:
            # Its writer may have died between the last byte and making it durable.
            store.sync([key])
        finished.add(rank)
    return finished


def _is_finished(
    target: ReshardTarget, store: Store, folder: str, rank: int, progress: Progress | None
) -> bool:
    """Whether a pack has the record that it has to have, and the bytes that this says."""
    tables = ArrayTables()
    tables.add(target.table, len(target.strategy.mesh.axes))
    try:
        found = read_record(store, folder, rank, target.save.save_id, tables)
    except (FormatError, NotFoundError):
        return False
    record, chunks = found.record, target.chunks_of(rank)
    numbers = np.repeat(np.arange(len(chunks)), [len(each) for each in chunks])
    if not (
        record.save.strategy == target.save.strategy
        and record.table.digest == target.table.digest
        and np.array_equal(record.array, numbers)
        and np.array_equal(record.chunk, np.concatenate([*chunks, np.zeros(0, np.int64)]))
    ):
        return False
    key = f"{folder}/{pack_name(rank)}"
    file = PackFile(store, key, found.pack.size, progress=progress)
    try:
        return not file.faults(PackBytes.of_rank(found, described(store, key)))
    except FormatError:
        return False


def _wait_until_quiet(store: Store, key: str) -> None:
    """Return when nobody has written an unfinished pack for a while: it may belong to another run,
    which must not lose it.
    """
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
