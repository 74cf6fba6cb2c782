"""An Accelerator of accelerate: `save_state` and `load_state`, whose checkpoints are the steps of a
run.

Its own two write FSDP's files before any hook is asked, so these stand beside them. They take all
that the Accelerator has prepared, what was registered with it, and the state of random numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckptkit.checkpoint.places import Place
from ckptkit.errors import NotFoundError, UsageError
from ckptkit.format.encoding import dumps
from ckptkit.live import Checkpointer, PerDataRank, Restored, load, rng_state, set_rng_state
from ckptkit.plugins import Framework, extra_beside, opened

log = logging.getLogger("ckptkit.plugins")

_ACCELERATE = Framework("accelerate", "1.15", "accelerate")

# All that is private in an Accelerator and is looked at here; as in 1.15.
_MODELS = "_models"
_OPTIMIZERS = "_optimizers"
_SCHEDULERS = "_schedulers"
_DATALOADERS = "_dataloaders"
_REGISTERED = "_custom_objects"

_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")
_OWN = "accelerate"
_RNG = "rng"


def save_state(
    accelerator: Any,
    checkpoints: Checkpointer | Place,
    step: int,
    *,
    extra: Mapping[str, object] | None = None,
) -> str | None:
    """Save a step, and return its location, or None where it was skipped; every rank calls it.

    `checkpoints` is the location of a run, or a `Checkpointer` with all that one can do.
    """
    objects = _objects(accelerator)
    active = accelerator.gradient_state.active_dataloader
    # Which pass over its data each loader makes next, or is in the middle of.
    epochs = []
    loaders = _ACCELERATE.private(accelerator, _DATALOADERS)
    # What skip_first_batches made of a loader is another one, over the same data.
    is_copy = active is not None and all(active is not loader for loader in loaders)
    for loader in loaders:
        at = active if is_copy and active.dataset is loader.dataset else loader
        epochs.append(
            int(getattr(at, "iteration", 0)) + bool(at is active and at.end_of_dataloader)
        )
    position = {
        "step": accelerator.step,
        "epochs": epochs,
        "is_inside": active is not None and not active.end_of_dataloader,
        "processes": accelerator.num_processes,
    }
    kept = extra_beside({_OWN: position, _RNG: PerDataRank(rng_state())}, extra)
    with opened(checkpoints) as checkpointer:
        return checkpointer.save(step, extra=kept, **objects)


def load_state(
    accelerator: Any, checkpoints: Checkpointer | Place, *, step: int | None = None, **how: Any
) -> Restored | None:
    """Load the newest step of a run, or the one asked for, into all that the Accelerator has; None
    where there is none yet. Every rank calls it.

    `how` is what `Checkpointer.restore` takes: `fallback=True`, `partial=True`, `skip=[…]`.
    """
    objects = _objects(accelerator)
    with opened(checkpoints) as checkpointer:
        restored = checkpointer.restore(step=step, **how, **objects)
        if restored is None:
            # Nobody begins anew where another program's checkpoint is.
            try:
                load(checkpointer._store)
            except NotFoundError:
                return None
            raise UsageError(
                "no run of ckptkit's, but a checkpoint of another kind",
                where=checkpointer.location,
                hint="accelerator.load_state(…) loads what accelerator.save_state(…) wrote, "
                "ckptkit.live.load(…, model=model) the model of most kinds; save_state goes on "
                "elsewhere",
            )
    random = restored.extra.get(_RNG)
    set_rng_state(random)
    if _OWN in restored.extra:  # a step of a loop without an Accelerator has none
        position = restored.extra[_OWN]
        _go_on(accelerator, position)
        if position["is_inside"]:
            # A loader that begins in the middle of a pass draws numbers, which the one that was
            # there did not: what is right before the first batch is set when it has come, and the
            # model is next trained.
            def begin(module: nn.Module, _: object) -> None:
                if module.training:
                    handle.remove()
                    set_rng_state(random)

            handle = _ACCELERATE.private(accelerator, _MODELS)[0].register_forward_pre_hook(begin)
    return restored


def _objects(accelerator: Any) -> dict[str, Any]:
    """What the Accelerator has, as `Checkpointer` takes it."""
    kind = _ACCELERATE.module("accelerate").Accelerator
    if not isinstance(accelerator, kind):
        raise UsageError("not an Accelerator", value=type(accelerator).__name__)
    if accelerator.distributed_type.value in _ENGINES:
        raise UsageError(
            "a run keeps what plain, DDP and FSDP jobs train, not another engine",
            value=accelerator.distributed_type.value,
            hint="accelerator.save_state(…) is its own way",
        )

    models, optimizers, schedulers, dataloaders, registered = (
        list(_ACCELERATE.private(accelerator, name))
        for name in (_MODELS, _OPTIMIZERS, _SCHEDULERS, _DATALOADERS, _REGISTERED)
    )
    if not models:
        raise UsageError(
            "the Accelerator has no model",
            hint="pass model, optimizer and the rest through accelerator.prepare(…) first",
        )
    # With several, the names of each begin with its number.
    model = (
        models[0] if len(models) == 1 else nn.ModuleDict({str(n): m for n, m in enumerate(models)})
    )
    loaders = [
        _Loader(each)
        for each in dataloaders
        if getattr(each, "use_stateful_dataloader", False)  # others do not know where they are
    ]
    return {
        "model": model,
        "optimizer": [each.optimizer for each in optimizers],
        "scheduler": _alone(schedulers),
        "scaler": accelerator.scaler,
        "dataloader": _alone(loaders),
        "state": {f"registered_{n}": each for n, each in enumerate(registered)},
    }


def _go_on(accelerator: Any, position: Mapping[str, Any]) -> None:
    """Be where the job was that saved."""
    accelerator.step = position["step"]
    loaders = _ACCELERATE.private(accelerator, _DATALOADERS)
    for loader, epoch in zip(loaders, position["epochs"], strict=False):
        if hasattr(loader, "iteration"):
            loader.iteration = epoch
    schedulers = _ACCELERATE.private(accelerator, _SCHEDULERS)
    there, here = position["processes"], accelerator.num_processes
    if there != here and any(
        each.step_with_optimizer and not each.split_batches for each in schedulers
    ):
        log.warning(
            "schedulers made %d steps for each of the optimizer, and make %d here: accelerate "
            "multiplies them by the number of processes, as it does the batch; with "
            "split_batches=True jobs of all sizes are alike",
            there,
            here,
        )


@dataclass(eq=False)
class _Loader:
    """A loader that knows where it is. One that was at its end begins anew: told that it was there,
    it would draw a random number for that too.
    """

    loader: Any

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict(), "batch": self.loader.total_batch_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        inner = state["loader"]
        self.loader.load_state_dict({} if inner.get("_iterator_finished") else inner)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on in a job of another number of ranks: each rank of the other was as many batches
        along, which all ranks took from one order.
        """
        first = states[0]
        if first["batch"] != self.loader.total_batch_size or any(
            dumps([each]) != dumps([first]) for each in states
        ):
            raise UsageError(
                f"the loader was in the middle of batches of {first['batch']} for "
                f"{len(states)} ranks, and has batches of {self.loader.total_batch_size} here",
                where="dataloader",
                hint="have batches of as many examples in all, or leave the loader as it is: "
                'load_state(…, skip=["dataloader"])',
            )
        self.load_state_dict(first)


def _alone(values: Sequence[Any]) -> Any:
    """As a loop passes it that has one, or none."""
    return values if len(values) > 1 else next(iter(values), None)
