"""Where parts that run one after another are cut into stages: as evenly as it works."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

from ckptkit.errors import LayoutError
from ckptkit.plan.stages import balanced

# Each trial runs the model, and one that so many find no place in can hardly be cut at all.
_TRIALS_FOR_A_STAGE = 4

Found = TypeVar("Found")


def most_even(
    weights: Sequence[int],
    count: int,
    places: Iterable[int],
    trial: Callable[[Sequence[int]], Found],
) -> tuple[list[int], Found]:
    """Where the stages of the most even split begin that a trial takes, and what that returns.

    Stages but the first begin at some of `places`, of which there are enough. The trial is given
    such beginnings, [0, 3, 5] for three stages, and raises LayoutError where there cannot be
    stages. The error raised is the one about the most even split of all.
    """
    begins = [0, *places]
    left, fine = count * _TRIALS_FOR_A_STAGE, set[int]()
    problem: LayoutError | None = None
    try:
        while len(begins) >= count and left > 0:
            split = _balanced(weights, begins, count)
            try:
                return split, trial(split)
            except LayoutError as error:
                problem = problem or error
            refused = set(split[1:])
            left -= 1
            if count > 2:  # with two stages the split is its only place
                unknown = refused - fine
                left -= len(unknown)
                refused = {at for at in unknown if not _takes(trial, at)}
                fine |= unknown - refused
            if not refused:
                break
            begins = [at for at in begins if at not in refused]
        assert problem is not None  # noqa: S101 — there are places enough for a first trial
        raise problem
    finally:
        problem = None  # what it holds would live on, and with it the stages that were tried


def _balanced(weights: Sequence[int], begins: Sequence[int], count: int) -> list[int]:
    """The most even split of which each stage begins at one of these places."""
    together = [sum(weights[a:b]) for a, b in pairwise([*begins, len(weights)])]
    numbers = balanced(together, count)
    return [begins[numbers.index(stage)] for stage in range(count)]


def _takes(trial: Callable[[Sequence[int]], object], at: int) -> bool:
    try:
        trial([0, at])
    except LayoutError:
        return False
    return True
