"""A run in two places: steps are saved to a folder nearby, and copied to where they are kept.

What is safe at each point where a job can end: a step that is committed nearby is whole and stays
until it is in the other place too, or until retention has given it up because newer steps are.
What is in the other place is found by looking, so the next job goes on where this one ended.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptkit.checkpoint.places import described, read_manifest, step_name, stored_size
from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.checkpoint.run.copy import CopyOptions, UnsoundStepError, copy_step
from ckptkit.checkpoint.run.run import ABANDONED, Retention, Run, plan_prune, remove
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    FormatError,
    NotFoundError,
    StorageError,
    UsageError,
)
from ckptkit.format.record import SaveInfo
from ckptkit.storage import Store

log = logging.getLogger("ckptkit.checkpoint")

_OWNER = "uploads-to.txt"
_LONGEST_LOCATION = 1 << 16

LOCAL, REMOTE = "local", "remote"


class Mirror:
    """The two places of a run, as one rank of a job sees them."""

    def __init__(
        self, local: Store, remote: Store, retention: Retention, options: CopyOptions | None = None
    ) -> None:
        if str(local.location) == str(remote.location):
            raise UsageError("the local folder is the run itself", value=str(local.location))
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
        """Make sure that all ranks see one local folder, and that it is this run's; every rank
        calls it before the first save or load.
        """
        if ranks.rank == 0:
            self._claim()
        mark = ranks.share(lambda: f"seen-by-all-{secrets.token_hex(8)}.txt")
        try:
            if ranks.rank == 0 and ranks.world_size > 1:
                self.local.put(mark, b"for a moment")
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
        here = Run(self.local).steps()
        there = self._listed(here, fallback=fallback)
        numbers = sorted({*here, *there}, reverse=True)
        if step is not None:  # whether it is there or not: that it lacks has to be said
            numbers = [step, *(number for number in numbers if number < step)]
        found: list[tuple[int, str]] = []
        for number in numbers:
            sides = [REMOTE] if number in there or number not in here else []
            if number in here:
                sides = self._in_order(number, both=fallback) if sides else [LOCAL]
            found += [(number, side) for side in sides]
            if not fallback:
                break
        return found

    def upload(self, ranks: Ranks, up_to: int | None = None) -> None:
        """Copy all local steps that are not in the other place, and that retention keeps, oldest
        first; then delete what retention does not keep, in both places, of the steps up to the one
        that was saved just now. A call of all ranks.

        A local step that is damaged is said in the log, once, and stays: no later save mends it.
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
            with suppress(CkptkitError):
                self._prune(ranks, up_to)
            raise
        try:
            self._prune(ranks, up_to)
        except CkptkitError as error:
            error.what = f"steps were copied, but older ones not deleted: {error.what}"
            raise

    def _claim(self) -> None:
        """Write down which run the folder belongs to; steps of two runs must never mix."""
        mine = str(self.remote.location)
        try:
            self.local.put(_OWNER, mine.encode(), exclusive=True)
        except AlreadyExistsError:
            theirs = self.local.read_whole(_OWNER, _LONGEST_LOCATION).decode(errors="replace")
            if theirs == mine:
                return
            raise UsageError(
                f"the folder holds steps of the run {theirs}",
                where=str(self.local.location),
                hint="give every run a local folder of its own",
            ) from None

    def _listed(self, here: list[int], *, fallback: bool) -> list[int]:
        try:
            return Run(self.remote).steps()
        except StorageError as error:
            if fallback and here:
                log.error("looking for local steps only: %s", error)
                return []
            if here:
                error.hint = f"{error.hint}; " if error.hint else ""
                error.hint += "fallback=True loads the newest step that is local"
            raise

    def _in_order(self, step: int, *, both: bool = True) -> list[str]:
        """The places of a step that is in both; of two saves only the later without `both`."""
        here, there = (_save_of(store, step) for store in (self.local, self.remote))
        if here is None or there is None:
            return [LOCAL, REMOTE]
        if here.save_id == there.save_id:
            self._arrived.add((step, here.save_id))
            return [LOCAL, REMOTE]
        newer = LOCAL if here.time >= there.time else REMOTE
        log.warning("step %d was saved twice: that in the %s place is newer", step, newer)
        older = REMOTE if newer == LOCAL else LOCAL
        return [newer, older] if both else [newer]

    def _saved_here(self) -> dict[int, str]:
        """The save ids of the local steps; what cannot be read is left out, and so are steps that
        are symbolic links: retention does not count them.
        """
        found: dict[int, str] = {}
        run = Run(self.local)
        links = run.links()
        for step in run.steps():
            if step in links:
                continue
            try:
                found[step] = read_manifest(self.local, step_name(step)).save.save_id
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
        log.error(
            "%s cannot be copied and stays where it is, other steps are copied: %s: %s; %s",
            described(self.local, step_name(step)),
            error.where,
            error.what,
            error.hint or "`ckpt verify` lists what is wrong with it",
        )

    def _pending(self, up_to: int | None) -> list[int]:
        here = {s: i for s, i in self._saved_here().items() if (s, i) not in self._damaged}
        if self._arrived.issuperset(here.items()):
            return []
        run = Run(self.remote)
        there = set(run.steps())
        kept = self.retention.kept(sorted({*here, *(there - run.links().keys())}), up_to)
        for step in there.intersection(here):
            save = _save_of(self.remote, step)
            if save is None:
                continue
            # Overwriting is for what was saved since: a later save there is not to be lost.
            if save.save_id == here[step] or (
                self._options.overwrite and self._in_order(step)[0] == REMOTE
            ):
                self._arrived.add((step, here[step]))
        waiting = [s for s, i in here.items() if s in kept and (s, i) not in self._arrived]
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
            there = _save_of(self.local, step) if ranks.rank == 0 else None
            # What was deleted meanwhile, or saved anew, is no damage: the latter is copied next
            # time.
            if there is not None and there.save_id == error.save_id:
                self._report(step, error.save_id, error)
            return
        self._failed.discard(step)
        if ranks.rank == 0:
            # By now the local folder may have another save of the step, which has not arrived.
            self._arrived.add((step, copied.save_id))
            log.info(
                "copied step %d to %s: %.3f GB by rank 0 in %.2f s",
                step,
                self.remote.location,
                copied.nbytes / 1e9,
                time.perf_counter() - started,
            )

    def _prune(self, ranks: Ranks, up_to: int | None) -> None:
        rules = self.retention
        if up_to is None or ranks.rank > 0:
            return
        if not rules.is_all:
            Run(self.remote).prune(
                keep_last=rules.keep_last,
                keep_every=rules.keep_every,
                keep=rules.keep,
                up_to=up_to,
            )
        if rules.nearby.is_all:
            return
        removals = plan_prune(self.local, rules.nearby, grace=ABANDONED, up_to=up_to)
        here = self._saved_here()
        kept = rules.kept(sorted(here), up_to)
        # What has not arrived goes only if retention does not keep it, and when all that it keeps
        # has arrived: until then it may be the newest step that can be loaded.
        safe = all((s, i) in self._arrived for s, i in here.items() if s in kept and s <= up_to)
        may_go = [
            removal
            for removal in removals
            if removal.kind != "step"
            or (removal.step, removal.save_id) in self._arrived
            or (safe and removal.step not in kept)
        ]
        remove(self.local, may_go)


@contextmanager
def _leaving(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks what goes wrong inside."""
    try:
        yield
    except BaseException as error:
        ranks.leave(in_one_line(error))
        raise


def _save_of(store: Store, step: int) -> SaveInfo | None:
    try:
        return read_manifest(store, step_name(step)).save
    except (FormatError, NotFoundError):
        return None
