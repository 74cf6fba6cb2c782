from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import LayoutError
from ckptkit.model import Box
from tests.model.cover import Gap, check_cover


@st.composite
def regions_and_boxes(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """Any boxes, or a region cut to pieces of which some may be lost, doubled or moved."""
    ndim = draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    region = Box(draw(numbers), draw(numbers))
    if draw(st.sampled_from(["any", "cut"])) == "any":
        return region, [Box(draw(numbers), draw(numbers)) for _ in range(draw(st.integers(0, 4)))]
    pieces = [region]
    for _ in range(draw(st.integers(0, 5)) if ndim else 0):
        piece = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, ndim - 1))
        pieces += piece.split(dim, draw(st.integers(piece.offset[dim], piece.stop[dim])))
    if draw(st.booleans()):
        pieces.pop(draw(st.integers(0, len(pieces) - 1)))
    order = draw(st.permutations(range(len(pieces))))
    pieces = [pieces[i] for i in order]
    twice = draw(st.integers(0, 2 * len(pieces)))
    return region, pieces + pieces[twice : twice + 1]


def counts_of(boxes: list[Box], ndim: int) -> np.ndarray:
    counts = np.zeros((9,) * ndim, np.int64)
    for box in boxes:
        counts[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))] += 1
    return counts


@given(regions_and_boxes())
def test_a_gap_is_found_exactly_where_counting_finds_one(case: tuple[Box, list[Box]]) -> None:
    region, boxes = case
    counts, inside = counts_of(boxes, region.ndim), counts_of([region], region.ndim)
    gap = check_cover(region, boxes)
    if gap is None:
        assert (counts == inside).all()
        return
    count, belongs = counts[gap.at], inside[gap.at]
    expected = ("hole" if count == 0 else "overlap") if belongs else "outside"
    assert gap.kind == expected
    assert count != belongs


def test_a_hole_and_an_overlap_of_the_same_size_do_not_cancel() -> None:
    boxes = [Box((0,), (2,)), Box((1,), (2,))]
    assert check_cover(Box.whole((4,)), boxes) == Gap("overlap", (1,))


def test_what_lies_outside_is_named_by_a_point_outside() -> None:
    assert check_cover(Box((2, 0), (2, 2)), [Box((2, 0), (2, 3))]) == Gap("outside", (2, 2))
    assert check_cover(Box((2, 0), (2, 2)), [Box((1, 0), (3, 2))]) == Gap("outside", (1, 0))


def test_a_scalar_is_covered_once() -> None:
    point = Box.whole(())
    assert check_cover(point, [point]) is None
    assert check_cover(point, []) == Gap("hole", ())
    assert check_cover(point, [point, point]) == Gap("overlap", ())


def test_an_empty_region_needs_nothing() -> None:
    assert check_cover(Box.whole((0, 3)), []) is None
    assert check_cover(Box.whole((0, 3)), [Box((0, 1), (0, 2))]) is None


def test_coordinates_up_to_the_limit_are_exact() -> None:
    half = 2**61
    halves = [Box((0,), (half,)), Box((half,), (half,))]
    assert check_cover(Box.whole((2**62,)), halves) is None
    halves[1] = Box((half,), (half - 1,))
    assert check_cover(Box.whole((2**62,)), halves) == Gap("hole", (2**62 - 1,))


def test_a_fine_grid_of_many_dims_is_checked_in_no_time() -> None:
    grid = [Box((*i, 0, 0), (1, 1, 1, 9, 9)) for i in product(range(30), range(20), range(10))]
    region = Box.whole((30, 20, 10, 9, 9))
    start = time.process_time()
    assert check_cover(region, grid) is None
    del grid[777]
    assert check_cover(region, grid) == Gap("hole", (3, 17, 7, 0, 0))
    assert time.process_time() - start < 2


def test_boxes_that_would_take_all_memory_to_check_are_refused() -> None:
    shrunk = [Box((i,) * 40, (1000,) * 40) for i in range(3)]
    with pytest.raises(LayoutError, match="irregular"):
        check_cover(Box.whole((1002,) * 40), shrunk)
