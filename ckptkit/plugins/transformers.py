"""The Trainer of transformers: its checkpoints are the steps of a run.

`train` opens the run and looks which step to resume. What the Trainer then asks of a checkpoint's
folder, it asks of that step; only its own state lies in a folder, which is gone when `train` ends.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ckptkit.checkpoint.places import Place, step_name, step_number
from ckptkit.errors import NotFoundError, UsageError
from ckptkit.live import (
    Checkpointer,
    PerDataRank,
    PerRank,
    Restored,
    load,
    rng_state,
    set_rng_state,
)
from ckptkit.plugins import Framework, opened

log = logging.getLogger("ckptkit.plugins")

_TRANSFORMERS = Framework("transformers", "5.23", "transformers")

# All that is private in the Trainer and is replaced here, with what it takes; as in 5.23 and 5.24.
_REPLACED = (
    "Trainer._save_checkpoint(model, trial)",
    "Trainer._load_from_checkpoint(resume_from_checkpoint, model)",
    "Trainer._load_optimizer_and_scheduler(checkpoint)",
    "Trainer._load_scaler(checkpoint)",
    "Trainer._load_rng_state(checkpoint)",
    "Trainer._load_best_model()",
)
_STATE_FILE = "trainer_state.json"
_STATE = "trainer_state"
_RNG = "rng"
# The Trainer, or what is derived from it: only who mixes this in says which.
_Trainer: Any = object


class TrainerMixin(_Trainer):  # type: ignore[misc]
    """Before `Trainer`, or what is derived from it, among the bases of a class: its checkpoints are
    then the steps of a run.

    `checkpoints` says which run: its location, or a `Checkpointer` with all that one can do. The
    default is the folder `output_dir`. Of the steps in either location `save_total_limit` stay.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before = cls.__mro__[: cls.__mro__.index(TrainerMixin)]
        if any(each.__module__.partition(".")[0] == "transformers" for each in before):
            # Nothing of this class would be asked, and nobody would be told.
            raise UsageError(
                "TrainerMixin stands before the Trainer among the bases",
                value=cls.__name__,
                hint=f"class {cls.__name__}(TrainerMixin, Trainer)",
            )

    def __init__(
        self, *args: Any, checkpoints: Checkpointer | Place | None = None, **kwargs: Any
    ) -> None:
        trainer = _TRANSFORMERS.module("transformers").Trainer
        if not isinstance(self, trainer):
            raise UsageError(
                "this class is for a Trainer of transformers",
                value=type(self).__name__,
                hint="class MyTrainer(TrainerMixin, Trainer)",
            )
        _TRANSFORMERS.check({"transformers": _REPLACED})
        super().__init__(*args, **kwargs)
        self._checkpoints = checkpoints
        self._checkpointer: Checkpointer | None = None
        self._resumed: _Resumed | None = None
        # Refuse what would be promised and not done.
        settings = self.args
        if self.is_deepspeed_enabled or self.is_fsdp_xla_enabled:
            raise UsageError(
                "a run keeps what plain, DDP and FSDP jobs train, not engines of DeepSpeed or XLA",
                hint="leave TrainerMixin out, or train with fsdp=…",
            )
        if settings.push_to_hub and settings.hub_strategy != "end":
            raise UsageError(
                "there is no folder to push at each save",
                where="push_to_hub",
                value=str(getattr(settings.hub_strategy, "value", settings.hub_strategy)),
                hint='hub_strategy="end" pushes what save_model() writes; '
                "`ckpt export` makes such a folder of any step",
            )
        if isinstance(checkpoints, Checkpointer) and settings.save_total_limit is not None:
            raise UsageError(
                "a Checkpointer says itself which steps stay",
                where="save_total_limit",
                value=settings.save_total_limit,
                hint="Checkpointer(…, keep_last=…), and save_total_limit=None",
            )

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 — as the Trainer's is
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as the Trainer does. `resume_from_checkpoint` is True for the newest step that is
        sound, or the location of a run or a step, or a folder that the Trainer itself wrote.
        """
        wanted = resume_from_checkpoint
        saves = self.args.save_strategy != "no"
        if trial is not None and saves:
            raise UsageError(
                "the trials of a search would be steps of one run",
                hint='search with save_strategy="no"',
            )
        more = (trial, ignore_keys_for_eval)
        with (
            self._opened() as checkpointer,
            TemporaryDirectory() as folder,
            self._stopping(checkpointer),
        ):
            if not wanted:
                is_ours = checkpointer is not self._checkpoints
                if saves and (is_ours or not checkpointer._options.overwrite):
                    _check_new(checkpointer)
                return super().train(None, *more)
            if wanted is not True and Path(wanted, _STATE_FILE).is_file():
                return super().train(str(wanted), *more)
            source = None if wanted is True else str(wanted)
            restored = self._restore(source)
            try:
                while True:
                    self._resumed = _Resumed.of(restored, source)
                    # The Trainer looks for it there; it would miss the folder of the best model.
                    said = {**self._resumed.state, "best_model_checkpoint": None}
                    Path(folder, _STATE_FILE).write_text(json.dumps(said))
                    try:
                        return super().train(folder, *more)
                    except _AnotherStepError as other:
                        # The one that was announced is damaged: what follows from the state of the
                        # other one, such as the epoch, is decided early in `train`.
                        restored = other.restored
                        source = f"{checkpointer.location}/{step_name(restored.step)}"
            finally:
                self._resumed = None

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ARG002 — the wrapped one is
        self.store_flos()
        state, step, best = self.state, self.state.global_step, self.state.best_model_checkpoint
        with self._opened() as checkpointer:
            if state.best_global_step == step:
                state.best_model_checkpoint = f"{checkpointer.location}/{step_name(step)}"
            # What callbacks want to be kept, as the Trainer itself notes it.
            module = _TRANSFORMERS.module("transformers.trainer_callback")
            keeps_state = _TRANSFORMERS.private(module, "ExportableState")
            kept: dict[str, Any] = {}
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, keeps_state):
                    kept.setdefault(type(callback).__name__, []).append(callback.state())
            state.stateful_callbacks = {
                name: states if len(states) > 1 else states[0] for name, states in kept.items()
            }
            # The best is known by its location, which may be in another run. The one so far stays
            # until the new one is committed, also where another job has named it.
            for location in (best, state.best_model_checkpoint):
                number = _step_in(checkpointer, location)
                if number is not None:
                    checkpointer.keep([number])
            # Ranks measure their own times, so the first one's state is the job's.
            mine: Any = None
            if self.args.process_index == 0:  # as the Trainer's own file has it
                mine = json.loads(json.dumps(dataclasses.asdict(state)))
            extra: dict[str, object] = {_STATE: PerRank(mine)}
            objects: dict[str, Any] = {"model": self.model_wrapped}
            if not self.args.save_only_model:
                objects = self._objects()
                extra[_RNG] = PerDataRank(rng_state())
            if checkpointer.save(step, extra=extra, **objects) is None:
                state.best_model_checkpoint = best  # skipped, as another save was under way

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # The model is loaded with its optimizer, when both are as they are trained.
        if self._resumed is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        resumed = self._resumed
        if resumed is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        objects, step = self._objects(), resumed.restored.step
        if _RNG not in set(resumed.restored.extra):  # which ranks it is for is asked later
            log.warning("step %d has only the model: its optimizer begins anew", step)
            objects = {"model": self.model_wrapped}
        restored = self._restore(resumed.source, **objects)
        if restored.step != step:
            raise _AnotherStepError(restored)
        resumed.restored = restored
        self.state.best_model_checkpoint = resumed.state["best_model_checkpoint"]

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            super()._load_rng_state(checkpoint)
            return
        found = self._resumed.restored.extra.get(_RNG)
        if found is None:
            log.info("no state of random numbers for this rank: the job had other ranks")
        set_rng_state(found)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        log.info("loading the best model from %s (%s)", best, self.state.best_metric)
        self._restore(best, model=self.model_wrapped)

    def _restore(self, source: str | None, **objects: Any) -> Restored:
        """Load the newest sound step, or what a location names; without objects its state only."""
        with self._opened() as checkpointer:
            if source is not None:
                number = _step_in(checkpointer, source)
                if number is None:
                    return load(source, **objects)
                found = checkpointer.restore(step=number, **objects)
            else:
                found = checkpointer.restore(fallback=True, **objects)
            if found is None:
                raise NotFoundError(
                    "a run without a step to resume from",
                    where=checkpointer.location,
                    hint="train() without resume_from_checkpoint begins one; a folder that the "
                    "Trainer wrote itself is resumed by its path: "
                    'train(resume_from_checkpoint="…/checkpoint-500")',
                )
            return found

    def _objects(self) -> dict[str, Any]:
        """All that is trained."""
        return {
            "model": self.model_wrapped,
            # accelerate's wrapper has no state of its own.
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),
            "scheduler": self.lr_scheduler,
            "scaler": getattr(self.accelerator, "scaler", None),
        }

    @contextmanager
    def _opened(self) -> Iterator[Checkpointer]:
        """The Checkpointer; one of ours lives as long as `train` does."""
        if self._checkpointer is not None:
            yield self._checkpointer
            return
        place, limit = self._checkpoints or self.args.output_dir, self.args.save_total_limit
        # Going on from an older step saves those after it again, as the Trainer does.
        with opened(place, keep_last=limit, overwrite=True) as checkpointer:
            # The Trainer would look for the best step among its own folders, to delete the others.
            self._checkpointer, self.args.save_total_limit = checkpointer, None
            try:
                yield checkpointer
                checkpointer.wait()  # who passed one need not close it for this
            finally:
                self._checkpointer, self.args.save_total_limit = None, limit

    @contextmanager
    def _stopping(self, checkpointer: Checkpointer) -> Iterator[None]:
        """Save once more and stop when SIGTERM comes, if the Checkpointer notes that."""
        try:
            checkpointer.should_stop(0)
        except UsageError:  # nobody listens
            yield
            return

        class Stop(_TRANSFORMERS.module("transformers").TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, _: Any, state: Any, control: Any, **_more: Any) -> None:
                if checkpointer.should_stop(state.global_step):
                    checkpointer.wait()  # with when_busy="skip" the last save would be skipped
                    control.should_save = control.should_training_stop = True

        self.add_callback(Stop)
        try:
            yield
        finally:
            self.remove_callback(Stop)


@dataclasses.dataclass(slots=True)
class _Resumed:
    """The step that a training goes on from."""

    restored: Restored
    source: str | None
    """What names it; None for the newest of the run."""
    state: dict[str, Any]
    """The state of the Trainer."""

    @classmethod
    def of(cls, restored: Restored, source: str | None) -> _Resumed:
        """The step, if it is one that a Trainer saved."""
        if _STATE not in set(restored.extra):
            raise UsageError(
                f"no Trainer saved this: step {restored.step} has no {_STATE}",
                where=source or "",
                hint="ckptkit.live.load(location, model=model) takes its weights; "
                "then train() begins at step 0",
            )
        return cls(restored, source, restored.extra.of_ranks(_STATE)[0])


class _AnotherStepError(Exception):
    """Another step was loaded than was announced."""

    def __init__(self, restored: Restored) -> None:
        super().__init__(f"step {restored.step}")
        self.restored = restored


def _check_new(checkpointer: Checkpointer) -> None:
    """Refuse to begin where steps are: hours later the first save would be refused."""
    found = checkpointer.restore(fallback=True)
    if found is not None:
        raise UsageError(
            f"the run has steps, up to {found.step}",
            where=checkpointer.location,
            hint="train(resume_from_checkpoint=True) goes on from there; another location, or "
            "checkpoints=Checkpointer(…, overwrite=True), begins anew",
        )


def _step_in(checkpointer: Checkpointer, location: str | None) -> int | None:
    """The number of a step by its location, if it is one of this run."""
    run, _, name = (location or "").rstrip("/").rpartition("/")
    return step_number(name) if run == checkpointer.location else None
