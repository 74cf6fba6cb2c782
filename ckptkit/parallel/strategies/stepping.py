"""The optimizer of a spread model: made for what this rank has, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.spec import sharder_of, size_of

Parameters: TypeAlias = Sequence[nn.Parameter]
MakeOptimizer: TypeAlias = Callable[..., Optimizer]
"""A class of optimizer, or a function of parameters."""

_HINT = "pass the class and optimizer_options=, or a function of parameters"


def check_optimizer(
    model: nn.Module, optimizer: object, options: Mapping[str, Any], strategy: Strategy
) -> None:
    """Refuse an optimizer that could not step the spread model, before anything is spread."""
    if optimizer is None:
        if options:
            raise UsageError("optimizer_options without an optimizer", value=dict(options))
        return
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "nothing of the model is trained",
            value=type(model).__name__,
            hint="unfreeze some of it with requires_grad_(); or leave optimizer= out",
        )
    if isinstance(optimizer, Optimizer):
        _check_made(model, optimizer, options, strategy)
    elif callable(optimizer):
        _check_callable(optimizer, options)
    else:
        raise UsageError("no optimizer", value=optimizer, hint=_HINT)


def _check_callable(optimizer: MakeOptimizer, options: Mapping[str, Any]) -> None:
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        _check_step(optimizer)
    try:
        signature = inspect.signature(optimizer)
    except ValueError:
        return  # written in C, and says nothing about itself
    try:
        signature.bind([], **options)
    except TypeError as error:
        taken = [name for name in signature.parameters if name != "self"][1:]
        raise UsageError(
            f"the optimizer cannot be called with these: {error}",
            where="optimizer_options",
            value=dict(options),
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


def _check_made(
    model: nn.Module, optimizer: Optimizer, options: Mapping[str, Any], strategy: Strategy
) -> None:
    _check_step(type(optimizer))
    if options:
        raise UsageError("optimizer_options are for a class", value=dict(options))
    known = set(model.parameters())
    if any(p not in known for group in optimizer.param_groups for p in group["params"]):
        raise UsageError(
            "the optimizer has parameters that are not the model's",
            value=type(optimizer).__name__,
            hint=f"make it for this model; or {_HINT}",
        )
    kinds = {axis.kind for axis in strategy.mesh.axes}
    replaces = bool(sharder_of(strategy)) or "zero1" in kinds
    if replaces or size_of(strategy, "tp") > 1 or size_of(strategy, "pp") > 1:
        raise UsageError(
            "the optimizer was made before the model was spread, which changes its parameters",
            value=f"{type(optimizer).__name__}, {strategy}",
            hint=_HINT,
        )


def made_for(
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer | MakeOptimizer,
    options: Mapping[str, Any],
    group: dist.ProcessGroup | None = None,
    overlapping: Sequence[nn.Module] = (),
) -> Optimizer:
    """The optimizer of these parameters; with a group, its state is shared out there (ZeRO-1), and
    parameters may be on their way while the `overlapping` modules run.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    trained = [p for p in parameters if p.requires_grad]
    if group is not None and trained:
        return _shared_out(trained, optimizer, options, group, overlapping)
    made = _called(optimizer, trained, options)
    if len({_mesh(p) for p in trained}) > 1:
        made.register_step_pre_hook(_one_by_one)
    return made


def _called(
    optimizer: MakeOptimizer, trained: Sequence[nn.Parameter], options: Mapping[str, Any]
) -> Optimizer:
    """What makes an optimizer, called; also where nothing is trained, as on a frozen stage, though
    optimizers refuse an empty list.
    """
    nothing: Any = {"params": []} if isinstance(optimizer, type) else nn.Parameter(torch.empty(0))
    made = optimizer([*trained] or [nothing], **options)
    if not isinstance(made, Optimizer):
        raise UsageError("not an optimizer", where="optimizer()", value=type(made).__name__)
    _check_step(type(made))
    if not trained:
        for group in made.param_groups:
            group["params"] = []
    return made


def _shared_out(
    trained: Sequence[nn.Parameter],
    optimizer: MakeOptimizer,
    options: Mapping[str, Any],
    group: dist.ProcessGroup,
    overlapping: Sequence[nn.Module],
) -> Optimizer:
    # There, because it takes a while to import, and warns.
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415

    from ckptkit.parallel.strategies.overlapping import OverlappingZero1  # noqa: PLC0415

    groups: Sequence[Any] = trained
    if not isinstance(optimizer, type):
        # It wants parameters, and torch calls it with groups: those that it has made of all.
        made = _called(optimizer, trained, options)
        groups, optimizer, options = [*made.param_groups], _narrowing(made), {}
    shared: ZeroRedundancyOptimizer
    if overlapping:
        shared = OverlappingZero1(overlapping, groups, optimizer, group, **options)
    else:
        kind = cast("Any", optimizer)
        shared = ZeroRedundancyOptimizer(groups, kind, process_group=group, **options)
    # Schedulers look there for what they may change.
    shared.defaults = {**shared.optim.defaults, **shared.defaults}
    return shared


def _narrowing(made: Optimizer) -> MakeOptimizer:
    """What makes an optimizer of this rank's share of the parameters out of one of all."""

    def narrowed(groups: list[dict[str, Any]]) -> Optimizer:
        made.param_groups = groups
        kept = {parameter for each in groups for parameter in each["params"]}
        for other in made.state.keys() - kept:
            del made.state[other]
        return made

    return narrowed


def _mesh(parameter: torch.Tensor) -> object:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


def _one_by_one(optimizer: Optimizer, *_: Any) -> None:
    """Parameters of different meshes cannot go through one operation; in each step, because a load
    brings the options of the strategy that saved.
    """
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = False
        if group.get("fused"):
            group["fused"] = False
