"""Lightning saves and loads through ckptkit: strategies whose ranks all write, and a CheckpointIO
for those that let one rank write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptkit.errors import UsageError
from ckptkit.plugins import Framework

# What the strategies override. A release that calls it otherwise would save without us, unnoticed.
_OVERRIDDEN = (
    *("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"),
    *("lightning_module_state_dict", "load_model_state_dict", "optimizer_state"),
    *("load_optimizer_state_dict", "lightning_restore_optimizer", "restore_checkpoint_after_setup"),
)
Framework("lightning", "2.6", "lightning").check(
    {"lightning.pytorch.strategies": [f"Strategy.{name}" for name in _OVERRIDDEN]}
)

# Only what is known to be there is imported.
import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from ckptkit.plugins.lightning_paths import Loaders, PathRuns, step_at
from ckptkit.storage import Options

__all__ = [
    "CkptkitCheckpointIO",
    "CkptkitDDPStrategy",
    "CkptkitFSDPStrategy",
    "CkptkitModelParallelStrategy",
    "CkptkitSingleDeviceStrategy",
    "step_at",
]


def _without_weights(content: Mapping[str, Any], live: Mapping[str, Any] | None) -> dict[str, Any]:
    """What Lightning has put together without the model's own tensors, which saves take from the
    model itself. Those that a hook put in their place stay, as those of WeightAveraging do; None
    where Lightning was given none to begin with.
    """
    rest = dict(content)
    given = rest.pop("state_dict", {})
    if all(live and name in live and _is_same(value, live[name]) for name, value in given.items()):
        return rest
    if live is None:
        raise UsageError(
            "a hook put tensors into checkpoint['state_dict'], which is not gathered here",
            value=sorted(given),
            hint="put them under a key of their own; the model is saved as it is",
        )
    return rest | {"state_dict": dict(given)}


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.data_ptr() == other.data_ptr() and one.shape == other.shape
    return True  # extra state, which each call gives anew


def _count_steps_anew(trainer: Any) -> None:
    """Let Lightning count the steps of each epoch. It does so where it asks for the loaders, once
    unless told otherwise; but an epoch that goes on at another size has other steps than the next.
    """
    if not trainer.reload_dataloaders_every_n_epochs:
        trainer.reload_dataloaders_every_n_epochs = 1


class _Saving(Strategy):
    """A strategy whose ranks all write what they have, and read what they need.

    `checkpointer` are options of `ckptkit.live.Checkpointer`, `restore` those of its `restore`.
    """

    # Ours are given the objects themselves, so these have to be there first.
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False
    _has_whole = True

    def __init__(
        self,
        *args: Any,
        checkpointer: Mapping[str, Any] | None = None,
        restore: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._runs = PathRuns(checkpointer, restore)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None or not isinstance(self.checkpoint_io, TorchCheckpointIO):
            raise UsageError(
                f"{type(self).__name__} saves by itself, without a CheckpointIO",
                hint='pass storage options as checkpointer={"storage_options": {…}}, '
                "and no CheckpointIO in plugins=",
            )
        live = self.lightning_module_state_dict() if self._has_whole else None
        found = _without_weights(checkpoint, live)
        self._runs.save(filepath, found, self.model, self.optimizers)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        module: Any = self.lightning_module
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if is_fitting else None
        strict, loaders = module.strict_loading, Loaders()
        found = self._runs.load(checkpoint_path, self.model, optimizers, loaders, strict=strict)
        if loaders.is_resized:
            _count_steps_anew(module.trainer)
        # Weights that others saved need no migration.
        return {"pytorch-lightning_version": lightning.__version__, **found}

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._runs.remove(filepath)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if checkpoint["state_dict"]:  # what a hook had put there instead of the model's
            super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The optimizers are filled already."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return {}  # nothing is gathered: saves look at the optimizers themselves

    def teardown(self) -> None:
        try:
            self._runs.close()
        finally:
            super().teardown()


class _Sharded(_Saving):
    """One of strategies that would gather the state for others to save."""

    _has_whole = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}


class CkptkitSingleDeviceStrategy(_Saving, SingleDeviceStrategy):
    """One process that saves through ckptkit."""


class CkptkitDDPStrategy(_Saving, DDPStrategy):
    """DDP whose ranks share the writing."""


class CkptkitFSDPStrategy(_Sharded, FSDPStrategy):
    """FSDP whose ranks each write and read their shards; `state_dict_type` changes nothing."""


class CkptkitModelParallelStrategy(_Sharded, ModelParallelStrategy):
    """FSDP2, tensor parallelism, or both, whose ranks each write and read their shards."""


class CkptkitCheckpointIO(CheckpointIO, Callback):
    """Rank 0 writes the whole state: for one process, and for strategies such as DDP.

    It goes into `plugins=` and, so that it knows the names of what optimizers number, into
    `callbacks=` too.
    """

    def __init__(self, *, storage_options: Options | None = None) -> None:
        self._runs = PathRuns({"storage_options": storage_options}, None)
        self._trainer: Trainer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            raise UsageError(
                "AsyncCheckpointIO has CkptkitCheckpointIO read the optimizers in a thread, while "
                "the optimizers go on",
                hint="save in the background by "
                'Trainer(strategy=CkptkitDDPStrategy(checkpointer={"asynchronous": True})), '
                "without a CheckpointIO; CkptkitSingleDeviceStrategy is the one of one process",
            )
        self._trainer = trainer

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if storage_options is not None:
            raise UsageError("pass storage_options to CkptkitCheckpointIO", value=storage_options)
        if self._trainer is None:
            raise UsageError(
                "it does not know the model whose checkpoint it is to save",
                hint="Trainer(plugins=[io], callbacks=[io]): pass it in both",
            )
        module = self._trainer.lightning_module
        found = _without_weights(checkpoint, module.state_dict())
        self._runs.save_alone(path, found, module, self._trainer.strategy.optimizers)

    def load_checkpoint(
        self,
        path: Any,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        found, ranks = self._runs.load_whole(path)
        loops = found["loops"]["fit_loop"]["state_dict"]
        if self._trainer is not None and ranks != self._trainer.world_size:
            loaders = Loaders()
            loaders.load_state_dicts([{"states": loops.get("combined_loader", [])}])
            if loaders.states:
                _count_steps_anew(self._trainer)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        self._runs.remove(path)

    def teardown(self, *_: Any, **__: Any) -> None:
        self._runs.close()


for _name, _strategy in (
    ("ckptkit_single", CkptkitSingleDeviceStrategy),
    ("ckptkit_ddp", CkptkitDDPStrategy),
    ("ckptkit_fsdp", CkptkitFSDPStrategy),
    ("ckptkit_model_parallel", CkptkitModelParallelStrategy),
):
    StrategyRegistry.register(_name, _strategy, description=_strategy.__doc__ or "", override=True)
