from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import LayoutError
from ckptkit.model import Box, flat_boxes

dims = st.integers(0, 3)


@st.composite
def boxes(draw: st.DrawFn, ndim: int | None = None) -> Box:
    ndim = draw(dims) if ndim is None else ndim
    numbers = st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim).map(tuple)
    return Box(draw(numbers), draw(numbers))


pairs = dims.flatmap(lambda n: st.tuples(boxes(n), boxes(n)))


def mask(*of: Box) -> np.ndarray:
    counts = np.zeros((12,) * of[0].ndim, np.int64)
    for box in of:
        counts[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))] += 1
    return counts


@given(pairs)
def test_an_intersection_is_what_both_hold(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert common == b.intersect(a)
    expected = mask(a) * mask(b)
    assert (common is None) == (not expected.any())
    if common is not None:
        assert (mask(common) == expected).all()
        assert a.contains(common)
        assert b.contains(common)


@given(pairs)
def test_within_selects_the_box_from_an_array_of_the_outer_one(pair: tuple[Box, Box]) -> None:
    inner, outer = pair
    if not outer.contains(inner):
        with pytest.raises(LayoutError):
            inner.within(outer)
        return
    flat = np.arange(12**inner.ndim).reshape((12,) * inner.ndim)
    whole = Box.whole(flat.shape)
    assert (flat[outer.within(whole)][inner.within(outer)] == flat[inner.within(whole)]).all()


@given(boxes(2), st.integers(0, 1), st.integers(0, 12))
def test_a_split_keeps_everything_in_two_halves(box: Box, dim: int, at: int) -> None:
    if not box.offset[dim] <= at <= box.stop[dim]:
        with pytest.raises(LayoutError):
            box.split(dim, at)
        return
    low, high = box.split(dim, at)
    assert low.stop[dim] == high.offset[dim] == at
    assert (mask(low, high) == mask(box)).all()


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.data())
def test_flat_boxes_are_a_flat_range_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    flat = np.arange(size).reshape(shape)
    found = flat_boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    elements = [flat[box.within(Box.whole(shape))].ravel() for box in found]
    assert np.concatenate([np.arange(0), *elements]).tolist() == list(range(start, stop))


def test_a_box_of_no_dims_is_one_point() -> None:
    point = Box.whole(())
    assert (point.size, point.is_empty, point.stop) == (1, False, ())
    assert point.intersect(point) == point


def test_size_stop_and_ndim() -> None:
    box = Box((1, 2), (3, 4))
    assert (box.ndim, box.size, box.stop, box.is_empty) == (2, 12, (4, 6), False)
    assert Box((1, 2), (3, 0)).is_empty


@pytest.mark.parametrize(
    ("offset", "shape"), [((-1,), (2,)), ((1,), (-2,)), ((0,), (1, 1)), ((2**61,), (2**62,))]
)
def test_a_wrong_box_cannot_be_made(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        Box(offset, shape)


def test_boxes_of_different_ranks_do_not_mix() -> None:
    with pytest.raises(LayoutError, match="rank"):
        Box.whole((1,)).intersect(Box.whole((1, 1)))
    with pytest.raises(LayoutError, match="dim"):
        Box.whole((1,)).split(1, 0)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_flat_range_must_lie_in_the_tensor(start: int, stop: int) -> None:
    with pytest.raises(LayoutError):
        flat_boxes((2, 3), start, stop)
