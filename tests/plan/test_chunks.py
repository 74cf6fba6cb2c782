from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptkit.model import Box, Grid, Shard, layout_of, parse_placement
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, choose_grid

MIB = 1 << 20


def borders(grid: Grid, dim: int) -> list[int]:
    starts = [grid.interval(dim, index)[0] for index in range(grid.counts[dim])]
    return [*starts, grid.shape[dim]]


def largest(grid: Grid, itemsize: int) -> int:
    """The bytes of the largest chunk."""
    return grid.chunk_elements * itemsize


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    extents = st.integers(0, 40) | st.integers(1, 5000)
    shape = tuple(draw(st.lists(extents, max_size=4)))
    edges = []
    for extent in shape:
        inner = st.integers(1, max(1, extent - 1))
        cuts = sorted(draw(st.sets(inner, max_size=6))) if extent > 1 else []
        edges.append(tuple(cuts))
    if 0 in shape:
        edges = [() for _ in shape]
    return shape, tuple(edges)


sizes = st.sampled_from([1, 2, 4, 8, 16])
targets = st.sampled_from([1, 100, 4096, MIB, DEFAULT_CHUNK_BYTES])


@given(cut_shapes(), sizes, targets, st.none() | st.lists(st.integers(0, 1), unique=True))
def test_every_edge_is_a_border_of_chunks(
    case: tuple[tuple[int, ...], tuple[tuple[int, ...], ...]],
    itemsize: int,
    target: int,
    sliced: list[int] | None,
) -> None:
    shape, edges = case
    assume(math.prod(shape) < 2**24 * target)
    known = None if sliced is None else tuple(sliced)
    grid = choose_grid(shape, itemsize, edges, target, known)
    assert grid.shape == shape
    if 0 in shape:
        assert grid.chunk_count == 0
        return
    for dim, cuts in enumerate(edges):
        along = borders(grid, dim)
        assert set(cuts) <= set(along)
        assert along == sorted(set(along))
    whole = Box.whole(shape)
    assert grid.is_whole(whole)


@given(cut_shapes(), sizes, targets)
def test_the_same_question_has_the_same_answer_on_every_rank(
    case: tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], itemsize: int, target: int
) -> None:
    assume(math.prod(case[0]) < 2**24 * target)
    first = choose_grid(case[0], itemsize, case[1], target)
    choose_grid.cache_clear()
    assert choose_grid(case[0], itemsize, case[1], target) == first


def test_the_answer_does_not_depend_on_the_hash_seed() -> None:
    code = (
        "from ckptkit.plan.chunks import choose_grid\n"
        "print([choose_grid((n, 96), 2, ((n // 3, n // 2), ()), 4096) for n in range(9, 99)])"
    )
    root = Path(__file__).parents[2]
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


@given(
    st.integers(1, 10_000).map(lambda n: 2 * n),
    st.integers(1, 70),
    st.sampled_from(["shard(0)", "shard(0, unit=2)", "strided(0)"]),
)
def test_pieces_of_equal_ceiling_make_a_regular_grid(
    extent: int, ranks: int, placement: str
) -> None:
    assume("unit" not in placement or ranks <= extent // 2)
    layout = layout_of((extent, 3), f"fsdp:{ranks}", [parse_placement(placement)])
    assert choose_grid((extent, 3), 4, layout.edges).is_regular


LLAMA = [(128256, 8192), (32000, 4096), (4096, 4096), (14336, 4096), (1024, 4096), (8192, 28672)]
STRATEGIES = ["fsdp:1", "fsdp:2", "fsdp:8", "fsdp:64", "fsdp:512"]


@pytest.mark.parametrize("shape", [*LLAMA, (4096,), (8192,)], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_chunks_of_a_llama_have_a_size_that_disks_and_networks_like(
    shape: tuple[int, ...], strategy: str, itemsize: int
) -> None:
    layout = layout_of(shape, strategy, [Shard(0)])
    grid = choose_grid(shape, itemsize, layout.edges)
    part = math.prod(layout.part(0).shape) * itemsize
    assert largest(grid, itemsize) <= DEFAULT_CHUNK_BYTES
    assert largest(grid, itemsize) >= min(part, DEFAULT_CHUNK_BYTES // 16)
    row = grid.chunk_shape[-1] * itemsize
    assert row >= min(shape[-1] * itemsize, 512) or len(shape) == 1


@pytest.mark.parametrize("shape", LLAMA, ids=str)
@pytest.mark.parametrize("cut", ["", "fsdp:8", "tp:8", "fsdp:64"])
def test_halves_quarters_and_eighths_are_borders_where_chunks_and_rows_stay_useful(
    shape: tuple[int, int], cut: str
) -> None:
    dim = 1 if cut.startswith("tp") else 0
    edges = layout_of(shape, cut, [Shard(dim)]).edges if cut else ((), ())
    grid = choose_grid(shape, 2, edges)
    # Rows of an eighth would be short ones: there it is quarters.
    columns = 8 if cut == "tp:8" or shape[1] // 8 * 2 >= 4096 else 4
    found = [8 in _parts(grid, 0), columns in _parts(grid, 1)]
    ranks = int(cut.partition(":")[2] or 1)
    eighths = math.prod(shape) // 8 // max(8, ranks) * 2
    if eighths >= DEFAULT_CHUNK_BYTES // 16:
        assert all(found), grid
    else:
        # Not both dims can have them, but the larger pieces are still halves of one another.
        assert grid.is_regular
        assert largest(grid, 2) < 4 * DEFAULT_CHUNK_BYTES // 16


def _parts(grid: Grid, dim: int) -> set[int]:
    """The numbers of equal parts whose borders are all borders of chunks."""
    extent = grid.shape[dim]
    at = set(borders(grid, dim))
    return {n for n in (2, 4, 8) if {extent * k // n for k in range(1, n)} <= at}


@pytest.mark.parametrize("shape", LLAMA, ids=str)
def test_a_quarter_of_the_columns_takes_a_quarter_of_the_bytes(shape: tuple[int, int]) -> None:
    grid = choose_grid(shape, 2, layout_of(shape, "fsdp:2", [Shard(0)]).edges)
    quarter = shape[1] // 4
    for first in range(4):
        box = Box((0, first * quarter), (shape[0], quarter))
        touched = math.prod(len(span) for span in grid.span(box))
        assert touched * grid.chunk_elements <= 1.15 * box.size


@pytest.mark.parametrize("shape", LLAMA, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_rows_that_nothing_cuts_stay_whole(shape: tuple[int, int], ranks: int) -> None:
    layout = layout_of(shape, f"fsdp:{ranks}", [Shard(0)])
    grid = choose_grid(shape, 2, layout.edges, sliced=(0,))
    assert grid.chunk_shape[1] == shape[1]
    assert largest(grid, 2) <= DEFAULT_CHUNK_BYTES
    assert largest(grid, 2) >= min(math.prod(layout.part(0).shape) * 2, DEFAULT_CHUNK_BYTES // 16)
    # Where nothing says so, and where tensor parallelism does, columns are apart as well.
    for sliced in (None, (0, 1)):
        cut = choose_grid(shape, 2, layout.edges, sliced=sliced)
        if math.prod(layout.part(0).shape) * 2 >= DEFAULT_CHUNK_BYTES:
            assert cut.chunk_shape[1] < shape[1]


@pytest.mark.parametrize(
    ("shape", "edges"),
    [
        ((2 * 1_000_000_007,), ((1_000_000_007,),)),
        ((3 * 10_000_019, 4), ((10_000_019, 20_000_038), ())),
        ((50257, 768), ((6283, 12566, 18849, 25132, 31415, 37698, 43981, 50256),)),
    ],
    ids=str,
)
def test_a_cut_at_a_large_prime_does_not_make_huge_chunks(
    shape: tuple[int, ...], edges: tuple[tuple[int, ...], ...]
) -> None:
    edges = (*edges, *((),) * (len(shape) - len(edges)))
    grid = choose_grid(shape, 4, edges)
    assert largest(grid, 4) <= 2 * DEFAULT_CHUNK_BYTES


@given(
    st.integers(1, 2**28),
    st.integers(1, 2**18),
    st.integers(1, 64),
    st.sampled_from([0, 1]),
    st.sampled_from([2, 4]),
    st.sampled_from([None, (), (0,), (1,)]),
)
def test_no_chunk_is_much_larger_than_asked_for(
    rows: int, columns: int, ranks: int, dim: int, itemsize: int, sliced: tuple[int, ...] | None
) -> None:
    assume(rows * columns <= 2**32)
    layout = layout_of((rows, columns), f"fsdp:{ranks}", [Shard(dim)])
    grid = choose_grid((rows, columns), itemsize, layout.edges, sliced=sliced)
    assert largest(grid, itemsize) <= 4 * DEFAULT_CHUNK_BYTES


@pytest.mark.parametrize(
    ("shape", "edges"),
    [
        ((2**62,), ((),)),
        ((2**60,), ((2**59,),)),
        ((2**31, 2**30), ((), ())),
        ((2**50, 10), ((), (3, 5, 8))),
        ((10, 2**50), ((3, 5, 8), ())),
        ((2**30, 2**20, 10), ((), (), (3, 5, 8))),
        ((1,) * 32, ((),) * 32),
    ],
    ids=str,
)
def test_absurd_extents_do_not_make_absurdly_many_borders(
    shape: tuple[int, ...], edges: tuple[tuple[int, ...], ...]
) -> None:
    start = time.process_time()
    for sliced in (None, (), (0,)):
        grid = choose_grid(shape, 1, edges, sliced=sliced)
        assert grid.is_regular or sum(map(len, grid.edges)) <= 2**20
    assert time.process_time() - start < 5


def test_an_array_without_dims_is_one_chunk_and_one_without_elements_none() -> None:
    assert choose_grid((), 4, ()) == Grid.regular((), ())
    assert choose_grid((0, 5), 4, ((), ())) == Grid.regular((0, 5), (1, 5))
    assert choose_grid((5, 0), 4, ((), ())).chunk_count == 0


def test_cuts_that_no_regular_grid_has_make_a_rectilinear_one() -> None:
    # 10 rows over tp:2 and then fsdp:2 are 3, 2, 3, 2.
    grid = choose_grid((10, 4), 4, ((3, 5, 8), ()))
    assert not grid.is_regular
    assert {3, 5, 8} <= set(borders(grid, 0))
    assert all(b > a for a, b in pairwise(borders(grid, 0)))
