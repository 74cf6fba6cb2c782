"""The optimizer of a spread model: made for what this rank has, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.options import StrategyOptions, sharder_of, size_of

_HINT = "pass the class and optimizer_options=, or a function of parameters"


def check_optimizer(model: nn.Module, options: StrategyOptions, strategy: Strategy) -> None:
    """Refuse an optimizer that could not step the spread model, before anything is spread."""
    optimizer, settings = options.optimizer, dict(options.optimizer_options)
    if optimizer is None:
        if settings:
            raise UsageError("optimizer_options without an optimizer", value=settings)
        return
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "nothing of the model is trained",
            value=type(model).__name__,
            hint="unfreeze some of it with requires_grad_(); or leave optimizer= out",
        )
    if isinstance(optimizer, Optimizer):
        _check_step(type(optimizer))
        if settings:
            raise UsageError("optimizer_options are for a class", value=settings)
        known = set(model.parameters())
        if any(p not in known for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "the optimizer has parameters that are not the model's",
                value=type(optimizer).__name__,
                hint=f"make it for this model; or {_HINT}",
            )
        is_replaced = sharder_of(strategy) or any(a.kind == "zero1" for a in strategy.mesh.axes)
        if is_replaced or size_of(strategy, "tp") > 1 or size_of(strategy, "pp") > 1:
            raise UsageError(
                "the optimizer was made before the model was spread, which changes its parameters",
                value=f"{type(optimizer).__name__}, {strategy}",
                hint=_HINT,
            )
        return
    if not callable(optimizer):
        raise UsageError("no optimizer", value=optimizer, hint=_HINT)
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        _check_step(optimizer)
    try:
        signature = inspect.signature(optimizer)
    except ValueError:
        return  # written in C, and says nothing about itself
    try:
        signature.bind([], **settings)
    except TypeError as error:
        taken = [name for name in signature.parameters if name != "self"][1:]
        raise UsageError(
            f"the optimizer cannot be called with these: {error}",
            where="optimizer_options",
            value=settings,
            hint=f"it takes {', '.join(taken) or 'parameters only'}",
        ) from error


def _check_step(kind: type[Optimizer]) -> None:
    """Refuse one that asks for losses as it goes, which each rank has for its share alone."""
    wanted = inspect.signature(kind.step).parameters.get("closure")
    if wanted is not None and wanted.default is inspect.Parameter.empty:
        raise UsageError(
            "an optimizer that cannot make a step without a closure",
            value=kind.__name__,
            hint="choose one that needs gradients only, such as torch.optim.AdamW",
        )


def optimizer_for(
    modules: Sequence[nn.Module], options: StrategyOptions, group: dist.ProcessGroup | None = None
) -> Optimizer:
    """The optimizer of these modules; with a group, its state is shared out there (ZeRO-1), and
    with `overlap` parameters may be on their way while the modules run.
    """
    if isinstance(options.optimizer, Optimizer):
        return options.optimizer
    parameters = dict.fromkeys(p for module in modules for p in module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    if group is not None and trained:
        # There, because it takes a while to import, and warns.
        from ckptkit.parallel.strategies.zero1 import shared_out  # noqa: PLC0415

        by_class = isinstance(options.optimizer, type)
        every = None if by_class else _called(options, trained)
        return shared_out(modules, trained, options, group, every)
    made = _called(options, trained)
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in trained}
    if len(meshes) > 1:
        made.register_step_pre_hook(_one_by_one)
    return made


def _called(options: StrategyOptions, trained: Iterable[nn.Parameter]) -> Optimizer:
    """What makes an optimizer, called; also where nothing is trained, as on a frozen stage, though
    optimizers refuse an empty list.
    """
    make: Any = options.optimizer
    nothing: Any = {"params": []} if isinstance(make, type) else nn.Parameter(torch.empty(0))
    made = make([*trained] or [nothing], **options.optimizer_options)
    if not isinstance(made, Optimizer):
        raise UsageError("not an optimizer", where="optimizer()", value=type(made).__name__)
    _check_step(type(made))
    if not trained:
        for group in made.param_groups:
            group["params"] = []
    return made


def _one_by_one(optimizer: Optimizer, *_: Any) -> None:
    """Parameters of different meshes cannot go through one operation; in each step, because a load
    brings the options of the strategy that saved.
    """
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
        if group.get("fused"):
            group["fused"] = False
