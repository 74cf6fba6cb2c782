"""Where parts that run one after another are cut into stages: as evenly as it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from ckptkit.errors import LayoutError
from ckptkit.plan.staging import balanced

_ROUNDS = 8
"""A model that cannot be cut where any of so many splits cuts it can hardly be cut at all, and each
trial runs it."""

Found = TypeVar("Found")


def most_even(
    weights: Sequence[int], count: int, trial: Callable[[Sequence[int]], Found]
) -> tuple[list[int], Found]:
    """Where the stages of the most even split begin that a trial takes, and what that returns.

    The trial is given such beginnings, [0, 3, 5] for three stages, and raises LayoutError where
    there cannot be stages. The error raised is the one about the most even split of all.
    """
    begins = list(range(len(weights)))  # where a stage may begin
    first: LayoutError | None = None
    for _ in range(_ROUNDS):
        split = _balanced(weights, begins, count)
        try:
            return split, trial(split)
        except LayoutError as error:
            first = first or error
        # One place alone is the split itself, where there are two stages.
        refused = {at for at in split[1:] if count == 2 or not _takes(trial, at)}
        begins = [at for at in begins if at not in refused]
        if not refused or len(begins) < count:
            break
    assert first is not None  # noqa: S101 — there was a round, which returned nothing
    raise first


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
