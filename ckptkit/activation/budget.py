"""Recompute just as many blocks as a budget of bytes makes necessary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch.distributed as dist
from torch import nn

from ckptkit.activation.applied import Undo
from ckptkit.activation.probe import Costs, Step, measure, measured_peak
from ckptkit.activation.recompute import Recomputed
from ckptkit.activation.solver import Around, BlockCost, choose, peak_of
from ckptkit.activation.transport import gathered
from ckptkit.errors import UsageError
from ckptkit.live.wire import wire

_LOG = logging.getLogger("ckptkit.activation")
_ROUNDS = 8


def fit(
    modules: Sequence[nn.Module],
    blocks: Mapping[str, nn.Module],
    budget: int,
    step: Step,
    undo: Undo,
) -> None:
    """Recompute the blocks that make the step stay within the budget, as measured; every rank
    takes part.
    """
    costs = measure(modules, blocks, step)
    _check_ran(costs, blocks)
    costs = _agreed(costs)
    search = Search(costs, budget)
    try:
        for _ in range(_ROUNDS):
            _recompute(blocks, costs, search.chosen, undo)
            search.learn(_most(measured_peak(modules, step), costs))
            if all(_heard(search.is_done)):
                break
        _recompute(blocks, costs, _best(search, budget), undo)
    except BaseException:
        undo()
        raise
    _LOG.info("%d of %d blocks are recomputed", len(undo.blocks), len(blocks))


def _check_ran(costs: Costs, blocks: Mapping[str, nn.Module]) -> None:
    """On some rank, that is: a stage of a pipeline may have no blocks."""
    heard = _heard((bool(blocks), bool(costs.blocks) and costs.has_backward))
    if any(has_blocks for has_blocks, _ in heard) and not any(ran for _, ran in heard):
        raise UsageError(
            "the step that a budget measures has no forward and backward of these blocks",
            hint="pass step=lambda: loss_of(model(inputs), targets).backward(), with this model",
        )


def _best(search: Search, budget: int) -> frozenset[int]:
    fits = all(_heard(search.best is not None))
    if search.best is None or not fits:
        raise UsageError(
            "the activations do not fit, even when every block is recomputed",
            value=budget,
            hint=f"on this rank they need {search.least} bytes: use smaller batches, or cut the "
            "loss",
        )
    return search.best


class Search:
    """Measures the cheapest choice that should fit, then that which should as the solver's mistake
    shows, until it says nothing new.
    """

    def __init__(self, costs: Costs, budget: int) -> None:
        self._costs = costs
        self._budget = budget
        self._tried: dict[frozenset[int], int] = {}
        self.chosen = self._choice(budget)
        self.best: frozenset[int] | None = None
        """The cheapest choice that fits."""
        self.is_done = False

    @property
    def least(self) -> int:
        """The lowest peak that was measured."""
        return min(self._tried.values())

    def learn(self, peak: int) -> None:
        """Go on from what the step was measured to need with what is chosen."""
        if self.is_done:
            return
        self._tried[self.chosen] = peak
        if peak <= self._budget and self._seconds(self.chosen) < self._seconds(self.best):
            self.best = self.chosen
        mistake = peak_of(self._costs.blocks, self.chosen, self._costs.around) - peak
        following = self._choice(self._budget + mistake)
        if self.best is None and len(self._tried) == _ROUNDS - 1:
            following = self._every()
        self.is_done = following in self._tried
        self.chosen = following if self.best is None or not self.is_done else self.best

    def _choice(self, limit: int) -> frozenset[int]:
        numbers = choose(self._costs.blocks, limit, self._costs.around)
        return self._every() if numbers is None else numbers

    def _every(self) -> frozenset[int]:
        return frozenset(range(len(self._costs.blocks)))

    def _seconds(self, chosen: frozenset[int] | None) -> float:
        if chosen is None:
            return float("inf")
        return sum(self._costs.blocks[number].seconds for number in chosen)


def _recompute(
    blocks: Mapping[str, nn.Module], costs: Costs, chosen: frozenset[int], undo: Undo
) -> None:
    undo()
    names = [costs.blocks[number].name for number in sorted(chosen)]
    undo.put({name: blocks[name] for name in names}, _recomputed)


def _recomputed(_: str, block: nn.Module, plain: Any) -> Recomputed:
    return Recomputed(block, plain)


def _agreed(costs: Costs) -> Costs:
    """Ranks that have the same blocks choose the same ones: recomputing may be collective."""
    names = [cost.name for cost in costs.blocks]
    mine = names, [astuple(cost)[1:] for cost in costs.blocks], astuple(costs.around)
    alike = [said[1:] for said in _heard(mine) if said[0] == names]
    blocks = [
        BlockCost(name, *map(max, *measured, measured[0]))
        for name, *measured in zip(names, *(numbers for numbers, _ in alike), strict=True)
    ]
    around = Around(*map(max, *(around for _, around in alike), astuple(costs.around)))
    return Costs(tuple(blocks), around, costs.has_backward)


def _most(peak: int, costs: Costs) -> int:
    """The highest peak of the ranks that have the same blocks."""
    names = [cost.name for cost in costs.blocks]
    return max(int(size) for size, theirs in _heard((peak, names)) if theirs == names)


def _heard(said: object) -> list[Any]:
    """What all ranks say."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [said]
    return gathered(dist.group.WORLD, said, wire())
