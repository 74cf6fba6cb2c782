"""torchtitan with its steps in ckptkit: `checkpoint=CheckpointManager.Config(enable=True)`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ckptkit.checkpoint.export.export import export
from ckptkit.checkpoint.places import step_name, store_at
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.checkpoint.run.run import Run
from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer, StateMismatchError, load, save
from ckptkit.live.state.ranks import current_world, meeting
from ckptkit.plugins import Framework
from ckptkit.storage import Options

TORCHTITAN = Framework("torchtitan", "0.3", "torchtitan")
_base = TORCHTITAN.module("torchtitan.components.checkpointer.base")
_dataloader = TORCHTITAN.module("torchtitan.components.dataloader")
_dtypes = TORCHTITAN.private(TORCHTITAN.module("torchtitan.config"), "TORCH_DTYPE_MAP")
_filesystem = TORCHTITAN.module("torchtitan.tools.filesystem")

# What torchtitan calls some of what it saves.
_DATALOADER, _LR_SCHEDULER, _TRAIN_STATE = "dataloader", "lr_scheduler", "train_state"
_LARGEST_ADDED = 256 << 20


class CheckpointManager(TORCHTITAN.private(_base, "BaseCheckpointManager")):  # type: ignore[misc]
    """Saves a torchtitan training into a run, and resumes it under any parallelism.

    All settings of torchtitan's own managers mean what they mean there. The run is at
    `checkpoint.folder`, below the dump folder or wherever a URL says.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_base.BaseCheckpointManager.Config):  # type: ignore[misc, name-defined]
        """What torchtitan's managers can be told, and what ours can do besides."""

        async_mode: Literal["disabled", "async"] = "disabled"
        """Whether training goes on while a step is written."""

        keep_every: int | None = None
        """Steps that are multiples of this stay, whatever `keep_latest_k` says."""

        local: str | None = None
        """A folder on a fast disk: steps are saved there, and copied to `folder` meanwhile."""

        fallback: bool = True
        """Whether the step before is loaded where the newest turns out to be damaged."""

        storage_options: dict[str, Any] = field(default_factory=dict)
        """How to reach an object store, as `ckptkit.open` takes them."""

        def __post_init__(self) -> None:
            _base.BaseCheckpointManager.Config.__post_init__(self)
            if self.async_mode not in ("disabled", "async"):
                raise UsageError('async_mode is "disabled" or "async"', value=self.async_mode)
            if self.initial_load_in_hf_quantized:
                raise UsageError(
                    "quantized weights of Hugging Face are not read",
                    where="checkpoint.initial_load_in_hf_quantized",
                    hint="load them with torchtitan's own manager, and save a seed checkpoint",
                )

    def __init__(  # what `Config.build` passes
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future: Future[None] | None = None
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise UsageError(
                "this model has no names of Hugging Face: its spec lacks a state_dict_adapter",
                where="checkpoint.last_save_in_hf",
            )
        self._config, self._adapter = config, sd_adapter
        self._storage: Options | None = config.storage_options or None
        self._parts = model_parts
        self._optimizers = list(optimizers)
        # The trainer has the schedule, whose stages say which ranks are a pipeline.
        self._model = getattr(states.get(_TRAIN_STATE), "pp_schedule", model_parts)
        self._loader = None if dataloader is None else _Position(dataloader)
        self._states = {**states, _LR_SCHEDULER: lr_schedulers}
        self.folder: str = _filesystem.join(base_folder, config.folder)
        self._checkpointer = Checkpointer(
            self.folder,
            keep_last=config.keep_latest_k or None,
            keep_every=config.keep_every,
            asynchronous=config.async_mode == "async",
            local=config.local,
            # A job that died between a step and its metrics comes by the same step again.
            overwrite=True,
            storage_options=self._storage,
        )

    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 — torchtitan's
        config = self._config
        is_first = curr_step == 1 and config.enable_first_step_checkpoint
        if config.load_only or not (is_first or last_step or curr_step % config.interval == 0):
            return False
        self.maybe_wait_for_saving()
        if last_step and config.last_save_model_only:
            self._save_weights(curr_step)
            return True
        self._checkpointer.save(
            curr_step,
            model=self._model,
            optimizer=self._optimizers,
            dataloader=self._loader,
            state=self._states,
        )
        if config.async_mode == "async" and not last_step:
            self.save_future = Future()
        else:
            self._checkpointer.wait()
        return True

    def _save_weights(self, step: int) -> None:
        """The end of a training: its weights alone, in the dtype and under the names asked for."""
        dtype = _dtypes[self._config.export_dtype]
        state = {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self._wrapped.state_dict().items()
        }
        self._checkpointer.save(step, model=_as_module(state))
        self._checkpointer.wait()
        if self._config.last_save_in_hf:
            # Names and the order of rows are torchtitan's business, so what it makes of its tensors
            # is a step of its own, which an export then streams.
            hf = f"{self.folder}-hf"
            saved = save(
                f"{hf}/.step",
                step=step,
                overwrite=True,
                storage_options=self._storage,
                model=_as_module(self._adapter.to_hf(state)),
            )
            if current_world().rank == 0:
                # The end of a training may be done again: its weights are replaced, and what was
                # added to them stays.
                out = store_at(f"{hf}/{step_name(step)}", self._storage)
                there = [stored.key for stored in out.list("")]
                added = [key for key in there if ".safetensors" not in key]
                kept = {key: out.read_whole(key, _LARGEST_ADDED) for key in added}
                out.delete(there)
                try:
                    export(saved, str(out.location), to_format="hf", storage_options=self._storage)
                finally:
                    Run(f"{hf}/.step", storage_options=self._storage).delete([step])
                    for key, data in kept.items():
                        out.put(key, data)

    def _load(self, step: int = -1) -> bool:
        # The newest step, in the run or still in the local folder, as the first rank sees it.
        runs = [self._checkpointer.run, *([Run(self._config.local)] if self._config.local else [])]
        with meeting(current_world(), "the newest step") as ranks:
            steps = ranks.share(lambda: [run.latest() for run in runs])
        newest = max((step for step in steps if step is not None), default=None)
        if newest is None and step == -1:
            return self._load_initial()
        wanted = newest if step == -1 else step
        if wanted == 0:
            # A seed has the weights only.
            return self._checkpointer.restore(step=0, model=self._model) is not None
        try:
            restored = self._checkpointer.restore(
                step=None if step == -1 else step,
                skip=self._config.exclude_from_loading,
                fallback=self._config.fallback,
                model=self._model,
                optimizer=self._optimizers,
                dataloader=self._loader,
                state=self._states,
            )
        except StateMismatchError as error:
            if error.where == _DATALOADER:
                error.hint = (
                    "torchtitan's data loaders go on only with as many data-parallel ranks; "
                    "--checkpoint.exclude_from_loading dataloader begins their data anew"
                )
            elif "missing: " in error.what and _TRAIN_STATE in error.what:
                error.hint = (
                    "a training ends with its weights alone, unless --checkpoint.no-"
                    "last_save_model_only: --checkpoint.load_step goes on with a step before"
                )
            else:
                error.hint = (
                    "these are steps of another model, or of other settings: choose another "
                    "--checkpoint.folder"
                )
            raise
        return restored is not None or self._load_initial()

    def _load_initial(self) -> bool:
        """What a training begins with, where its own run has no step yet."""
        config, path = self._config, self._config.initial_load_path
        if path is None and config.initial_load_in_hf:
            path = getattr(self._adapter, "hf_assets_path", None)
        if path is None:
            # A training that was begun with another manager would begin anew, unnoticed.
            if steps := self._checkpointer.run.foreign():
                last = f"{self.folder}/step-{max(info.step for info in steps)}"
                raise UsageError(
                    "the steps here are another checkpoint manager's",
                    value=last,
                    hint="choose another --checkpoint.folder, and begin with --checkpoint."
                    f"initial_load_path {last} --checkpoint.no-initial_load_model_only",
                )
            return False
        if config.initial_load_in_hf:
            if self._adapter is None:
                raise UsageError(
                    "this model has no names of Hugging Face: its spec lacks a state_dict_adapter",
                    where="checkpoint.initial_load_in_hf",
                )
            named = self._adapter.to_hf(self._wrapped.state_dict())
            try:
                load(path, storage_options=self._storage, model=_as_module(named))
            except StateMismatchError as error:
                error.hint = (
                    "are these the names of Hugging Face? Steps of torchtitan, or of ckptkit, are "
                    "begun with without --checkpoint.initial_load_in_hf"
                )
                raise
            self._wrapped.load_state_dict(self._adapter.from_hf(named))
        elif config.initial_load_model_only:
            load(path, storage_options=self._storage, model=self._model)
        else:
            # All of a step, of ckptkit or of torchtitan's own manager, but where its data was: that
            # is another training's, and a pickle in what torchtitan writes.
            left = {*config.exclude_from_loading, _DATALOADER}
            states = {name: each for name, each in self._states.items() if name not in left}
            with open_checkpoint(path, storage_options=self._storage) as step:
                ours = {name: each for name, each in states.items() if name in step.objects}
            begun = load(
                path,
                storage_options=self._storage,
                model=self._model,
                optimizer=None if "optimizer" in left else self._optimizers,
                state=ours,
            )
            for name, each in states.items():
                if name not in ours:
                    each.load_state_dict(begun.extra[name])
        return True

    @property
    def _wrapped(self) -> Any:
        return _base.ModelWrapper(self._parts)

    def _maybe_wait_for_staging(self) -> None:
        """Nothing to wait for: `save` returns when the state has been copied."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._checkpointer.wait()

    def _close(self) -> None:
        if checkpointer := getattr(self, "_checkpointer", None):
            checkpointer.close()


class _Position:
    """Where a data loader is, as plain values: torchtitan itself makes a pickle of them, which a
    load would have to run.
    """

    def __init__(self, loader: Any) -> None:
        aware = TORCHTITAN.private(_dataloader, "ParallelAwareDataloader")
        # Its own class packs what the class above it says.
        plain: Any = super(aware, loader) if isinstance(loader, aware) else loader
        self.state_dict, self.load_state_dict = plain.state_dict, plain.load_state_dict
        rank, size = (getattr(loader, name, None) for name in ("dp_rank", "dp_world_size"))
        self.data_share = None if None in (rank, size) else (rank, size)


def _as_module(tensors: Mapping[str, Any]) -> nn.Module:
    """A module that has these tensors under these names, as a save or a load takes them."""
    module = nn.Module()
    module._buffers.update(tensors)  # register_buffer takes no dots
    return module
