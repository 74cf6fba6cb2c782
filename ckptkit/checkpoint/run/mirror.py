"""A run in two places: steps are saved to a folder nearby, and copied to where they are kept.

What is safe at each point where a job can end: a step that is committed nearby is whole and stays
until it is in the other place too, or until retention has given it up because newer steps are.
What is in the other place is found by looking, so the next job goes on where this one ended.

A step is copied as it is: its packs, then its manifest, by the rules of `checkpoint.write.commit`.
It keeps its save id, so a copy that was cut off goes on where it ended: packs that have arrived are
not sent again. Every byte is accounted for on the way: damage is not passed on.

Two processes may copy one step at once, as when one is slow to die: each pack gets its name when it
is complete, and replaces one that has the same bytes. So nothing that is committed ever breaks.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from ckptkit.checkpoint.places import (
    StepFolder,
    described,
    newest_first,
    read_manifest,
    step_name,
    stored_size,
)
from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.checkpoint.read.packs import OpenPacks, PackBytes, PackRecord, PackWindow, read_record
from ckptkit.checkpoint.run.run import ABANDONED, Retention, Run, plan_prune, prune, remove
from ckptkit.checkpoint.workers import Progress, ask_all, share_out
from ckptkit.checkpoint.write.commit import (
    assemble,
    commit,
    committed_save_id,
    discard,
    missing_groups,
    refuse_committed,
    tell_commit,
)
from ckptkit.checkpoint.write.damage import forget_replacing, is_unreadable, may_replace
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    CorruptionError,
    FormatError,
    NotFoundError,
    PeerError,
    StepExistsError,
    StorageError,
    UsageError,
)
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import Record, SaveInfo
from ckptkit.storage import Store

log = logging.getLogger("ckptkit.checkpoint")

_OWNER = "uploads-to.txt"
_LONGEST_LOCATION = 1 << 16
_SAME = "the local folder is the run itself"

LOCAL, REMOTE = "local", "remote"

_SEGMENT = 8 << 20
_THREADS = 4
# About how many bytes of a rank may be on their way at a time.
_MEMORY = 128 << 20


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """How to copy a step."""

    overwrite: bool = False
    progress: Progress | None = None


class Mirror:
    """The two places of a run, as one rank of a job sees them."""

    def __init__(
        self, local: Store, remote: Store, retention: Retention, options: CopyOptions | None = None
    ) -> None:
        if str(local.location) == str(remote.location):
            raise UsageError(_SAME, value=str(local.location))
        self.local, self.remote = local, remote
        self.retention = retention
        self._options = options or CopyOptions()
        # What rank 0 knows without asking again, by (step, save id): what the other place has, or
        # had until it was deleted there, or has a later save of that overwrote it; and the local
        # steps that cannot be copied, with no id where that cannot be read.
        self._arrived: set[tuple[int, str]] = set()
        self._damaged: set[tuple[int, str]] = set()
        self._failed: set[int] = set()

    def look(self, ranks: Ranks) -> None:
        """Make sure that all ranks see one local folder, and that it is this run's and not the run
        itself; every rank calls it before the first save or load.
        """
        if ranks.rank == 0:
            # Written down, for steps of two runs must never mix.
            mine = str(self.remote.location).encode(errors="surrogateescape")
            try:
                self.local.put(_OWNER, mine, exclusive=True)
            except AlreadyExistsError:
                theirs = self.local.read_whole(_OWNER, _LONGEST_LOCATION)
                if not theirs:  # whoever put it was killed
                    self.local.put(_OWNER, mine)
                elif theirs != mine:
                    run = theirs.decode(errors="surrogateescape")
                    what = f"the folder holds steps of the run {run}"
                    hint = "give every run a local folder of its own"
                    raise UsageError(what, where=str(self.local.location), hint=hint) from None
        mark = ranks.share(lambda: f"seen-by-all-{os.urandom(8).hex()}.txt")
        try:
            if ranks.rank == 0:
                self.local.put(mark, b"for a moment")
                # By whatever name. What cannot be reached is another place.
                is_near = self.local.location.scheme == self.remote.location.scheme
                with suppress(StorageError):
                    if is_near and stored_size(self.remote, mark) is not None:
                        raise UsageError(_SAME, value=str(self.local.location))
            ranks.share(lambda: "written")
            if ranks.rank > 0 and stored_size(self.local, mark) is None:
                raise UsageError(
                    f"rank {ranks.rank} does not see what rank 0 writes here",
                    where=str(self.local.location),
                    hint="`local` is one folder that all ranks see: the disk of a single machine, "
                    "or a shared file system",
                )
            ranks.wait()
        finally:
            if ranks.rank == 0:
                with suppress(CkptkitError):
                    self.local.delete([mark])

    def candidates(self, step: int | None, *, fallback: bool) -> list[tuple[int, str]]:
        """The steps to load from, best first, and in which place; without `fallback` only the first
        save, in all places that have it.

        Where both places have the same save of a step the local one is nearer; of two saves the
        later counts.
        """
        local, remote = Run(self.local).steps(), list[int]()
        try:
            remote = Run(self.remote).steps()
        except StorageError as error:
            if not (local and fallback):
                if local:
                    error.hint = f"{error.hint}; " if error.hint else ""
                    error.hint += "fallback=True loads the newest step that is local"
                raise
            log.error("looking for local steps only: %s", error)
        numbers = newest_first({*local, *remote}, step)
        found: list[tuple[int, str]] = []
        for number in numbers if fallback else numbers[:1]:
            if number not in local:
                sides = [REMOTE]
            elif number not in remote:
                sides = [LOCAL]
            else:
                sides = self._in_order(number, both=fallback)
            found += [(number, side) for side in sides]
        return found

    def copy_pending(self, ranks: Ranks, up_to: int | None = None) -> None:
        """Copy the local steps that the other place lacks and retention keeps, oldest first; then
        delete what it does not keep, in both places, up to the step that was saved just now.
        """
        with _leaving(ranks):
            steps = ranks.share(lambda: self._pending(up_to))
        try:
            with _leaving(ranks):
                for step in steps:
                    self._copy(step, ranks)
                ranks.wait()
        except CkptkitError:
            # One that cannot be copied must not keep all others for ever.
            self._prune(ranks, up_to)
            raise
        self._prune(ranks, up_to)

    def _in_order(self, step: int, *, both: bool = True) -> list[str]:
        """The places of a step that is in both; of two saves only the later without `both`."""
        local, remote = (_save_of(store, step) for store in (self.local, self.remote))
        if local is None or remote is None:
            return [LOCAL, REMOTE]
        if local.save_id == remote.save_id:
            self._arrived.add((step, local.save_id))
            return [LOCAL, REMOTE]
        sides = [LOCAL, REMOTE] if local.time >= remote.time else [REMOTE, LOCAL]
        log.warning("step %d was saved twice: that in the %s place is newer", step, sides[0])
        return sides if both else sides[:1]

    def _saved_locally(self) -> dict[int, str]:
        """The save ids of the local steps; what cannot be read is left out, and so are steps that
        are symbolic links: retention does not count them.
        """
        found: dict[int, str] = {}
        run = Run(self.local)
        for step in sorted(set(run.steps()) - run.links().keys()):
            try:
                found[step] = read_manifest(StepFolder(self.local, step_name(step))).save.save_id
            except NotFoundError:
                continue  # it was deleted meanwhile
            except FormatError as error:
                self._report(step, "", error)
        return found

    def _report(self, step: int, save_id: str, error: FormatError) -> None:
        """Say once that a local step will not be copied."""
        if (step, save_id) in self._damaged:
            return
        self._damaged.add((step, save_id))
        what = "%s cannot be copied and stays where it is, other steps are copied: %s: %s; %s"
        hint = error.hint or "`ckpt verify` lists what is wrong with it"
        log.error(what, described(self.local, step_name(step)), error.where, error.what, hint)

    def _pending(self, up_to: int | None) -> list[int]:
        local = {s: i for s, i in self._saved_locally().items() if (s, i) not in self._damaged}
        if self._arrived.issuperset(local.items()):
            return []
        run = Run(self.remote)
        remote = set(run.steps())
        kept = self.retention.kept(sorted({*local, *(remote - run.links().keys())}), up_to)
        for step in remote.intersection(local):
            save = _save_of(self.remote, step)
            if save is None:
                continue
            # Overwriting is for what was saved since: a later save there is not to be lost.
            if save.save_id == local[step] or (
                self._options.overwrite and self._in_order(step)[0] == REMOTE
            ):
                self._arrived.add((step, local[step]))
        waiting = [s for s, i in local.items() if s in kept and (s, i) not in self._arrived]
        # What has failed must not keep others from being copied.
        return sorted(waiting, key=lambda step: (step in self._failed, step))

    def _copy(self, step: int, ranks: Ranks) -> None:
        started = time.perf_counter()
        self._failed.add(step)
        try:
            copied = copy_step(self.local, self.remote, step, ranks, self._options)
        except UnsoundStepError as error:
            # No attempt to copy it again will mend it: other steps go on without it.
            self._failed.discard(step)
            save = _save_of(self.local, step) if ranks.rank == 0 else None
            # What was deleted meanwhile, or saved anew, is no damage: the latter is copied next
            # time.
            if save is not None and save.save_id == error.save_id:
                self._report(step, error.save_id, error)
            return
        self._failed.discard(step)
        if ranks.rank == 0:
            # By now the local folder may have another save of the step, which has not arrived.
            self._arrived.add((step, copied.save_id))
            seconds = time.perf_counter() - started
            what = "copied step %d to %s: %.3f GB by rank 0 in %.2f s"
            log.info(what, step, self.remote.location, copied.nbytes / 1e9, seconds)

    def _prune(self, ranks: Ranks, up_to: int | None) -> None:
        if up_to is None or ranks.rank > 0:
            return
        rules = self.retention
        local_rules = rules if rules.local_keep_last is None else Retention(rules.local_keep_last)
        try:
            if local_rules.is_all:
                return
            local = self._saved_locally()
            if not rules.is_all:
                # Packs of what was cut off are not sent again.
                prune(self.remote, rules, up_to=up_to, arriving=local.values())
            removals = plan_prune(self.local, local_rules, grace=ABANDONED, up_to=up_to)
            kept = rules.kept(sorted(local), up_to)
            # What has not arrived goes only if retention does not keep it, and when all that it
            # keeps has arrived: until then it may be the newest step that can be loaded.
            due = ((s, i) for s, i in local.items() if s in kept and s <= up_to)
            safe = self._arrived.issuperset(due)
            may_go = [
                removal
                for removal in removals
                if removal.kind != "step"
                or (removal.step, removal.save_id) in self._arrived
                or (safe and removal.step not in kept)
            ]
            remove(self.local, may_go)
        except CkptkitError as error:
            log.error("older steps could not be deleted: %s", in_one_line(error))


@contextmanager
def _leaving(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks what goes wrong inside, but what all raise in the same place."""
    try:
        yield
    except UnsoundStepError:
        raise
    except BaseException as error:
        ranks.leave(error)
        raise


def _save_of(store: Store, step: int) -> SaveInfo | None:
    try:
        return read_manifest(StepFolder(store, step_name(step))).save
    except (FormatError, NotFoundError):
        return None


@dataclass(frozen=True, slots=True)
class Copied:
    """What is in the target now."""

    save_id: str
    nbytes: int
    """How many bytes this rank sent."""


class UnsoundStepError(CorruptionError):
    """What was to be copied is not as it was written, or no longer there: all ranks raise this in
    the same place, and they may go on to meet.
    """

    def __init__(self, what: str, *, where: str, save_id: str) -> None:
        hint = "`ckpt verify` lists all damage of a step; delete what cannot be mended"
        super().__init__(what, where=where, hint=hint)
        self.save_id = save_id


def copy_step(
    source: Store, target: Store, step: int, ranks: Ranks, options: CopyOptions | None = None
) -> Copied:
    """Copy a committed step, each rank some of its packs.

    All ranks see both stores. On return the step exists in the target too; where one rank fails,
    all raise, and what has arrived stays for the next attempt.
    """
    with _leaving(ranks):
        copying = _Copying(source, target, step, options or CopyOptions())
        save_id, is_there = ranks.share(lambda: (copying.save_id, copying.is_there()))
        if save_id != copying.save_id:
            what, where = "rank 0 copies another save of this step", str(copying.source)
            raise PeerError(what, where=where, hint="try again")
        if is_there:
            return Copied(save_id, 0)
        sent, problem = copying.send(ranks)
        # When all packs are complete they go on; where one is damaged, all raise.
        mine = None if problem is None else (problem.what, problem.where)
        if (told := ranks.agree(mine, lambda heard: next(filter(None, heard), None))) is not None:
            what, where = told
            raise problem or UnsoundStepError(what, where=where, save_id=save_id)
        if ranks.rank == 0:
            copying.commit()
        tell_commit(ranks, copying.target, save_id)
        return Copied(save_id, sent)


class _Copying:
    """One step on its way."""

    def __init__(self, source: Store, target: Store, step: int, options: CopyOptions) -> None:
        self.source = StepFolder(source, step_name(step))
        self.target = StepFolder(target, step_name(step))
        self._manifest = read_manifest(self.source)
        self.save_id = self._manifest.save.save_id
        self._folder = self.target.data(self.save_id)
        self._sources = OpenPacks(self.source, self._manifest)
        self._tables = ArrayTables()
        self._found: dict[int, PackRecord] = {}
        self._progress, self._replaces = options.progress, options.overwrite

    def is_there(self) -> bool:
        """Whether the target has this very save; StepExistsError where it has another sound one."""
        found = committed_save_id(self.target)
        if found == self.save_id:
            return True
        if found is None:
            self._replaces |= is_unreadable(self.target)
            if not self._replaces:
                refuse_committed(self.target)  # by a newer version, or an empty manifest
            return False
        self._replaces |= may_replace(self.target, self.source.store, self.save_id)
        if not self._replaces:
            what, hint = "another save of this step is there", "delete one, or pass overwrite=True"
            raise StepExistsError(what, where=str(self.target), hint=hint)
        return False

    def send(self, ranks: Ranks) -> tuple[int, UnsoundStepError | None]:
        """Send this rank's packs; how many bytes that were, and what ended it early."""
        sent = 0
        try:
            if ranks.rank == 0:
                self._check_manifest()
            for pack, info in enumerate(self._manifest.packs):
                # What the one without a record holds follows from all others: rank 0 has them.
                owner = 0 if info.record is None else pack % ranks.world_size
                if owner == ranks.rank:
                    sent += self._copy(pack)
        except UnsoundStepError as problem:
            return sent, problem
        finally:
            self._sources.close()
        return sent, None

    def _check_manifest(self) -> None:
        """Compare the manifest with the records: a call of its own, so that a second manifest does
        not stay in memory for the hours that packs may take.
        """
        with self._reading(str(self.source)):
            try:
                expected = assemble(self._records(), self._manifest.packs)
            except PeerError as error:
                what = f"the packs do not fit together: {error.what}"
                raise CorruptionError(what) from error
            if expected.to_bytes() != self._manifest.to_bytes():
                raise CorruptionError("the manifest says other things than the packs do")

    @contextmanager
    def _reading(self, where: str) -> Iterator[None]:
        """Where what goes wrong is the source's fault."""
        try:
            yield
        except (FormatError, NotFoundError) as error:
            what, where = f"{error.what}: the step was not copied", error.where or where
            raise UnsoundStepError(what, where=where, save_id=self.save_id) from error

    def _copy(self, pack: int) -> int:
        info, store = self._manifest.packs[pack], self.target.store
        key = f"{self._folder}/{info.name}"
        # In a file system what was cut off can be seen, and have its full size already.
        if not store.abilities.claims_names and stored_size(store, key) == info.size:
            return 0
        where, progress = self._sources.where(pack), self._progress
        with self._reading(where):
            if info.record is None:
                known = PackBytes.of_groups(missing_groups(self._records()))
            else:
                # The records of other ranks may refer to rank 0's.
                self._record(0)
                found = self._record(pack)
                if found.pack != info:
                    raise CorruptionError("the record is not where the manifest says")
                known = PackBytes.of_rank(found, where)
            if known.size != info.size:
                raise CorruptionError("the pack has another size than its record says", where=where)
        extents = [window.size for window in known.windows(_SEGMENT)]
        sink = store.create(key, extents, memory=_MEMORY, again=True)

        def send(numbered: tuple[int, PackWindow]) -> None:
            number, window = numbered
            with sink.filling(number) as memory, self._reading(where):
                with self._sources.use(pack) as source:
                    source.read_into(window.start, memory)
                for at, what in known.faults(window, memory):
                    raise CorruptionError(what, where=f"{where} at byte {at}")
            if progress:
                progress(window.size)

        try:
            share_out(enumerate(known.windows(_SEGMENT)), send, min(_THREADS, len(extents)))
            sink.finish()
        except BaseException:
            sink.abort()
            raise
        return info.size

    def _records(self) -> list[Record]:
        ranks = [n for n, pack in enumerate(self._manifest.packs) if pack.record is not None]
        first = [self._record(rank) for rank in ranks[:1]]
        found = [*first, *ask_all(self.source.store, self._record, ranks[1:])]
        return [each.record for each in found]

    def _record(self, pack: int) -> PackRecord:
        if pack not in self._found:
            size = self._manifest.packs[pack].size
            found = read_record(self.source, self.save_id, pack, self._tables, size=size)
            self._found[pack] = found
        return self._found[pack]

    def commit(self) -> None:
        """Make the step exist in the target, once all packs are there."""
        store = self.target.store
        arrived = {entry.key: entry.size for entry in store.list(self._folder)}
        for info in self._manifest.packs:
            key = f"{self._folder}/{info.name}"
            if (size := arrived.get(key)) != info.size:
                what = f"{info.size} bytes were sent, {size or 'none'} have arrived"
                raise StorageError(what, where=described(store, key))
        try:
            commit(self.target, self._manifest, overwrite=self._replaces)
        except StepExistsError:
            discard(self.target, self.save_id)
            raise
        if self._replaces:
            forget_replacing(self.source)
