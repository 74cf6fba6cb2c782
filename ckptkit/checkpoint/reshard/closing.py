"""Closing what slices have written: the step of all of them exists once the last pack is there."""

from __future__ import annotations

from ckptkit.checkpoint.locate import committed_steps, step_folders
from ckptkit.checkpoint.places import DATA, Place, data_prefix, described, store_at, under
from ckptkit.checkpoint.read.packs import read_record
from ckptkit.checkpoint.write.commit import commit, committed_save_id, gather
from ckptkit.errors import CkptkitError, NotCommittedError, NotFoundError, UsageError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import Manifest, pack_name
from ckptkit.storage import Options, Store

_NAMED = 8


def commit_packs(
    location: Place,
    *,
    step: int | None = None,
    save_id: str | None = None,
    overwrite: bool = False,
    storage_options: Options | None = None,
) -> Manifest:
    """Commit the step of a run whose packs slices have written: the only one that is not committed,
    unless `step` names it.

    `save_id` says whose packs are meant, where those of several reshards are in the step;
    `overwrite` lets the step replace one that is committed.
    """
    store = store_at(location, storage_options)
    prefix = _chosen(store, step, overwrite=overwrite)
    found = _save(store, prefix, save_id)
    _check_complete(store, prefix, found)
    manifest = gather(store, prefix, found)
    commit(store, prefix, manifest, overwrite=overwrite)
    return manifest


def _chosen(store: Store, step: int | None, *, overwrite: bool) -> str:
    folders, done = step_folders(store), committed_steps(store)
    if step is not None:
        if step not in folders:
            raise NotFoundError("no such step", where=str(store.location), value=step)
        return folders[step]
    begun = [number for number in folders if number not in done]
    if overwrite and not begun:
        begun = list(done)
    if not begun:
        raise NotFoundError(
            "nothing to commit: every step is committed" if done else "nothing to commit",
            where=str(store.location),
            hint="pass the run that the slices were written to",
        )
    if len(begun) > 1:
        raise UsageError(
            f"several steps are not committed: {', '.join(map(str, begun[-_NAMED:]))}",
            where=str(store.location),
            hint="say which one with step (`ckpt commit RUN --step …`)",
        )
    return folders[begun[0]]


def _save(store: Store, prefix: str, save_id: str | None) -> str:
    folder, committed = under(prefix, DATA), committed_save_id(store, prefix)
    wanted = {save_id} if save_id is not None else set(store.children(folder)) - {committed}
    found = [name for name in store.children(folder) if name in wanted]
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFoundError("no packs", where=described(store, folder))
    raise UsageError(
        f"the packs of {len(found)} saves: {', '.join(found[-_NAMED:])}",
        where=described(store, folder),
        hint="say which one with save_id (`ckpt commit RUN --save-id …`)",
    )


def _check_complete(store: Store, prefix: str, save_id: str) -> None:
    folder = data_prefix(prefix, save_id)
    there = set(store.children(folder))
    try:
        first = read_record(store, folder, 0, save_id, ArrayTables())
    except CkptkitError as error:
        raise NotCommittedError(
            f"the first pack is missing or not complete: {error.what}",
            where=described(store, folder),
            hint="run the slice 0 (again)",
        ) from error
    count = first.record.save.world_size
    missing = [rank for rank in range(count) if pack_name(rank) not in there]
    if missing:
        shown = ", ".join(map(str, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        raise NotCommittedError(
            f"missing are {len(missing)} of {count} packs, of the ranks {shown}",
            where=described(store, folder),
            hint="run their slices (again): slice:i/n has the ranks that leave i when divided by n",
        )
