"""DeepSpeed engines whose checkpoints are the steps of a run: `save_checkpoint(engine, "runs/7b")`
and `load_checkpoint(engine, "runs/7b")`, in place of the engine's methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ckptkit.checkpoint.places import Place
from ckptkit.errors import NotFoundError, UsageError
from ckptkit.live import Checkpointer, Restored, load
from ckptkit.plugins.deepspeed_state import EngineState
from ckptkit.plugins.framework import opened

_OWN = "deepspeed"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def save_checkpoint(
    engine: Any,
    checkpoints: Checkpointer | Place,
    step: int | None = None,
    *,
    extra: Mapping[str, object] | None = None,
    **objects: Any,
) -> str | None:
    """Save a step, by default that of the engine's counter, and return its location, or None where
    it was skipped; every rank calls it.

    `checkpoints` is the location of a run, or a `Checkpointer` with all that one can do. `extra` is
    what DeepSpeed calls `client_state`; `objects` are `dataloader=` and `state=`.
    """
    if _OWN in (extra or {}):
        raise UsageError(
            "this name is the plugin's own", where="extra", value=_OWN, hint="choose another key"
        )
    state = EngineState(engine)
    state.gather()
    own: dict[str, Any] = {name: int(getattr(engine, name)) for name in _COUNTERS}
    if state.scaler is not None:
        own["loss_scaler"] = {key: getattr(state.scaler, key, None) for key in _SCALE}
    with opened(checkpoints) as checkpointer:
        return checkpointer.save(
            engine.global_steps if step is None else step,
            extra={**(extra or {}), _OWN: own},
            scheduler=engine.lr_scheduler,
            **_trained(state),
            **objects,
        )


def load_checkpoint(
    engine: Any, checkpoints: Checkpointer | Place, *, step: int | None = None, **how: Any
) -> Restored | None:
    """Load the newest step of a run, or the one asked for, of any stage and number of ranks; None
    where there is none yet. Every rank calls it. A folder that DeepSpeed wrote is loaded, too.

    `how` is what `Checkpointer.restore` takes: `fallback=True`, `skip=[…]`, `dataloader=`.
    """
    state = EngineState(engine)
    state.gather()  # what the step does not have stays
    with opened(checkpoints) as checkpointer:
        restored = checkpointer.restore(
            step=step, scheduler=engine.lr_scheduler, **_trained(state), **how
        )
        is_theirs = restored is None
        if restored is None:
            how.pop("fallback", None)
            try:
                restored = load(checkpointer._store, **_trained(state), **how)
            except NotFoundError:
                return None
    state.hand_back()
    # What DeepSpeed saves lies beside what its user saved along.
    said = restored.extra if is_theirs else restored.extra.get(_OWN, {})
    if is_theirs and engine.lr_scheduler is not None and "lr_scheduler" in said:
        engine.lr_scheduler.load_state_dict(said["lr_scheduler"])
    engine.global_steps = restored.step
    for name in _COUNTERS:
        if name in said:
            setattr(engine, name, said[name])
    for key, value in (said.get("loss_scaler") or {}).items():
        if key in _SCALE and value is not None and hasattr(state.scaler, key):
            setattr(state.scaler, key, value)
    return restored


def _trained(state: EngineState) -> dict[str, Any]:
    model = SimpleNamespace(model=state.model, mesh=state.mesh)
    return {"model": model, "optimizer": state.optimizer}
