"""Which blocks to recompute so that activations fit, at the least time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

_MOST_STATES = 4096


@dataclass(frozen=True, slots=True)
class BlockCost:
    """What was measured of a block, in bytes and seconds.

    >>> cost = BlockCost("layers.0", kept=4096, recomputed=512, peak=8192, seconds=0.01, at_once=4)
    >>> cost.held(again=False), cost.held(again=True)
    (16384, 2048)
    """

    name: str
    kept: int
    """What a forward leaves, when everything is kept; its result is part of that."""
    recomputed: int
    """What a forward leaves, when only its inputs are kept."""
    peak: int
    """The most that it needs while it runs, all kept."""
    seconds: float
    """Its forwards in a step."""
    at_once: int = 1
    """How many forwards wait for their backward at most: micro-batches in flight."""

    def held(self, *, again: bool) -> int:
        """What all its forwards leave, recomputed or kept."""
        return self.at_once * (self.recomputed if again else self.kept)

    def while_running(self, *, again: bool) -> int:
        """The most that it needs while it runs, with what its other forwards leave."""
        # What follows from the block is still there when it runs again.
        return self.peak + self.held(again=again) - (0 if again else self.kept)


@dataclass(frozen=True, slots=True)
class Around:
    """What a step holds beside the blocks: before the first, and at most after the last."""

    before: int = 0
    after: int = 0


def peak_of(costs: Sequence[BlockCost], chosen: Collection[int], around: Around) -> int:
    """The most bytes at one moment of a step that recomputes the chosen blocks.

    When a block runs, forward or again in backward, what the blocks before it keep is there; those
    after it are not there yet, or no longer.
    """
    held = peak = around.before
    for number, cost in enumerate(costs):
        peak = max(peak, held + cost.while_running(again=number in chosen))
        held += cost.held(again=number in chosen)
    return max(peak, held + around.after)


def choose(
    costs: Sequence[BlockCost], budget: int, around: Around | None = None
) -> frozenset[int] | None:
    """The blocks whose recomputing takes the least time of all that keep the peak within a
    budget; None when nothing does.

    Exact for blocks of few kinds, however many they are; where more than some thousand ways to go
    on would have to be remembered, sizes are rounded up.
    """
    around = around or Around()
    states: list[_State] = [_State(around.before, 0.0, None, -1)]
    for number, cost in enumerate(costs):
        states = _best(
            following
            for state in states
            for again in (False, True)
            if (following := _next(state, number, cost, budget, again=again)) is not None
        )
    fitting = [state for state in states if state.held + around.after <= budget]
    best = min(fitting, key=lambda state: (state.seconds, state.held), default=None)
    return None if best is None else frozenset(best.numbers())


@dataclass(frozen=True, slots=True)
class _State:
    """A way to treat the first blocks: what it holds after them, and what it will recompute."""

    held: int
    seconds: float
    before: _State | None
    number: int
    """Of the last block that it recomputes."""

    def numbers(self) -> list[int]:
        found, state = [], self
        while state.before is not None:
            found.append(state.number)
            state = state.before
        return found


def _next(
    state: _State, number: int, cost: BlockCost, budget: int, *, again: bool
) -> _State | None:
    if state.held + cost.while_running(again=again) > budget:
        return None
    held = state.held + cost.held(again=again)
    if not again:
        return _State(held, state.seconds, state.before, state.number)
    return _State(held, state.seconds + cost.seconds, state, number)


def _best(states: Iterable[_State]) -> list[_State]:
    """Those that no other beats in both bytes and seconds, thinned out where there are many."""
    found: list[_State] = []
    ordered = sorted(states, key=lambda s: (s.held, s.seconds))
    for state in ordered:
        if not found or state.seconds < found[-1].seconds:
            found.append(state)
    if len(found) > _MOST_STATES:
        # Of neighbours the smaller stays, so that what is chosen fits for certain.
        stride = -(-len(found) // _MOST_STATES)
        found = [*found[:-1:stride], found[-1]]
    return found
