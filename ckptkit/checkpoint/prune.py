"""What of a run may go: old steps by retention, and the data of saves that never committed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckptkit.checkpoint.locate import read_manifest, step_folders
from ckptkit.checkpoint.places import DATA, MANIFEST, data_prefix, under
from ckptkit.errors import FormatError, NotFoundError, UsageError
from ckptkit.format.manifest import Manifest
from ckptkit.storage import Entry, Store

_NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to delete: a committed step, or the data of one save that no manifest names."""

    kind: str
    """step or orphan."""
    step: int
    folder: str
    save_id: str
    """Of the manifest that names a step's data, or of the attempt that left an orphan."""
    nbytes: int
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder of a step, the save id of an orphan."""
        return self.folder if self.kind == "step" else self.save_id


def kept_steps(
    steps: Sequence[int], *, keep_last: int | None = None, keep_every: int | None = None
) -> set[int]:
    """The steps that retention keeps: the newest always, and all of them when it says nothing."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None and value < 1:
            raise UsageError(f"{name} has to be at least 1", value=value)
    if keep_last is None and keep_every is None:
        return set(steps)
    newest = sorted(steps)[-(keep_last or 1) :]
    regular = [step for step in steps if keep_every and step % keep_every == 0]
    return {*newest, *regular}


def plan_prune(
    store: Store, *, keep_last: int | None, keep_every: int | None, grace: float
) -> list[Removal]:
    """What to delete, oldest step first.

    A step whose manifest cannot be read is left alone, and does not count among those that are
    kept: it may be rebuilt, and what it names is unknown.
    """
    manifests: dict[int, Manifest | None] = {}
    folders = step_folders(store)
    for step, folder in folders.items():
        with suppress(FormatError):
            manifests[step] = _manifest(store, folder)
    readable = [step for step, manifest in manifests.items() if manifest is not None]
    kept = kept_steps(readable, keep_last=keep_last, keep_every=keep_every)
    removals = []
    for step, manifest in manifests.items():
        if manifest is not None and step not in kept:
            removals.append(_step(store, step, folders[step], manifest.save.save_id))
        else:
            removals += _orphans(store, step, folders[step], manifest, grace)
    return removals


def remove(store: Store, removals: Sequence[Removal]) -> None:
    """Delete, in the order that is safe against a crash: each manifest before its data.

    Each is looked at again first: since it was planned an orphan may have been committed, and a
    step saved anew.
    """
    for removal in removals:
        if _still_holds(store, removal):
            store.delete(removal.keys)


def _step(store: Store, step: int, folder: str, save_id: str) -> Removal:
    entries = store.list(folder)
    manifest = under(folder, MANIFEST)
    keys = [manifest, *(entry.key for entry in entries if entry.key != manifest)]
    return Removal("step", step, folder, save_id, _total(entries), tuple(keys))


def _orphans(
    store: Store, step: int, folder: str, manifest: Manifest | None, grace: float
) -> list[Removal]:
    if grace > 0 and not store.abilities.modified_times:
        return []  # nothing says whether a save is under way
    saves = store.children(under(folder, DATA))
    if manifest is None and not saves:
        # Folders that a save left before it wrote: deleting a key in them removes them.
        return [Removal("orphan", step, folder, "", 0, (data_prefix(folder, _NOTHING),))]
    before = time.time() - grace
    found = []
    for save_id in saves:
        if manifest is None or save_id != manifest.save.save_id:
            entries = store.list(data_prefix(folder, save_id))
            if max((entry.modified for entry in entries), default=0.0) <= before:
                keys = [entry.key for entry in entries]
                keys = keys or [f"{data_prefix(folder, save_id)}/{_NOTHING}"]
                total = _total(entries)
                found.append(Removal("orphan", step, folder, save_id, total, tuple(keys)))
    return found


def _still_holds(store: Store, removal: Removal) -> bool:
    try:
        manifest = _manifest(store, removal.folder)
    except FormatError:
        return False  # by now there is a manifest, and what it names is unknown
    named = None if manifest is None else manifest.save.save_id
    return named == removal.save_id if removal.kind == "step" else named != removal.save_id


def _manifest(store: Store, folder: str) -> Manifest | None:
    try:
        return read_manifest(store, folder)
    except NotFoundError:
        return None


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.size for entry in entries)
