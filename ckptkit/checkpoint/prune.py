"""What of a run may go: old steps by retention, and the data of saves that never committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ckptkit.checkpoint.locate import committed_steps, read_manifest, step_folders
from ckptkit.checkpoint.places import DATA, MANIFEST, data_prefix, under
from ckptkit.errors import FormatError, NotFoundError, UsageError
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Entry, Store


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to delete: a committed step, or the data of one save that no manifest names."""

    kind: str
    """step or orphan."""
    step: int
    folder: str
    name: str
    nbytes: int
    keys: tuple[str, ...]


def kept_steps(
    steps: Sequence[int], *, keep_last: int | None = None, keep_every: int | None = None
) -> set[int]:
    """The steps that retention keeps: all of them when it says nothing."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise UsageError(f"{name} has to be at least 1", value=value)
    if keep_last is None and keep_every is None:
        return set(steps)
    newest = sorted(steps)[-keep_last:] if keep_last else []
    regular = [step for step in steps if keep_every and step % keep_every == 0]
    return {*newest, *regular}


def plan_prune(
    store: Store, *, keep_last: int | None, keep_every: int | None, grace: float
) -> list[Removal]:
    """What to delete, oldest step first."""
    committed = committed_steps(store)
    kept = kept_steps(list(committed), keep_last=keep_last, keep_every=keep_every)
    removals = []
    for step, folder in step_folders(store).items():
        if step in committed and step not in kept:
            removals.append(_step(store, step, folder))
        else:
            removals += _orphans(store, step, folder, time.time() - grace)
    return removals


def remove(store: Store, removals: Sequence[Removal]) -> None:
    """Delete, in the order that is safe against a crash: each manifest before its data.

    Data without a manifest is looked at again first: the save may have committed since it was
    planned.
    """
    for removal in removals:
        if removal.kind == "orphan" and _named(store, removal):
            continue
        store.delete(removal.keys)


def _step(store: Store, step: int, folder: str) -> Removal:
    entries = store.list(folder)
    manifest = under(folder, MANIFEST)
    keys = [manifest, *(entry.key for entry in entries if entry.key != manifest)]
    return Removal("step", step, folder, folder, _total(entries), tuple(keys))


def _orphans(store: Store, step: int, folder: str, before: float) -> list[Removal]:
    try:
        manifest = _manifest(store, folder)
    except FormatError:
        # What a manifest that cannot be read names is unknown, so nothing here is an orphan.
        return []
    removals = []
    for save_id in store.children(under(folder, DATA)):
        if manifest is not None and save_id == manifest.save.save_id:
            continue
        entries = store.list(data_prefix(folder, save_id))
        newest = max((entry.modified for entry in entries), default=0.0)
        if newest <= before:
            keys = tuple(entry.key for entry in entries)
            removals.append(Removal("orphan", step, folder, save_id, _total(entries), keys))
    return removals


def _named(store: Store, removal: Removal) -> bool:
    manifest = _manifest(store, removal.folder)
    return manifest is not None and manifest.save.save_id == removal.name


def _manifest(store: Store, folder: str) -> Manifest | None:
    try:
        return read_manifest(store, folder)
    except NotFoundError:
        return None


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.size for entry in entries)
