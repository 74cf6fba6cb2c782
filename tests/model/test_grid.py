from __future__ import annotations

import math
import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.errors import FormatError, LayoutError
from ckptkit.model import Box, Grid
from tests.model.cover import check_cover


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    shape = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple))
    if draw(st.booleans()):
        return Grid.regular(shape, tuple(draw(st.integers(1, 9)) for _ in shape))
    cuts = [draw(st.sets(st.integers(1, n - 1))) if n > 1 else set[int]() for n in shape]
    return Grid.rectilinear(shape, tuple(tuple(sorted(cut)) for cut in cuts))


@st.composite
def grids_and_boxes(draw: st.DrawFn) -> tuple[Grid, Box]:
    grid = draw(grids())
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in grid.shape]
    return grid, Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


@given(grids())
def test_the_chunks_cover_the_array_once_and_are_numbered_in_order(grid: Grid) -> None:
    indices = [grid.index(flat) for flat in range(grid.chunk_count)]
    assert indices == list(product(*map(range, grid.counts)))
    assert [grid.flat(index) for index in indices] == list(range(grid.chunk_count))
    assert check_cover(Box.whole(grid.shape), [grid.box(index) for index in indices]) is None
    assert not any(grid.box(index).is_empty for index in indices)


@given(grids())
def test_a_document_gives_the_grid_back(grid: Grid) -> None:
    again = Grid.from_doc(grid.to_doc(), grid.shape)
    assert again == grid
    assert hash(again) == hash(grid)
    assert (again.counts, again.chunk_count) == (grid.counts, grid.chunk_count)


@given(grids_and_boxes())
def test_the_span_of_a_box_is_the_chunks_that_overlap_it(case: tuple[Grid, Box]) -> None:
    grid, box = case
    overlapping = {
        index
        for index in product(*map(range, grid.counts))
        if grid.box(index).intersect(box) is not None
    }
    assert set(product(*grid.span(box))) == overlapping
    covered = sum(grid.box(index).size for index in overlapping)
    assert grid.is_whole(box) == (covered == box.size)


@given(grids())
def test_regular_chunks_are_stored_padded_and_others_exact(grid: Grid) -> None:
    for index in map(grid.index, range(grid.chunk_count)):
        expected = grid.chunk_shape if grid.is_regular else grid.box(index).shape
        assert grid.stored_shape(index) == expected


def test_a_scalar_is_one_chunk_and_an_empty_array_none() -> None:
    assert Grid.regular((), ()).chunk_count == 1
    assert Grid.regular((), ()).box(()) == Box.whole(())
    assert Grid.regular((0, 4), (2, 2)).chunk_count == 0
    assert Grid.rectilinear((0, 4), ((), (2,))).counts == (0, 2)


def test_each_kind_has_its_own_numbers() -> None:
    with pytest.raises(LayoutError):
        _ = Grid.regular((4,), (2,)).edges
    with pytest.raises(LayoutError):
        _ = Grid.rectilinear((4,), ((2,),)).chunk_shape
    with pytest.raises(LayoutError):
        Grid((4,))


@pytest.mark.parametrize("at", [(2,), (-1,), (0, 0), ()])
def test_there_is_no_chunk_outside(at: tuple[int, ...]) -> None:
    grid = Grid.regular((4,), (2,))
    for call in (grid.box, grid.stored_shape, grid.flat):
        with pytest.raises(LayoutError):
            call(at)
    with pytest.raises(LayoutError):
        grid.index(2)


def test_boxes_outside_the_array_are_refused() -> None:
    grid = Grid.regular((4,), (2,))
    for box in (Box((3,), (2,)), Box.whole((1, 1))):
        with pytest.raises(LayoutError):
            grid.span(box)
        with pytest.raises(LayoutError):
            grid.is_whole(box)


@pytest.mark.parametrize(
    ("doc", "where"),
    [
        (None, "here"),
        ({}, "here"),
        ({"kind": "hexagonal"}, "here"),
        ({"kind": "regular"}, "here.chunk_shape"),
        ({"kind": "regular", "chunk_shape": [2, 2], "more": 1}, "here"),
        ({"kind": "regular", "chunk_shape": "22"}, "here.chunk_shape"),
        ({"kind": "regular", "chunk_shape": [2]}, "here"),
        ({"kind": "regular", "chunk_shape": [2, 0]}, "here"),
        ({"kind": "regular", "chunk_shape": [2, True]}, "here.chunk_shape.1"),
        ({"kind": "regular", "chunk_shape": [2, 2**63]}, "here.chunk_shape.1"),
        ({"kind": "regular", "chunk_shape": [1, 1]}, "here"),
        ({"kind": "rectilinear", "edges": 3}, "here.edges"),
        ({"kind": "rectilinear", "edges": [[], 3]}, "here.edges.1"),
        ({"kind": "rectilinear", "edges": [[2, 2], []]}, "here"),
        ({"kind": "rectilinear", "edges": [[3, 2], []]}, "here"),
        ({"kind": "rectilinear", "edges": [[0], []]}, "here"),
        ({"kind": "rectilinear", "edges": [[], [2**62]]}, "here"),
    ],
)
def test_hostile_documents_are_refused_with_the_place(doc: Any, where: str) -> None:
    with pytest.raises(FormatError) as caught:
        Grid.from_doc(doc, (2**30, 2**30), where="here")
    assert caught.value.where == where


def test_an_absurd_shape_is_refused() -> None:
    for shape in ((-1,), (2**63,)):
        with pytest.raises(LayoutError):
            Grid.regular(shape, (1,))


def test_ten_thousand_grids_are_made_and_read_in_well_under_a_second() -> None:
    start = time.process_time()
    for i in range(10_000):
        doc = Grid.regular((4096 + i, 4096), (512, 512)).to_doc()
        Grid.from_doc(doc, (4096 + i, 4096))
    assert time.process_time() - start < 1


def test_chunks_put_together_are_the_array() -> None:
    grid = Grid.rectilinear((5, 4), ((2, 3), (1,)))
    array = np.arange(math.prod(grid.shape)).reshape(grid.shape)
    out = np.zeros_like(array)
    for flat in range(grid.chunk_count):
        where = grid.box(grid.index(flat)).within(Box.whole(grid.shape))
        out[where] = array[where]
    assert (out == array).all()
