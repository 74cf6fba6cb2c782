"""How the learning rate follows the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from ckptkit.errors import UsageError

Rule = Callable[[float], float]

_RULES: dict[str, Rule] = {
    "constant": lambda _: 1.0,
    "linear": lambda ratio: ratio,
    "sqrt": math.sqrt,
}
_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min")


def rule_of(rule: str | Rule) -> Rule:
    """What the learning rate is multiplied with when there are so many times as many ranks."""
    if callable(rule):
        return rule
    if rule not in _RULES:
        raise UsageError(
            "no rule for the learning rate",
            where="rule",
            value=rule,
            hint=f"known: {', '.join(_RULES)}, or a function of the ratio of ranks",
        )
    return _RULES[rule]


def scale(factor: float, optimizer: Optimizer, scheduler: object = None) -> None:
    """Multiply all learning rates, also those that a scheduler computes from."""
    for group in optimizer.param_groups:
        for key in _OF_GROUPS:
            if key in group:
                group[key] = group[key] * factor
    for each in _schedulers(scheduler):
        for name in _OF_SCHEDULERS:
            found = getattr(each, name, None)
            if isinstance(found, list):
                setattr(each, name, [rate * factor for rate in found])
            elif found is not None:
                setattr(each, name, found * factor)


def _schedulers(scheduler: Any) -> Iterator[Any]:
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", []):
            yield from _schedulers(inner)
