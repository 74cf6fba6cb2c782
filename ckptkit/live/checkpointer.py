"""The checkpoints of one training run: save now or in the background, restore the newest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import zip_longest
from types import TracebackType
from typing import Self

from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.places import Place, step_name, store_at
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, OneRank, Ranks, leaving
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.run.mirror import Retention
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.threads import Progress
from ckptkit.errors import CkptkitError, FormatError, PeerError, UsageError
from ckptkit.format.names import pattern_list
from ckptkit.live.arena import Arena
from ckptkit.live.background import Background
from ckptkit.live.loading import Loading, LoadOptions, Restored
from ckptkit.live.opening import open_together
from ckptkit.live.preemption import Preemption
from ckptkit.live.ranks import StoreRanks, current_world, next_name, ranks_of
from ckptkit.live.saving import PreparedSave, SaveOptions
from ckptkit.live.state.parts import HandCuts
from ckptkit.live.tiers import tiers_of
from ckptkit.live.wrappers.training import TrainingState
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES
from ckptkit.storage import Options, Store

_NOT_LOADED = "the step was not loaded"
_PATIENCE = 10

log = logging.getLogger("ckptkit.live")


class Checkpointer:
    """Saves into and restores from one run; every rank makes one, and all make the same calls.

    With `asynchronous`, `save` returns when the state has been copied in memory, and a background
    thread writes it; what goes wrong there is raised by the next call, by `wait` and at the end of
    the `with` block; without one nothing but the log tells of a last save that failed. A save that
    begins while another is being written waits for it, or with `when_busy="skip"` does nothing and
    returns None.

    With `local`, a folder that all ranks see (on the disk of a single machine, or in a shared file
    system), steps are saved there and copied to `location` in the background. A local step stays
    until it has been copied, or until the newer ones that `keep_last` keeps have been; a job that
    ends before that leaves the rest to the next one with the same two places. What goes wrong with
    copying harms no local step: the next `save` saves, begins to copy again, and then raises it;
    only a local step that is damaged is reported in the log and left behind. `wait` and the end of
    the `with` block wait for copies too, and raise what went wrong. Retention is for both places;
    `local_keep_last` is how many steps that have been copied stay local.

    With `on_sigterm="finish"` a save under way is finished before the process ends, in the local
    folder where there is one: copying is left to the next job. `storage_options` say how to reach
    an object store (see `ckptkit.open`).

    What no wrapper keeps the same on all ranks has to be the same, or the save is refused: buffers,
    tensors in `state`, and parameters that are not cut along an axis that cuts. Of what `differing`
    names (patterns too) the first rank's is saved.
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
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        on_sigterm: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        threads: int | None = None,
        progress: Progress | None = None,
        storage_options: Options | None = None,
        local: Place | None = None,
        local_keep_last: int | None = None,
    ) -> None:
        if when_busy not in ("wait", "skip"):
            raise UsageError('when_busy is "wait" or "skip"', value=when_busy)
        self._world = current_world()
        self._store = store_at(location, storage_options)
        self._run = Run(self._store)
        self._tiers = tiers_of(
            self._store,
            local,
            Retention(keep_last, keep_every, local_keep_last),
            overwrite=overwrite,
            is_first=self._world.rank == 0,
        )
        self._asynchronous = asynchronous
        self._skips = when_busy == "skip"
        self._mesh = mesh
        self._rules = HandCuts.of(rules)
        self._progress = progress
        self._options = SaveOptions(
            overwrite=overwrite,
            chunk_bytes=chunk_bytes,
            differing=pattern_list(differing, "differing"),
            threads=threads,
            timeout=timeout,
            progress=progress,
        )
        self._timeout = timeout
        self._name = next_name(self._world, "run")
        self._calls = 0
        self._arena = Arena()
        self._background = Background()
        self._used: list[Ranks] = []
        self._writing: PreparedSave | None = None
        self._closed = False
        self._preemption = None
        if on_sigterm is not None:
            name = f"{self._name}/sigterm"
            self._preemption = Preemption(self._world, name, on_sigterm, self._leave)

    def __repr__(self) -> str:
        near = self._tiers.target
        local = "" if near is self._store else f", local={str(near.location)!r}"
        return f"Checkpointer({self.location!r}{local})"

    @property
    def location(self) -> str:
        """Where the run is."""
        return str(self._store.location)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that names axes which the model does not."""
        return self._mesh

    @property
    def run(self) -> Run:
        """The run, with all its steps; with a local folder those that have been copied."""
        return self._run

    def save(
        self,
        step: int,
        *,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        dataloader: object = None,
        scaler: object = None,
        state: Mapping[str, object] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> str | None:
        """Save a step; returns its location, or None where it was skipped (see `when_busy`)."""
        self._check_open()
        sources = partial(TrainingState.of, model, optimizer, scheduler, dataloader, scaler, state)
        with nullcontext() if self._preemption is None else self._preemption.held_off():
            return self._save(step, sources, extra)

    def _save(
        self, step: int, sources: Callable[[], TrainingState], extra: Mapping[str, object] | None
    ) -> str | None:
        # First of all, so that what goes wrong on one rank from here on reaches the others.
        barrier = self._barrier("save")
        with ExitStack() as after:
            # Whatever becomes of the save: all ranks go through the same rounds.
            after.callback(self._tiers.turn(self._copying(), step))
            with leaving(barrier):
                found = sources()
                failed = self._tiers.meet(barrier)
                if self._asynchronous and self._skips and self._is_busy(barrier):
                    return None
                self._background.wait()
                save = PreparedSave(
                    self._tiers.target,
                    step,
                    self._world,
                    barrier,
                    found,
                    extra=extra,
                    mesh=self._mesh,
                    rules=self._rules,
                    options=self._options,
                    arena=self._arena,
                    stage=self._asynchronous,
                )
            self._forget_before(barrier)
            if self._asynchronous:
                self._writing = save
                self._background.run(partial(self._end, save, after.pop_all()), f"step {step}")
            else:
                self._finish(save)
        self._tiers.raise_failed(failed)
        return f"{self._tiers.target.location}/{step_name(step)}"

    def restore(  # noqa: PLR0913 — everything that a step may hold, and how much may differ
        self,
        *,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        dataloader: object = None,
        scaler: object = None,
        state: Mapping[str, object] | None = None,
        step: int | None = None,
        skip: Iterable[str] = (),
        partial: bool = False,
        cast: bool = False,
        verify: bool = True,
        fallback: bool = False,
        read_once: bool = False,
    ) -> Restored | None:
        """Load the newest committed step, or the one asked for, into the objects; None when there
        is none. With `fallback`, a step that turns out to be damaged is reported in the log, and
        the one before it is loaded; the same save in the other place, where there is one, is tried
        first, and without `fallback` too. With `read_once`, what several ranks need alike is read
        by one of them, and reaches the others through the job's own network. `skip` names groups
        that are left as they are: `skip=["dataloader"]`.
        """
        self._check_open()
        options = LoadOptions(
            partial=partial,
            cast=cast,
            verify=verify,
            read_once=read_once,
            threads=self._options.threads,
            timeout=self._timeout,
            progress=self._progress,
        )
        barrier = self._barrier("steps", _NOT_LOADED)
        with ExitStack() as after:
            # What an earlier job left is copied now.
            after.callback(self._tiers.turn(self._copying(), None))
            with leaving(barrier):
                self._background.wait()
                sources = TrainingState.of(
                    model, optimizer, scheduler, dataloader, scaler, state, skip
                )
                self._tiers.meet(barrier)
                candidates = self._candidates(barrier, step, fallback=fallback)
                # What a rank passes may be wrong: nobody goes on alone.
                barrier.wait()
            return self._first_whole(candidates, sources, options)

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
        save = self._writing
        if save is None:
            return False
        save.cancel()
        try:
            self._background.wait()
        except PeerError as error:
            log.info("the save of step %d was given up: %s", save.step, error)
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
        if self._preemption is not None:
            self._preemption.remove()
        try:
            self._background.wait()
        finally:
            self._arena.close()
            self._tiers.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CkptkitError as problem:
            if error is None:
                raise
            # The error that ends the block says more; this one must not be lost.
            log.error("the last save failed: %s", problem)

    def _end(self, save: PreparedSave, after: ExitStack) -> None:
        with after:
            try:
                self._finish(save)
            finally:
                self._writing = None  # it knows the memory that it wrote

    def _finish(self, save: PreparedSave) -> None:
        save.commit()
        self._tiers.saved(save.step, is_first=self._world.rank == 0)

    def _leave(self) -> None:
        """End what has to be whole when the process ends, and nothing else."""
        self._background.settle()
        self._tiers.give_up()

    def _candidates(
        self, barrier: Ranks, step: int | None, *, fallback: bool
    ) -> list[tuple[int, str]]:
        """The steps to try, and from where: rank 0's view, as a listing may differ from rank to
        rank.
        """
        mine = "newest" if step is None else str(step)
        asked = barrier.share(lambda: mine)
        if asked != mine:
            raise UsageError(
                f"rank 0 restores step {asked}, rank {self._world.rank} another one", value=mine
            )
        found: list[tuple[int, str]] = barrier.share(
            lambda: self._tiers.candidates(step, fallback=fallback)
        )
        return found

    def _first_whole(
        self,
        candidates: Sequence[tuple[int, str]],
        sources: TrainingState,
        options: LoadOptions,
    ) -> Restored | None:
        """Load the first candidate that is not damaged; the error of the last where all are."""
        for (number, place), after in zip_longest(candidates, candidates[1:]):
            store = self._tiers.at(place)
            loading = Loading(
                self._opener(store, number),
                self._world,
                self._barrier("load", _NOT_LOADED),
                sources,
                mesh=self._mesh,
                rules=self._rules,
                options=options,
            )
            try:
                return loading.run()
            except Exception as error:
                if after is None or not self._is_damage(error):
                    raise
                # The same step elsewhere loses nothing, an older one does.
                level = logging.WARNING if after[0] == number else logging.ERROR
                then = f"step {after[0]} in {self._tiers.at(after[1]).location}"
                said = f"step {number} is damaged in {store.location}, trying {then}"
                log.log(level, "%s: %s", said, error)
        return None

    def _opener(self, store: Store, step: int) -> Callable[[Ranks], Checkpoint]:
        return lambda barrier: open_together(barrier, store, lambda: Run(store).open(step))

    def _forget_before(self, barrier: Ranks) -> None:
        """Remove what the last save but one left in the store: all ranks have begun the one after
        it, so none can look at it any more.
        """
        self._used.append(barrier)
        if len(self._used) > 2:
            old = self._used.pop(0)
            if self._world.rank == 0:
                old.forget()

    def _is_damage(self, error: Exception) -> bool:
        """Whether what made a load fail on some rank is damage: one answer for all."""
        # A rank that only heard of another's failure has no reason of its own.
        mine = None if isinstance(error, PeerError) else isinstance(error, FormatError)
        ranks = self._barrier("damage", _NOT_LOADED)
        return bool(ranks.agree(mine, lambda heard: True in heard and False not in heard))

    def _is_busy(self, barrier: Ranks) -> bool:
        """Whether rank 0 is still writing: one answer for all."""
        return bool(barrier.share(lambda: self._background.is_running))

    def _barrier(self, what: str, failure: str = "there is no new step") -> StoreRanks | OneRank:
        return ranks_of(self._world, self._next(what), self._timeout, failure)

    def _copying(self) -> StoreRanks | OneRank:
        """Where ranks meet to copy: those with little to send wait long for the others."""
        name = self._next("copy")
        return ranks_of(self._world, name, _PATIENCE * self._timeout, "steps were not copied")

    def _next(self, what: str) -> str:
        self._calls += 1
        return f"{self._name}/{self._calls}-{what}"

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed", where=self.location)
        size = current_world().size
        if size != self._world.size:
            raise UsageError(
                "this Checkpointer was made before init_process_group",
                where=self.location,
                value=f"for {self._world.size} ranks, now there are {size}",
                hint="make it after dist.init_process_group(…)",
            )
