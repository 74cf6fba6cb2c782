"""The most even split that works, found by trials."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import LayoutError, UsageError
from ckptkit.parallel.strategies.pipeline import most_even


def refusing(places: set[int]) -> Callable[[Sequence[int]], Sequence[int]]:
    """A trial of a model that cannot be cut at some places."""

    def trial(begins: Sequence[int]) -> Sequence[int]:
        if places.intersection(begins[1:]):
            raise LayoutError(f"not at {begins}")
        return begins

    return trial


def largest(weights: Sequence[int], begins: Sequence[int]) -> int:
    """The weight of the heaviest stage."""
    return max(sum(weights[a:b]) for a, b in pairwise([*begins, len(weights)]))


@given(st.data())
def test_it_is_the_most_even_of_those_that_work(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(0, 100), min_size=2, max_size=7))
    count = data.draw(st.integers(2, len(weights)))
    refused = data.draw(st.sets(st.integers(1, len(weights) - 1)))
    allowed = sorted({*range(1, len(weights))} - refused)
    possible = [[0, *cuts] for cuts in combinations(allowed, count - 1)]
    if not possible:
        with pytest.raises(LayoutError, match="not at"):
            most_even(weights, count, range(1, len(weights)), refusing(refused))
        return
    begins = most_even(weights, count, range(1, len(weights)), refusing(refused))
    assert begins in possible
    assert largest(weights, begins) == min(largest(weights, each) for each in possible)


def test_the_error_is_that_of_the_most_even_split_of_all() -> None:
    with pytest.raises(LayoutError, match=r"not at \[0, 2\]"):
        most_even([1] * 4, 2, range(1, 4), refusing({1, 2, 3}))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_model_that_cannot_be_cut_is_not_tried_out_everywhere(count: int) -> None:
    tried = list[Sequence[int]]()

    def never(begins: Sequence[int]) -> None:
        tried.append(begins)
        raise LayoutError("not at all")

    with pytest.raises(LayoutError, match="not at all"):
        most_even([1] * 100, count, range(1, 100), never)
    assert len(tried) <= 4 * count + count


def test_only_places_that_are_given_are_tried() -> None:
    begins = most_even([1] * 40, 2, [*range(1, 12), *range(29, 40)], refusing(set()))
    assert begins in ([0, 11], [0, 29])


def test_what_was_tried_is_not_kept() -> None:
    class Stage:
        """What a trial makes."""

    kept = weakref.WeakSet[Stage]()

    def trial(begins: Sequence[int]) -> None:
        made = Stage()
        kept.add(made)
        if begins != [0, 1]:
            raise LayoutError(f"not at {begins}, with {type(made)}")

    gc.disable()
    try:
        most_even([1] * 4, 2, range(1, 4), trial)
        assert not kept
    finally:
        gc.enable()


def test_places_that_work_alone_and_not_together_are_no_reason_to_go_on() -> None:
    tried = list[Sequence[int]]()

    def two_at_most(begins: Sequence[int]) -> None:
        tried.append(begins)
        if len(begins) > 2:
            raise LayoutError("not three")

    with pytest.raises(LayoutError, match="not three"):
        most_even([1] * 6, 3, range(1, 6), two_at_most)
    assert tried == [[0, 2, 4], [0, 2], [0, 4]]


def test_what_is_wrong_with_the_call_is_said_at_once() -> None:
    tried = list[Sequence[int]]()

    def wrong(begins: Sequence[int]) -> None:
        tried.append(begins)
        raise UsageError("no example")

    with pytest.raises(UsageError, match="no example"):
        most_even([1] * 6, 3, range(1, 6), wrong)
    assert len(tried) == 1
