"""The checkpoints of one training run: save now or in the background, restore the newest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial as bound
from typing import Self, Unpack

from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.places import Place, StepFolder, step_name, step_number, store_at
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, OneRank, Ranks, failing_together
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.run.run import Retention, Run
from ckptkit.checkpoint.workers import Progress, uncollected
from ckptkit.checkpoint.write.damage import Damage
from ckptkit.errors import (
    CkptkitError,
    GivenUpError,
    PeerError,
    UsageError,
)
from ckptkit.format.names import check_named, pattern_list
from ckptkit.live.background import Background, Preemption, Tiers
from ckptkit.live.comparison import LoadOptions
from ckptkit.live.restore import (
    NOT_LOADED,
    Restored,
    attempts,
    check_whole,
    load_into,
    raise_alike,
)
from ckptkit.live.save import LastSave, PreparedSave, SaveOptions, prepare
from ckptkit.live.state.parts import HandCuts
from ckptkit.live.state.ranks import StoreRanks, current_world, next_name, ranks_of
from ckptkit.live.wrappers import Training, TrainingObjects
from ckptkit.model.document import check_count, parse_seconds, parse_size, size_text
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.storage import Options

_PATIENCE = 10

log = logging.getLogger("ckptkit.live")


class Checkpointer:
    """Saves into and restores from one run; every rank makes one, and all make the same calls.

    With `asynchronous`, `save` returns when the state has been copied in memory, and a background
    thread writes it; what goes wrong there is raised by the next call, by `wait` and at the end of
    the `with` block. Without a `with` block only the log tells of a last save that failed. A save
    that begins while another is being written waits for it, or with `when_busy="skip"` does nothing
    and returns None.

    With `local`, a folder that all ranks see (on the disk of a single machine, or in a shared file
    system), steps are saved there and copied to `location` in the background. A local step stays
    until it has been copied, or until the newer ones that `keep_last` keeps have been; a job that
    ends before that leaves the rest to the next one with the same two places. What goes wrong with
    copying harms no local step: the next `save` saves, begins to copy again, and then raises it;
    only a local step that is damaged is reported in the log and left behind. `wait` and the end of
    the `with` block wait for copies too, and raise what went wrong. Retention is for both places;
    `local_keep_last` is how many steps that have been copied stay local.

    The `keep_last` newest steps stay, and those whose numbers are multiples of `keep_every`;
    without the two all stay. `overwrite` lets a save replace a step of the same number.

    With `on_sigterm="finish"` a save under way is finished before the process ends, in the local
    folder where there is one: copying is left to the next job. `storage_options` say how to reach
    an object store (see `ckptkit.open`).

    What no wrapper keeps the same on all ranks has to be the same, or the save is refused: buffers,
    tensors in `state`, and parameters that are not cut along an axis that cuts. What `differing`
    names (patterns too) may differ: the first rank's is saved.

    `mesh` names the axes that the model does not, and `rules` say how tensors were cut by hand.
    `chunk_bytes` is about how large a stored chunk is. A rank writes by six threads (into files
    beside a training by one or two), and reads by as many as suit its cores; `threads` is another
    number, but what comes from a disk past the page cache is asked for by twelve at least. A rank
    that the others wait for longer than `timeout` seconds is given up. `progress` is called, from
    any thread, with the bytes done since the last call.
    """

    def __init__(  # noqa: PLR0913 — one keyword for each decision, all with defaults
        self,
        location: Place,
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        asynchronous: bool = False,
        when_busy: str = "wait",
        mesh: DeviceMesh | None = None,
        rules: RulesLike | None = None,
        differing: Iterable[str] = (),
        overwrite: bool = False,
        chunk_bytes: int | str = DEFAULT_CHUNK_BYTES,
        on_sigterm: str | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        threads: int | None = None,
        progress: Progress | None = None,
        storage_options: Options | None = None,
        local: Place | None = None,
        local_keep_last: int | None = None,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise UsageError('when_busy is "wait" or "skip"', value=when_busy)
        seconds = parse_seconds(timeout, "timeout")
        if threads is not None:
            check_count(threads, "threads")
        self._world = current_world()
        self._store = store_at(location, storage_options)
        self.location = str(self._store.location)
        """Where the run is."""
        self.run = Run(self._store)
        """The run, with all its steps; with a local folder those that have been copied."""
        self._tiers = Tiers(
            self._store,
            local,
            Retention(keep_last, keep_every, local_keep_last),
            overwrite=overwrite,
            is_first=self._world.rank == 0,
        )
        self._name = next_name(self._world, "run")
        cuts = HandCuts()
        if rules is not None:
            # Not in the first save: where one rank lacks the file, all fail here, and at once. To
            # hear of that all ranks meet, so all of them pass rules, or none does.
            ranks = ranks_of(self._world, f"{self._name}/rules", seconds, "rules were not read")
            with failing_together(ranks):
                cuts = HandCuts.of(rules)
                ranks.wait()
        self._asynchronous = asynchronous
        self._skips = asynchronous and when_busy == "skip"
        self._options = SaveOptions(
            overwrite=overwrite,
            chunk_bytes=parse_size(chunk_bytes),
            differing=pattern_list(differing, "differing"),
            threads=threads,
            timeout=seconds,
            progress=progress,
            mesh=mesh,
            rules=cuts,
            copies_first=asynchronous,
        )
        self._calls = 0
        self._last = LastSave()
        self._background = Background()
        self._met: list[Ranks] = []
        """Where ranks met in saves, the last one that was committed first."""
        self._writing: PreparedSave | None = None
        self._closed = False
        self._preemption = None
        if on_sigterm is not None:
            name = f"{self._name}/sigterm"
            self._preemption = Preemption(self._world, name, on_sigterm, self._leave)

    def __repr__(self) -> str:
        written = self._tiers.written
        local = "" if written is self._store else f", local={str(written.location)!r}"
        return f"Checkpointer({self.location!r}{local})"

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that names axes which the model does not."""
        return self._options.mesh

    def save(
        self,
        step: int,
        *,
        extra: Mapping[str, object] | None = None,
        **objects: Unpack[TrainingObjects],
    ) -> str | None:
        """Save a step; returns its location, or None where it was skipped (see `when_busy`).

        `objects` are `model=`, `optimizer=`, `scheduler=`, `dataloader=`, `scaler=` and `state=`.
        """
        self._check_open()
        quiet = nullcontext() if self._preemption is None else self._preemption.deferred()
        # All of it, not only what makes objects by the thousand: between two such parts, or in the
        # threads that write a synchronous save, Python would look through all objects of the job.
        with quiet, uncollected(), ExitStack() as after:
            # First of all, so that what goes wrong on one rank from here on reaches the others.
            ranks = self._meeting("save")
            self._met.append(ranks)
            # With `local`: whatever becomes of the save, all ranks go through the same rounds of
            # copying. This one's begins when `after` ends.
            after.callback(self._tiers.turn(self._copying(), step))
            with failing_together(ranks):
                given = (extra, *objects.values())
                if all(value is None or value == {} for value in given):
                    # It would be the newest step, and free an older one.
                    raise UsageError("nothing to save", hint="pass model=…, state=… or extra=…")
                if extra is not None:
                    check_named(extra, "extra")
                name, training = step_name(step), Training.of(**objects)
                failed_copy = self._tiers.meet(ranks)
                # Whether rank 0 is still writing: one answer for all.
                if self._skips and ranks.share(lambda: self._background.is_running):
                    return None
                self._background.wait()
                started, store = time.perf_counter(), self._tiers.written
                options, world = self._options, self._world
                save = prepare(
                    store, step, training, extra, options, self._last, world=world, ranks=ranks
                )
            if self._asynchronous:
                self._writing = save
                work = bound(self._write_and_commit, save, started, after.pop_all())
                self._background.run(work, f"saving step {step}")
            else:
                self._write_and_commit(save, started, after.pop_all())
            self._tiers.raise_failed(failed_copy)
            return f"{self._tiers.written.location}/{name}"

    def restore(
        self,
        *,
        step: int | None = None,
        skip: Iterable[str] = (),
        partial: bool = False,
        cast: bool = False,
        verify: bool = True,
        fallback: bool = False,
        read_once: bool = False,
        **objects: Unpack[TrainingObjects],
    ) -> Restored | None:
        """Load the newest committed step, or the one asked for, into the objects that `save` took;
        None when there is none.

        With `fallback`, a step that turns out to be damaged is reported in the log, and the one
        before it is loaded; when this job saves the damaged one anew, that takes its place. The
        same save in the other place, where there is one, is tried first, and without `fallback`
        too. With `partial` what the step lacks stays as it is; with `cast` other dtypes are
        converted. Without `verify` nothing is compared with its checksum. With `read_once`, what
        several ranks need alike is read by one of them, and reaches the others through the job's
        own network. `skip` names groups that are left as they are: `skip=["dataloader"]`.
        """
        self._check_open()
        options = LoadOptions(
            partial=partial,
            cast=cast,
            verify=verify,
            read_once=read_once,
            threads=self._options.threads,
            progress=self._options.progress,
            mesh=self._options.mesh,
            rules=self._options.rules,
        )
        ranks = self._meeting("steps", NOT_LOADED)
        with ExitStack() as after:
            # What an earlier job left is copied now.
            after.callback(self._tiers.turn(self._copying(), None))
            with failing_together(ranks):
                self._background.wait()
                training = Training.of(skip, **objects)
                self._tiers.meet(ranks)
                # Which to try, and from where: a listing may differ from rank to rank.
                wanted = "newest" if step is None else f"{step_number(step_name(step))}"
                asked, candidates = ranks.share(
                    lambda: (wanted, self._tiers.candidates(step, fallback=fallback))
                )
                if asked != wanted:
                    raise UsageError(
                        f"rank 0 restores step {asked}, rank {self._world.rank} another one",
                        value=wanted,
                    )
                # What a rank passes may be wrong: nobody goes on alone.
                ranks.wait()
            steps = [StepFolder(self._tiers.at(at), step_name(number)) for number, at in candidates]

            restored, damaged = None, list[Damage]()
            for folder, attempt in attempts(steps, damaged, is_first=self._world.rank == 0):
                with attempt:
                    ranks, number = self._meeting("load", NOT_LOADED), step_number(folder.name)
                    try:
                        restored = load_into(
                            training, folder.store, number, self._world, ranks, options
                        )
                    except Exception as error:
                        # With nothing to go back to there is nothing to agree on.
                        if folder is steps[-1]:
                            raise
                        raise_alike(self._meeting("damage", NOT_LOADED), error)
                    break
            if restored is not None:
                check_whole(restored, damaged)
                self._tiers.mark_replaceable(damaged, steps[len(damaged)])
            return restored

    def keep(self, steps: Iterable[int]) -> None:
        """Keep these steps, such as the best so far, besides those that `keep_last` and
        `keep_every` do; the next call names others. A step may be named before it is saved: those
        of the call before stay until it is committed.
        """
        self._tiers.keep(steps)

    def should_stop(self, step: int) -> bool:
        """Whether SIGTERM came and this is the step, the same on all ranks, to save and leave
        after; ask once in every step, with `on_sigterm="save"`.
        """
        if self._preemption is None:
            raise UsageError("nobody listens for SIGTERM", hint='pass on_sigterm="save"')
        return self._preemption.should_stop(step)

    def cancel(self, *, patience: float = 0.0) -> bool:
        """Give up the asynchronous save that is under way, unless it ends within `patience`
        seconds; returns whether it was given up. One rank's word is enough, and the others hear of
        it as of a failed save. Nothing is left behind, and a step that is committed stays.
        """
        self._background.settle(patience)
        if (save := self._writing) is not None:
            save.cancel()
        try:
            self._background.wait()
        except PeerError as error:
            # Another rank's word may have ended it before this one's.
            if save is None and not isinstance(error, GivenUpError):
                raise
            log.info("a save was given up: %s", error)
            return True
        return False

    def wait(self) -> None:
        """Return when nothing is being written or copied any more; raises what went wrong."""
        self._background.wait()
        self._tiers.wait()

    def close(self) -> None:
        """Wait for what is being written or copied, and free the memory that saves use."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as after:
            # From the last: SIGTERM is listened to for as long as anything is being written.
            if self._preemption is not None:
                self._preemption.finish()
                after.callback(self._preemption.remove)
            after.callback(self._tiers.wait)
            after.callback(self._last.close)
            self._background.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        try:
            self.close()
        except CkptkitError as problem:
            if error is None:
                raise
            # The error that ends the block says more; this one must not be lost.
            log.error("at the end of the block: %s", problem)

    def _write_and_commit(self, save: PreparedSave, started: float, after: ExitStack) -> None:
        """Write a save and make its step exist, in the background or not. Copying elsewhere begins
        when `after` ends, whatever has become of the save.
        """
        step = save.writer.step
        with after:
            try:
                with failing_together(save.ranks), save.writer:
                    save.check_replicas()
                    save.writer.commit()
                    self._forget_before(save.ranks)
                self._last.keep(save)
                if self._world.rank == 0:
                    seconds = time.perf_counter() - started
                    speed = size_text(save.nbytes / seconds)
                    done = f"{size_text(save.nbytes)} in {seconds:.2f} s, {speed}/s"
                    log.info("saved step %d to %s: %s", step, self._tiers.written.location, done)
                self._tiers.saved(step)
            finally:
                self._writing = None  # it keeps what it wrote alive

    def _forget_before(self, ranks: Ranks) -> None:
        """All ranks have met here, so none looks any more at what was said before."""
        before = self._met[: self._met.index(ranks)]
        del self._met[: len(before)]
        if self._world.rank == 0:
            for old in before:
                # The step is committed, and this must not say otherwise.
                with suppress(RuntimeError):
                    old.forget()

    def _leave(self) -> None:
        """End what has to be whole when the process ends, and nothing else."""
        self._background.settle()
        self._tiers.give_up()

    def _copying(self) -> StoreRanks | OneRank:
        """Where ranks meet to copy: those with little to send wait long for the others."""
        return self._meeting("copy", "steps were not copied", patience=_PATIENCE)

    def _meeting(
        self, what: str, failure: str = Ranks.failure, *, patience: int = 1
    ) -> StoreRanks | OneRank:
        """All ranks, for one call, under a name that none had before."""
        self._calls += 1
        name = f"{self._name}/{self._calls}-{what}"
        return ranks_of(self._world, name, patience * self._options.timeout, failure)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed", where=self.location)
        made_for, world = self._world, current_world()
        if world != made_for:  # as many ranks may have other numbers, and hold other parts
            raise UsageError(
                "this Checkpointer was made before init_process_group",
                where=self.location,
                value=f"for rank {made_for.rank} of {made_for.size}, now this is rank {world.rank} "
                f"of {world.size}",
                hint="make it after dist.init_process_group(…)",
            )


def save(  # noqa: PLR0913 — one keyword for each decision, all with defaults
    location: Place,
    *,
    step: int,
    extra: Mapping[str, object] | None = None,
    mesh: DeviceMesh | None = None,
    rules: RulesLike | None = None,
    differing: Iterable[str] = (),
    overwrite: bool = False,
    chunk_bytes: int | str = DEFAULT_CHUNK_BYTES,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    storage_options: Options | None = None,
    **objects: Unpack[TrainingObjects],
) -> str:
    """Save a step of the run at `location`, and return the step's own; every rank calls it alike.

    `objects` are `model=`, `optimizer=`, `scheduler=`, `dataloader=`, `scaler=` and `state=`.

    `storage_options` say how to reach an object store (see `ckptkit.open`).
    """
    with Checkpointer(
        location,
        mesh=mesh,
        rules=rules,
        differing=differing,
        overwrite=overwrite,
        chunk_bytes=chunk_bytes,
        timeout=timeout,
        storage_options=storage_options,
    ) as checkpointer:
        saved = checkpointer.save(step, extra=extra, **objects)
    assert saved is not None  # noqa: S101 — only asynchronous saves are skipped
    return saved
