"""A run: the steps below one location, and what may be deleted of them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from shlex import quote
from typing import TYPE_CHECKING, Any

from ckptkit.checkpoint.places import (
    DATA,
    MANIFEST,
    Place,
    StepFolder,
    committed_steps,
    manifest_size,
    read_head,
    read_manifest,
    step_folders,
    step_name,
    step_number,
    steps_to_keep,
    store_at,
)
from ckptkit.checkpoint.workers import ask_all
from ckptkit.checkpoint.write.damage import is_replaceable
from ckptkit.errors import FormatError, NotFoundError, UsageError
from ckptkit.foreign.readers import numbered
from ckptkit.format.manifest import SaveInfo, is_pack
from ckptkit.model.display import Inline, card, table
from ckptkit.model.document import check_count, counted, size_text, time_text
from ckptkit.storage import Options, Store, Stored

if TYPE_CHECKING:
    from ckptkit.checkpoint.read.checkpoint import Checkpoint

_SHOWN = 20
# Seconds after which what no manifest names is taken for abandoned.
ABANDONED = 3600.0


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step as a listing shows it; `problem` is why a committed one cannot be read."""

    step: int
    committed: bool
    nbytes: int
    time: float | None = None
    strategy: str = ""
    problem: str = ""
    link: str = ""
    """What the step's folder leads to, where it is a symbolic link: it is read, and left alone."""
    format: str = ""
    """What it is, where ckptkit did not write it; no manifest commits it then."""
    folder: str = ""
    """The name of its folder."""


class Run:
    """The steps of one training run."""

    def __init__(self, location: Place, *, storage_options: Options | None = None) -> None:
        self._store = store_at(location, storage_options)

    @property
    def location(self) -> str:
        """Where the run is."""
        return str(self._store.location)

    def __repr__(self) -> str:
        return f"Run({self.location!r})"

    def _repr_html_(self) -> str:
        steps = sorted([*self.listing(), *self.foreign()], key=attrgetter("step"))
        rows = [
            (
                str(info.step),
                time_text(info.time) or "-",
                size_text(info.nbytes),
                info.strategy or "-",
                info.problem or info.format or ("committed" if info.committed else "not committed"),
            )
            for info in steps[: -_SHOWN - 1 : -1]
        ]
        total = f"{counted(len(steps), 'step')}, {size_text(sum(info.nbytes for info in steps))}"
        head = ("step", "saved", "size", "strategy", "state")
        return card("run", {"where": self.location, "steps": total}, table(head, rows))

    def show(self, **options: Any) -> Inline:
        """The page of its newest step, as `Checkpoint.show`."""
        return Inline(import_module("ckptkit.page").view(self._store, **options))

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return list(committed_steps(self._store))

    def latest(self) -> int | None:
        """The newest committed step, or None: the one with the highest number, whenever it was
        saved.
        """
        folders = sorted(step_folders(self._store).items(), reverse=True)
        named = ((step, StepFolder(self._store, name)) for step, name in folders)
        return next((step for step, folder in named if manifest_size(folder)), None)

    def open(self, step: int | None = None) -> Checkpoint:
        """Open a step, the newest committed one by default."""
        step = self.latest() if step is None else step
        if step is None:
            hint = f"`ckpt ls {quote(self.location)}` shows what was begun"
            raise NotFoundError("a run without a committed step", where=self.location, hint=hint)
        from ckptkit.checkpoint.read.checkpoint import Checkpoint  # noqa: PLC0415 — costs time

        folder = StepFolder(self._store, step_name(step))
        return Checkpoint(folder, read_manifest(folder))

    def listing(self) -> list[StepInfo]:
        """All steps, committed or not, ascending."""
        folders, links = step_folders(self._store), self.links()
        infos = ask_all(self._store, lambda folder: self._info(*folder), folders.items())
        found = zip(infos, folders.values(), strict=True)
        return [replace(info, folder=name, link=links.get(info.step, "")) for info, name in found]

    def foreign(self) -> list[StepInfo]:
        """The checkpoints of others in numbered folders (`step_100`, `checkpoint-100`), ascending:
        they are read, and neither written nor pruned.
        """
        names = [name for name in self._store.children("") if step_number(name) is None]
        found = []
        for number, below, known in numbered(self._store, names):
            files = below.list("")
            time = max((file.modified for file in files), default=None)
            what: Any = {"time": time, "format": known.what, "folder": below.location.name}
            found.append(StepInfo(number, committed=False, nbytes=_total(files), **what))
        return found[::-1]

    def links(self) -> dict[int, str]:
        """The steps whose folder is a symbolic link, and what it leads to: they are read, and
        neither written nor pruned.
        """
        links, folders = self._store.links(), step_folders(self._store).items()
        return {step: links[name] for step, name in folders if name in links}

    def plan_prune(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Collection[int] = (),
        grace: float = ABANDONED,
        up_to: int | None = None,
    ) -> list[Removal]:
        """What `prune` would delete.

        Of the committed steps the newest `keep_last` (one at least), the multiples of `keep_every`
        and those in `keep` stay; without the first two all do. The newest are those with the
        highest numbers, whenever they were saved. What aborted saves and writes left, and no
        manifest names, is deleted once it is older than `grace` seconds: what is younger may be a
        save under way. Committed steps above `up_to` are left alone and do not count: a job that
        went back to an earlier step must not lose the steps it saves then. Nor do steps whose
        folder is a symbolic link; of a link in a step that goes only the name is deleted.
        """
        retention = Retention(keep_last, keep_every, keep=(steps_to_keep(keep),))
        return plan_prune(self._store, retention, grace=grace, up_to=up_to)

    def prune(
        self,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep: Collection[int] = (),
        grace: float = ABANDONED,
        up_to: int | None = None,
    ) -> list[Removal]:
        """Delete what `plan_prune` lists; returns it."""
        retention = Retention(keep_last, keep_every, keep=(steps_to_keep(keep),))
        return prune(self._store, retention, grace=grace, up_to=up_to)

    def delete(self, steps: Iterable[int]) -> None:
        """Delete steps, committed or not: the manifest first, so that no crash leaves half a
        step that looks whole. Of a step whose folder is a symbolic link only that goes.
        """
        has_folders = self._store.abilities.has_folders
        folders = step_folders(self._store).values() if has_folders else ()
        for step in steps:
            folder = StepFolder(self._store, step_name(step))
            if folder.name in self._store.links():
                self._store.delete([folder.name])
                continue
            entries, keys = keys_of(folder)
            is_there = bool(entries) or len(keys) > 1
            if folder.name in folders:
                # A deletion that was killed leaves empty folders. They go with a name in them.
                data, is_there = folder.data(), True
                inner = [] if DATA in self._store.links(folder.name) else self._store.children(data)
                keys += [f"{below}/{_NOTHING}" for below in (*map(folder.data, inner), data)]
            if not self._store.abilities.claims_names:
                left = [entry.key for entry in self._store.leftovers(folder.name)]
                keys, is_there = keys + left, is_there or bool(left)
            if not is_there:
                hint = f"`ckpt ls {quote(self.location)}` lists the steps that are there"
                raise NotFoundError("no such step", where=str(folder), hint=hint)
            self._store.delete(keys)

    def _info(self, step: int, name: str) -> StepInfo:
        folder = StepFolder(self._store, name)
        try:
            save, nbytes = read_head(folder)
        except NotFoundError:
            return StepInfo(step, committed=False, nbytes=_total(self._store.list(folder.data())))
        except FormatError as error:
            nbytes = _total(self._store.list(name))
            return StepInfo(step, committed=True, nbytes=nbytes, problem=error.what)
        strategy = str(save.strategy)
        return StepInfo(step, committed=True, nbytes=nbytes, time=save.time, strategy=strategy)


_NOTHING = "nothing"
_CLOCK = "clock"
_OURS = re.compile(rf"{_CLOCK}/[0-9a-f]{{16}}")


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to delete: a committed step, or something in a step that no manifest names."""

    kind: str
    """step; orphan: of a save that never committed; leftover: of a write that was cut off."""
    step: int | None
    """None for a leftover that lies in the run itself."""
    folder: str
    save_id: str
    """Of the manifest that names a step's data, or of the attempt that left an orphan; empty where
    it left no data, and of leftovers."""
    nbytes: int
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """The folder of a step, the save id of an orphan that has one, the file of a leftover."""
        if self.kind == "leftover":
            return self.keys[0].rpartition("/")[2]
        return self.save_id if self.kind == "orphan" and self.save_id else self.folder


@dataclass(frozen=True, slots=True)
class Retention:
    """Which committed steps stay: all where nothing is said, else at least the newest by number."""

    keep_last: int | None = None
    keep_every: int | None = None
    """The multiples of it."""
    local_keep_last: int | None = None
    """For a run in two places: how many of those that have been copied stay nearby; as in the other
    place without it."""
    keep: tuple[frozenset[int], ...] = ()
    """Steps that stay whatever else is said, where something is. Of several sets the first counts,
    and the next ones until all steps of one before them are committed."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "local_keep_last"):
            value = getattr(self, name)
            # Others are found wrong only once a step is saved and older ones are to go.
            if value is not None:
                check_count(value, name, "leave both out to keep all committed steps")

    @property
    def is_all(self) -> bool:
        """Whether all steps stay; of two places, in the other one."""
        return self.keep_last is None and self.keep_every is None

    def kept(self, steps: Collection[int], up_to: int | None = None) -> set[int]:
        """The steps that stay; those above `up_to` are left alone, and do not count."""
        if self.is_all:
            return set(steps)
        older = sorted(step for step in steps if up_to is None or step <= up_to)
        newest = older[-(self.keep_last or 1) :]
        regular = [step for step in older if self.keep_every and step % self.keep_every == 0]
        named: set[int] = set()
        for each in self.keep:
            named |= each
            if each.issubset(older):
                break
        return {*newest, *regular, *named.intersection(steps), *set(steps).difference(older)}


def plan_prune(
    store: Store,
    retention: Retention,
    *,
    grace: float,
    up_to: int | None = None,
    now: float | None = None,
) -> list[Removal]:
    """What to delete, oldest step first; of the committed steps none above `up_to`, and those do
    not count as newer ones.

    A step whose manifest cannot be read is left alone, and does not count among those that are
    kept: it may be rebuilt, and what it names is unknown. So are damaged ones that this process
    went past, steps that miss packs, where they are newer than all whole ones, and links: they are
    another run's, which may lose them any time. `now` is the time by the store's clock.
    """
    if not grace >= 0:  # neither is NaN
        hint = "pass seconds: 3600 for an hour, 0 to delete whatever the age"
        raise UsageError("grace has to be at least 0", value=grace, hint=hint)
    links = store.links()
    folders = {step: name for step, name in step_folders(store).items() if name not in links}

    def read(name: str) -> SaveInfo | FormatError | None:
        try:
            return read_head(StepFolder(store, name), checked=True)[0]
        except NotFoundError:
            return None
        except FormatError as error:
            return error

    found = zip(folders, ask_all(store, read, folders.values()), strict=True)
    saves = {step: each for step, each in found if not isinstance(each, FormatError)}
    readable = {step: save for step, save in saves.items() if save is not None}
    older = sorted(step for step in readable if up_to is None or step <= up_to)
    if not retention.is_all:
        older = [step for step in older if not is_replaceable(StepFolder(store, folders[step]))]
        while older and not is_whole(StepFolder(store, folders[older[-1]])):
            older.pop()
    kept = retention.kept(older).union(readable.keys() - older)
    # Without a grace all is old, whatever the clock says that things were stamped with.
    before = (time.time() if now is None else now) - grace if grace > 0 else math.inf
    removals = []
    for step, save in saves.items():
        folder = StepFolder(store, folders[step])
        named = None if save is None else save.save_id
        if named is None:
            removals += _begun(folder, step, before)
        elif step in kept:
            removals += _orphans(folder, step, named, before)
        else:
            entries, keys = keys_of(folder)
            removals.append(Removal("step", step, folder.name, named, _total(entries), tuple(keys)))
            continue
        if store.abilities.claims_names:
            removals += _leftovers(store.leftovers(folder.name), before)
    if store.abilities.claims_names:
        removals += _leftovers(store.leftovers(deep=False), before)
    else:
        # Of uploads that nothing was visible of yet no listing knows the step. Those beside the
        # steps may be anybody's.
        unknown = {None, *(folders.keys() - saves.keys())}
        left = _leftovers(store.leftovers(), before)
        removals += [removal for removal in left if removal.step not in unknown]
    return sorted(removals, key=lambda removal: -1 if removal.step is None else removal.step)


def prune(
    store: Store,
    retention: Retention,
    *,
    grace: float = ABANDONED,
    up_to: int | None = None,
    arriving: Collection[str] = (),
) -> list[Removal]:
    """Delete what `plan_prune` finds by the store's clock; returns it. Of the saves that are
    `arriving` no pack is an orphan, however old.
    """
    plan = plan_prune(store, retention, grace=grace, up_to=up_to)
    by_age = grace > 0 and any(removal.kind != "step" for removal in plan)
    if by_age and store.abilities.clock_of_its_own:
        # To a clock of ours that is ahead of the store's, a save under way looks old. That is
        # asked only where something seems to be old: it takes a write and a listing.
        now = clock_of(store)
        plan = plan_prune(store, retention, grace=grace, up_to=up_to, now=now)
    plan = [it for it in plan if it.kind != "orphan" or it.save_id not in arriving]
    remove(store, plan)
    return plan


def remove(store: Store, removals: Sequence[Removal]) -> None:
    """Delete, in the order that is safe against a crash: each manifest before its data.

    Each is looked at again first: since it was planned an orphan may have been committed, and a
    step saved anew.
    """
    for removal in removals:
        if removal.kind != "leftover" and _still_holds(store, removal):
            store.delete(removal.keys)
    # Nothing is ever named as one of them again.
    left = [key for removal in removals if removal.kind == "leftover" for key in removal.keys]
    if left:
        store.delete(left)


def keys_of(folder: StepFolder) -> tuple[list[Stored], list[str]]:
    """All in a step, and the keys to delete it by: its manifest first, links as the names that they
    are.
    """
    store, data = folder.store, folder.data()
    entries = store.list(folder.name)
    keys = dict.fromkeys([folder.key(MANIFEST), *(entry.key for entry in entries)])
    links = dict.fromkeys(map(folder.key, store.links(folder.name)))
    if data not in links:
        links |= dict.fromkeys(map(folder.data, store.links(data)))
    return entries, [*keys, *(key for key in links if key not in keys)]


def clock_of(store: Store) -> float:
    """The time by the store's own clock, of a small object; what the killed left goes too."""
    key = f"{_CLOCK}/{os.urandom(8).hex()}"
    store.put(key, b"now")
    gone = [key]
    try:
        entries = store.list(_CLOCK)
        now = max((entry.modified for entry in entries), default=time.time())
        gone += [e.key for e in entries if _OURS.fullmatch(e.key) and e.modified < now - ABANDONED]
        return now
    finally:
        store.delete(gone)


def is_whole(folder: StepFolder) -> bool:
    """Whether the manifest can be read, and all packs are there and none was cut off."""
    try:
        manifest = read_manifest(folder)
    except (FormatError, NotFoundError):
        return False
    data = folder.data(manifest.save.save_id)
    found = {entry.key: entry.size for entry in folder.store.list(data)}
    return all(found.get(f"{data}/{pack.name}") == pack.size for pack in manifest.packs)


def _begun(folder: StepFolder, step: int, before: float) -> list[Removal]:
    """All of a step that is not committed: the data, and the empty manifest of a commit that was
    killed, or folders that a save left before it wrote.
    """
    store, manifest = folder.store, folder.key(MANIFEST)
    entries = store.list(folder.name)
    claim = [entry for entry in entries if entry.key == manifest]
    if not _old(claim, before):
        return []  # a commit may be about to fill it
    found = _orphans(folder, step, None, before)
    # Young data may be of a save that is about to replace it.
    if claim and _old(entries, before):
        found.insert(0, Removal("orphan", step, folder.name, "", 0, (manifest,)))
    if store.abilities.has_folders and not entries and not store.children(folder.data()):
        # Deleting a key in folders that are empty removes them.
        found.append(Removal("orphan", step, folder.name, "", 0, (folder.data(_NOTHING),)))
    return found


def _orphans(folder: StepFolder, step: int, named: str | None, before: float) -> list[Removal]:
    found: list[Removal] = []
    store, data = folder.store, folder.data()
    if DATA in store.links(folder.name):
        return found  # what is there is not the run's
    links = store.links(data)
    for save_id in store.children(data):
        if save_id != named and save_id not in links:
            entries = store.list(folder.data(save_id))
            # Others may have a folder `data` in one that is called as a step is: that is theirs.
            is_ours = all(is_pack(entry.key.rpartition("/")[2]) for entry in entries)
            if is_ours and _old(entries, before):
                keys = tuple(entry.key for entry in entries)
                keys = keys or (f"{folder.data(save_id)}/{_NOTHING}",)
                found.append(Removal("orphan", step, folder.name, save_id, _total(entries), keys))
    return found


def _leftovers(entries: Sequence[Stored], before: float) -> list[Removal]:
    found = []
    for entry in entries:
        folder, slash, _ = entry.key.partition("/")
        step = step_number(folder)
        if (step is not None or not slash) and _old([entry], before):
            found.append(Removal("leftover", step, folder, "", entry.size, (entry.key,)))
    return found


def _old(entries: Sequence[Stored], before: float) -> bool:
    return max((entry.modified for entry in entries), default=0.0) <= before


def _still_holds(store: Store, removal: Removal) -> bool:
    try:
        named = read_head(StepFolder(store, removal.folder), checked=True)[0].save_id
    except NotFoundError:
        return removal.kind == "orphan"
    except FormatError:
        return False  # by now there is a manifest, and what it names is unknown
    if removal.kind == "step":
        return named == removal.save_id
    # Without a save id it was of a step that was not committed.
    return removal.save_id not in ("", named)


def _total(entries: Sequence[Stored]) -> int:
    return sum(entry.size for entry in entries)
