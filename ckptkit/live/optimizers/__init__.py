"""What ckptkit knows of optimizers: one file for each way in which their state is spread."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.optimizers.adapter import OptimizerAdapter, StateEntry
from ckptkit.live.optimizers.fsdp1 import FSDP1Optimizer
from ckptkit.live.optimizers.plain import PlainOptimizer
from ckptkit.live.optimizers.zero1 import Zero1Optimizer

__all__ = ["OptimizerAdapter", "StateEntry", "optimizer_adapter"]


def optimizer_adapter(optimizer: object, modules: Sequence[nn.Module]) -> OptimizerAdapter:
    """The adapter of an optimizer whose parameters are those of the modules."""
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedTypeError(
            "not an optimizer",
            value=type(optimizer).__name__,
            hint="pass torch optimizers; what has only state_dict() goes into state={…}",
        )
    if Zero1Optimizer.recognises(optimizer):
        return Zero1Optimizer(optimizer)
    if FSDP1Optimizer.recognises(modules):
        return FSDP1Optimizer(optimizer, modules)
    return PlainOptimizer(optimizer)
