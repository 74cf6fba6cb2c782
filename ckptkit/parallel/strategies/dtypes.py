"""Parameters that the engine of a strategy cannot take beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.grouping import units_of
from ckptkit.parallel.strategies.spec import sharder_of, size_of


def check_dtypes(model: nn.Module, strategy: Strategy, group_below: int) -> None:
    """Refuse what torch refuses in the first step, or by no name."""
    kinds = {axis.kind for axis in strategy.mesh.axes}
    if "zero1" in kinds:
        _check_one(model, model.parameters(), strategy)
    stands_on_fsdp = "ddp" in kinds and max(size_of(strategy, kind) for kind in ("tp", "pp")) > 1
    if sharder_of(strategy) or stands_on_fsdp:
        _check_dims(model, strategy)
        for parameters in _gathered_together(model, group_below):
            _check_one(model, parameters, strategy)


def _gathered_together(model: nn.Module, group_below: int) -> Iterator[list[nn.Parameter]]:
    found = [
        [parameter for module in unit.modules for parameter in module.parameters()]
        for unit in units_of(model, group_below)
    ]
    inside = {parameter for parameters in found for parameter in parameters}
    yield from found
    yield [parameter for parameter in model.parameters() if parameter not in inside]


def _check_one(model: nn.Module, parameters: Iterable[nn.Parameter], strategy: Strategy) -> None:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    other = next((p for p in trained if p.dtype != trained[0].dtype), None)
    if other is not None:
        raise UsageError(
            "parameters of several dtypes",
            where=_name(model, other),
            value=f"{other.dtype} beside {trained[0].dtype}, {strategy}",
            hint="give them one dtype; or use ddp, which takes any",
        )


def _check_dims(model: nn.Module, strategy: Strategy) -> None:
    point = next((parameter for parameter in model.parameters() if not parameter.ndim), None)
    if point is not None:
        raise UsageError(
            "a parameter without dims cannot be cut",
            where=_name(model, point),
            value=str(strategy),
            hint="make it of shape (1,); or use ddp, which takes any",
        )


def _name(model: nn.Module, wanted: nn.Parameter) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)
