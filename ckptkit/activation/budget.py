"""Recompute just as many blocks as a budget of bytes makes necessary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from ckptkit.activation.applied import Undo
from ckptkit.activation.probe import Costs, Step, measure, measured_peak
from ckptkit.activation.recompute import Recomputed
from ckptkit.activation.solver import BlockCost, choose
from ckptkit.errors import UsageError

_LOG = logging.getLogger("ckptkit.activation")
_ROUNDS = 8
T = TypeVar("T")


def fit(
    modules: Sequence[nn.Module],
    blocks: Mapping[str, nn.Module],
    budget: int,
    step: Step,
    undo: Undo,
) -> None:
    """Recompute the blocks that make the step stay within the budget, as measured."""
    costs = _agreed(measure(modules, blocks, step))
    limit, peak = budget, 0
    for round_number in range(_ROUNDS):
        chosen = _chosen(costs, limit, last=round_number == _ROUNDS - 1)
        undo()
        undo.put({name: blocks[name] for name in chosen}, _recomputed)
        peak = _most(measured_peak(modules, step), costs)
        everything = len(chosen) == len(costs.blocks)
        said = _heard((peak <= budget, everything))
        if all(fits for fits, _ in said):
            _LOG.info("%d of %d blocks are recomputed", len(chosen), len(blocks))
            return
        if any(all_chosen and not fits for fits, all_chosen in said):
            break
        if peak > budget:
            limit -= peak - budget
    undo()
    raise UsageError(
        "the activations do not fit, even when every block is recomputed",
        value=budget,
        hint=f"on this rank they need {peak} bytes: use smaller batches, or cut the loss",
    )


def _chosen(costs: Costs, limit: int, *, last: bool) -> list[str]:
    numbers = None if last else choose(costs.blocks, limit, costs.around)
    chosen = range(len(costs.blocks)) if numbers is None else sorted(numbers)
    return [costs.blocks[number].name for number in chosen]


def _recomputed(_: str, block: nn.Module, plain: Any) -> Recomputed:
    return Recomputed(block, plain)


def _agreed(costs: Costs) -> Costs:
    """Ranks that have the same blocks choose the same ones: recomputing may be collective."""
    names = [cost.name for cost in costs.blocks]
    alike = [each for each in _heard(costs) if [cost.name for cost in each.blocks] == names]
    blocks = tuple(
        BlockCost(
            name,
            max(cost.kept for cost in same),
            max(cost.recomputed for cost in same),
            max(cost.peak for cost in same),
            max(cost.seconds for cost in same),
        )
        for name, same in zip(
            names, zip(*(each.blocks for each in alike), strict=True), strict=True
        )
    )
    return replace(
        costs,
        blocks=blocks,
        around=replace(
            costs.around,
            before=max(each.around.before for each in alike),
            after=max(each.around.after for each in alike),
        ),
    )


def _most(peak: int, costs: Costs) -> int:
    """The highest peak of the ranks that have the same blocks."""
    names = [cost.name for cost in costs.blocks]
    return max(size for size, theirs in _heard((peak, names)) if theirs == names)


def _heard(said: T) -> list[T]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [said]
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, said)
    return heard
