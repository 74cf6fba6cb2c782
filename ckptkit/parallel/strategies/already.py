"""Which models are spread already, and by which choices."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.optim import Optimizer

from ckptkit.errors import StrategyError, UsageError
from ckptkit.model import Strategy
from ckptkit.parallel.strategies.distributed import Distributed
from ckptkit.parallel.strategies.options import Options
from ckptkit.parallel.strategies.stepping import MakeOptimizer


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """What a caller of `as_distributed` has passed."""

    options: Options
    optimizer: Optimizer | MakeOptimizer | None
    settings: Mapping[str, Any]


# Not in the models themselves, whose copies and pickles would have it too.
_made_of: WeakKeyDictionary[object, weakref.ref[Distributed]] = WeakKeyDictionary()
_choices: WeakKeyDictionary[Distributed, Choices] = WeakKeyDictionary()


def remember(made: Distributed, choices: Choices, models: Iterable[object]) -> None:
    """Know a model again by what was given, and by what it became."""
    _choices[made] = choices
    for model in models:
        _made_of[model] = weakref.ref(made)


def known_as(model: object) -> nn.Module | Distributed:
    """What a model was spread as, as long as that is in use; the module itself where it was not."""
    if isinstance(model, Distributed):
        return model
    known = _made_of.get(model) if isinstance(model, (nn.Module, _PipelineSchedule)) else None
    made = None if known is None else known()
    if made is not None:
        return made
    if not isinstance(model, nn.Module):
        raise UsageError(
            "no module",
            value=type(model).__name__,
            hint="pass the plain model, or what as_distributed has made of it",
        )
    return model


def check_same(known: Distributed, strategy: Strategy, given: Choices) -> None:
    """Refuse what is chosen otherwise than before; what is left out stays as it is."""
    if known.strategy != strategy:
        raise StrategyError(
            f"the model is spread as {known.strategy} already",
            value=str(strategy),
            hint="make the model anew, spread that, and load a checkpoint of this one",
        )
    before = _choices[known]
    differing = before.options.differing(given.options, Options.of(strategy))
    if given.settings and given.settings != before.settings:
        differing.append("optimizer_options")
    if differing:
        raise UsageError(
            f"the model is spread with another {differing[0]} already",
            value=differing,
            hint="leave these out, or spread the model anew",
        )
    _check_same_optimizer(known, before, given.optimizer)


def _check_same_optimizer(
    known: Distributed, before: Choices, optimizer: Optimizer | MakeOptimizer | None
) -> None:
    if optimizer is None or optimizer is before.optimizer:
        return
    if before.optimizer is None:
        raise UsageError(
            "the model was spread without an optimizer",
            hint="pass optimizer= in the first call",
        )
    if optimizer is not known.optimizer:
        raise UsageError(
            "the model has another optimizer already",
            value=type(known.optimizer).__name__,
            hint="leave it out",
        )
