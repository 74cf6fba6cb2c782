"""`fully_shard` and `replicate` over the units of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from ckptkit.live.wrappers.modules import own_param_groups
from ckptkit.parallel.strategies.grouping import Unit, own_unit, units_of
from ckptkit.parallel.strategies.options import Options


def shard(
    model: nn.Module, mesh: DeviceMesh, options: Options, *, keep_gathered: bool
) -> list[Unit]:
    """Cut the parameters of a model over the last axis of a mesh, repeated over the one before, and
    return what is gathered together.

    With `keep_gathered` they stay whole from the forward pass to the backward pass (ZeRO-2).
    """
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": _precision(options)}
    if options.offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    # Not the last as defined, which a backward pass mostly begins with, nor, by None, the
    # outermost.
    again = False if keep_gathered else None
    units = units_of(model, options.group_below)
    all_units = [*units, *own_unit(model, units)]
    for unit in units:
        kept = False if len(units) > 1 and unit is units[-1] else again
        fully_shard(list(unit.modules), reshard_after_forward=kept, **settings)
    fully_shard(model, reshard_after_forward=again, **settings)
    model.register_forward_hook(_after_forward)
    return all_units


def repeat(model: nn.Module, mesh: DeviceMesh, group_below: int) -> list[Unit]:
    """Keep what tensor parallelism has cut alike over a mesh, which DDP cannot."""
    units = units_of(model, group_below)
    all_units = [*units, *own_unit(model, units)]
    for unit in units:
        replicate(list(unit.modules), mesh=mesh)
    replicate(model, mesh=mesh)
    model.register_forward_hook(_after_forward)
    return all_units


def let_go(model: nn.Module) -> None:
    """Let go of what a forward pass has gathered for a backward pass that did not come: whoever
    looks at parameters and gradients would find those instead of the optimizer's.
    """
    for module in _cut_in(model):
        module.reshard()


def end_passes(model: nn.Module) -> None:
    """The same where no backward pass can come any more, of forward passes that did not end, too:
    one raised, or of several modules that are gathered together one was called by itself.
    """
    for module in _cut_in(model):
        state: Any = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        for each in (state, *own_param_groups(module)):
            if each._training_state.name == "FORWARD":
                each._training_state = type(each._training_state).IDLE
        module.reshard()


def zero_grad(model: nn.Module) -> None:
    """Forget all gradients, the optimizer's also where parameters are gathered."""
    let_go(model)
    model.zero_grad()
    for module in _cut_in(model):
        for group in own_param_groups(module):
            for each in group.fsdp_params:
                each.sharded_param.grad = None


def is_cut(model: nn.Module) -> bool:
    """Whether parameters are gathered for passes."""
    return any(True for _ in _cut_in(model))


def _cut_in(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _after_forward(model: nn.Module, *_: Any) -> None:
    if not torch.is_grad_enabled():
        let_go(model)


def _precision(options: Options) -> MixedPrecisionPolicy:
    wanted = options.precision
    if isinstance(wanted, torch.dtype):
        # Sums over many ranks lose too much in 16 bits.
        return MixedPrecisionPolicy(param_dtype=wanted, reduce_dtype=torch.float32)
    return wanted or MixedPrecisionPolicy()
