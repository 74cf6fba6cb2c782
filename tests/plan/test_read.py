from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.model import Box, Grid
from ckptkit.plan.read import Pieces, coalesce, join_runs, pieces_within


@st.composite
def grids_and_boxes(draw: st.DrawFn) -> tuple[Grid, Box]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    if draw(st.booleans()):
        grid = Grid.regular(shape, tuple(draw(st.integers(1, 9)) for _ in shape))
    else:
        inner = [sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=4))) for n in shape]
        grid = Grid.rectilinear(
            shape,
            tuple(tuple(e for e in edges if e < n) for n, edges in zip(shape, inner, strict=True)),
        )
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    extents = zip(shape, offset, strict=True)
    return grid, Box(offset, tuple(draw(st.integers(0, n - a)) for n, a in extents))


def at(slices: tuple[slice, ...]) -> Any:
    """The index of a view, also of an array without dims."""
    return (*slices, ...)


def stored_chunks(grid: Grid) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
    """An array, and its chunks as they are stored, padding filled with -1."""
    array = np.arange(int(np.prod(grid.shape, dtype=int))).reshape(grid.shape)
    chunks = []
    for number in range(grid.chunk_count):
        index = grid.index(number)
        stored = np.full(grid.stored_shape(index), -1)
        box = grid.box(index)
        inside = tuple(slice(0, n) for n in box.shape)
        stored[at(inside)] = array[at(box.within(Box.whole(grid.shape)))]
        chunks.append(stored)
    return array, chunks


@given(grids_and_boxes())
def test_pieces_put_together_are_the_slice(case: tuple[Grid, Box]) -> None:
    grid, box = case
    array, chunks = stored_chunks(grid)
    target = np.full(box.shape, -9)
    pieces = Pieces(grid, box)
    spans = []
    for piece in pieces:
        chunk = chunks[piece.chunk]
        assert piece.stored_shape == chunk.shape
        assert (target[at(piece.target)] == -9).all(), "each element is filled once"
        target[at(piece.target)] = chunk[at(piece.source)]
        places = np.arange(chunk.size).reshape(chunk.shape)[at(piece.source)]
        assert piece.is_whole == (places.size == chunk.size)
        spans.append((int(places.min()), int(places.max()) + 1))
    assert np.array_equal(target, array[at(box.within(Box.whole(grid.shape)))])
    numbers = [piece.chunk for piece in pieces]
    assert numbers == sorted(set(numbers)), "in chunk order, each chunk once"
    assert pieces.chunks().tolist() == numbers
    assert list(zip(*(bound.tolist() for bound in pieces.element_spans()), strict=True)) == spans


@given(grids_and_boxes())
def test_whole_chunks_without_a_gap_in_the_target_are_found(case: tuple[Grid, Box]) -> None:
    grid, box = case
    target = np.arange(box.size).reshape(box.shape)
    pieces = Pieces(grid, box)
    found = pieces.begins()
    assert len(found) == len(pieces)
    for piece, begin in zip(pieces, found.tolist(), strict=True):
        view = target[at(piece.target)]
        if begin < 0:
            assert not (piece.is_whole and view.flags.c_contiguous)
        else:
            assert piece.is_whole
            assert view.reshape(-1).tolist() == list(range(begin, begin + view.size))


@given(grids_and_boxes())
def test_pieces_are_a_sequence(case: tuple[Grid, Box]) -> None:
    pieces = Pieces(*case)
    assert len(pieces) == len(list(pieces)) == len(pieces.chunks())
    assert pieces[:] == list(pieces)
    assert pieces[::-2] == list(pieces)[::-2]
    assert not pieces or pieces[-1] == list(pieces)[-1]
    with pytest.raises(IndexError):
        pieces[len(pieces)]


@given(grids_and_boxes(), st.sampled_from([1, 2, 4]), st.integers(1, 60))
@example((Grid.rectilinear((2, 7), ((), (1,))), Box((0, 1), (2, 1))), 1, 2)
def test_a_box_is_cut_until_what_each_piece_needs_of_a_chunk_lies_close(
    case: tuple[Grid, Box], itemsize: int, limit: int
) -> None:
    grid, box = case
    whole = np.zeros(grid.shape, np.int64)
    places = np.arange(whole.size).reshape(grid.shape)
    firsts = []
    for piece in pieces_within(grid, box, itemsize, limit):
        inside = at(piece.within(Box.whole(grid.shape)))
        whole[inside] += 1
        if not piece.is_empty:
            firsts.append(int(places[inside].min()))
        for start, stop in zip(*Pieces(grid, piece).element_spans(), strict=True):
            assert piece.size == 1 or (stop - start) * itemsize <= limit
    expected = np.zeros_like(whole)
    expected[at(box.within(Box.whole(grid.shape)))] = 1
    assert np.array_equal(whole, expected), "each element of the box is in one piece"
    assert firsts == sorted(firsts), "in C order"


def test_a_box_that_lies_close_already_is_one_piece() -> None:
    box = Box((0, 0), (8, 4))
    assert list(pieces_within(Grid.regular((8, 8), (4, 8)), box, 4, 4 * 60)) == [box]


def test_a_piece_of_an_absurd_grid_is_found() -> None:
    grid = Grid.regular((2**40, 2**20), (2**20, 2**20))
    pieces = Pieces(grid, Box((2**39 + 5, 3), (10, 10)))
    assert len(pieces) == 1
    assert (pieces[0].chunk, pieces[0].source) == (2**19, (slice(5, 15), slice(3, 13)))


Extents = list[tuple[int, int, int]]


def joined(extents: Extents, gap: int, limit: int) -> list[tuple[int, int]]:
    """The same, one extent after the other: a request grows while it stays whole and small, and by
    what it has already.
    """
    runs: list[tuple[int, int]] = []
    begin, reach = 0, 0
    for row, (pack, start, stop) in enumerate(extents):
        first = extents[begin]
        fits = row > begin and pack == first[0] and start - reach <= gap
        again = row > begin and extents[row] == extents[row - 1]
        if not again and (not fits or max(reach, stop) - first[1] > limit):
            if row:
                runs.append((begin, row))
            begin, reach = row, stop
        reach = max(reach, stop)
    return [*runs, (begin, len(extents))] if extents else []


def columns(extents: Extents) -> tuple[Any, Any, Any]:
    table = np.array(extents, dtype=np.int64).reshape(-1, 3)
    return table[:, 0].astype(np.uint32), table[:, 1], table[:, 2]


@st.composite
def apart(draw: st.DrawFn) -> Extents:
    """Extents of chunks, which never overlap; the same one may be wanted twice."""
    extents, at, pack = [], 0, 0
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 5)) == 0:
            pack, at = pack + 1, 0
        at += draw(st.integers(0, 6))
        length = draw(st.integers(1, 12))
        extents += [(pack, at, at + length)] * draw(st.integers(1, 2))
        at += length
    return extents


overlapping = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 30)), max_size=12
).map(lambda rows: sorted((p, a, a + n) for p, a, n in rows))


@given(apart(), st.integers(0, 6), st.integers(1, 40))
def test_neighbours_join_as_long_as_the_request_stays_small(
    extents: Extents, gap: int, limit: int
) -> None:
    assert coalesce(*columns(extents), gap=gap, limit=limit) == joined(extents, gap, limit)


@given(overlapping, st.integers(0, 6), st.integers(1, 40))
@example([(0, 0, 100), (0, 10, 20)], 0, 200)
@example([(0, 0, 9), (0, 1, 30), (0, 2, 5)], 0, 9)
@example([(0, 0, 5), (0, 1, 30), (0, 2, 5), (0, 3, 6)], 0, 9)
def test_extents_that_overlap_are_in_requests_that_hold_them_all(
    extents: Extents, gap: int, limit: int
) -> None:
    runs = coalesce(*columns(extents), gap=gap, limit=limit)
    assert [row for run in runs for row in range(*run)] == list(range(len(extents)))
    for begin, end in runs:
        assert end > begin
        rows = extents[begin:end]
        assert len({pack for pack, _, _ in rows}) == 1
        furthest = max(stop for _, _, stop in rows)
        assert len(set(rows)) == 1 or furthest - rows[0][1] <= limit


def test_nothing_to_read_is_no_request() -> None:
    assert coalesce(*columns([]), gap=1, limit=1) == []


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=30),
    st.integers(0, 20),
    st.integers(1, 200),
)
def test_runs_are_joined_while_little_is_read_for_nothing(
    pieces: list[tuple[int, int]], gap: int, limit: int
) -> None:
    start, stop, at = list[int](), list[int](), 0
    for apart, size in pieces:
        start.append(at + apart)
        at += apart + size
        stop.append(at)
    pack = np.array([number // 7 for number in range(len(pieces))], np.uint32)
    starts, stops = np.array(start, np.int64), np.array(stop, np.int64)
    runs = coalesce(pack, starts, stops, gap=0, limit=limit)
    found = join_runs(runs, pack, starts, stops, gap=gap, limit=limit)
    assert [row for first, last in found for row in range(first, last)] == list(range(len(pieces)))
    assert len(found) <= len(runs)
    for first, last in found:
        size = stop[last - 1] - start[first]
        needed = sum(stop[row] - start[row] for row in range(first, last))
        assert len(set(pack[first:last].tolist())) == 1
        if (first, last) not in runs:
            assert size <= limit
            assert (size - needed) * limit <= gap * size
