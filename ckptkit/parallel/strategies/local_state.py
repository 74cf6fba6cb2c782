"""One rank's own state, for a job of the same strategy: no collective, no copy, no file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ckptkit.errors import LayoutError
from ckptkit.live import ShardedOptimizerState, distributed_model
from ckptkit.live.state.tensors import local_of

State = dict[str, Any]


def local_state(model: object, optimizer: Optimizer | None, mesh: DeviceMesh | None) -> State:
    """The tensors of a rank in their own memory, and the options of the optimizer's groups."""
    found: State = {"model": distributed_model(model, mesh=mesh).local_state_dict()}
    if optimizer is not None:
        kept = ShardedOptimizerState(model, optimizer, mesh=mesh)
        found["optimizer"] = {
            name: {key: _local(value) for key, value in kept.get(name).items()}
            for name in kept.names
            if kept.has(name)
        }
        found["groups"] = [_options(group) for group in optimizer.param_groups]
    return found


def load_local_state(
    state: Mapping[str, Any], model: object, optimizer: Optimizer | None, mesh: DeviceMesh | None
) -> None:
    """Copy such a state into the objects."""
    distributed_model(model, mesh=mesh).load_local_state_dict(state["model"])
    if optimizer is None or "optimizer" not in state:
        return
    kept = ShardedOptimizerState(model, optimizer, mesh=mesh)
    for name in set(kept.names) - state["optimizer"].keys():
        kept.remove(name)
    for name, values in state["optimizer"].items():
        mine = kept.get(name) if kept.has(name) else kept.create(name)
        if mine.keys() != values.keys():
            raise LayoutError(
                "the optimizer keeps other things", where=name, value=(sorted(mine), sorted(values))
            )
        for key, value in values.items():
            if torch.is_tensor(value):
                _local(mine[key]).copy_(value)
            else:
                mine[key] = value
    for group, options in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(options)


def _local(value: Any) -> Any:
    return local_of(value) if torch.is_tensor(value) else value


def _options(group: Mapping[str, Any]) -> State:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
