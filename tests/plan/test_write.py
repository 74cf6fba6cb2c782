from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptkit.errors import LayoutError
from ckptkit.model import (
    Axis,
    Box,
    Grid,
    Layout,
    Mesh,
    Owner,
    Part,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    layout_of,
)
from ckptkit.plan.chunks import Owned, choose_grid, chunks_in, chunks_to_write, writes_document

CUT: st.SearchStrategy[Placement] = st.sampled_from(
    [Shard(0), Shard(1), Shard(0, None, 2), Strided(0), Strided(1)]
)


def held(
    name: str,
    shape: tuple[int, ...],
    strategy: Strategy | str,
    placements: Sequence[Placement],
    chunk_bytes: int = 64,
) -> Owned:
    layout = layout_of(shape, strategy, placements)
    return Owned(name, layout, choose_grid(shape, 4, layout.edges, chunk_bytes), 4)


@st.composite
def jobs(draw: st.DrawFn) -> list[Owned]:
    """Some arrays on one mesh, each cut in its own way."""
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    strategy = Strategy(Mesh(tuple(Axis(f"a{i}", "ddp", size) for i, size in enumerate(sizes))))
    arrays = []
    for number in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 24), max_size=3)))
        placements: list[Placement] = []
        for size in sizes:
            coord = draw(st.integers(0, size - 1))
            whole: list[Placement] = [Replicate(), Replicate(), Owner(coord), Stage(coord)]
            one = draw(CUT | st.sampled_from(whole))
            fits = not isinstance(one, Shard | Strided) or one.dim < len(shape)
            placements.append(one if fits else Replicate())
        try:
            arrays.append(held(f"a{number}", shape, strategy, placements))
        except LayoutError:  # a unit that does not divide what other axes left
            assume(False)
    return arrays or [held("one", (3,), strategy, [Replicate()] * len(sizes))]


def fused() -> st.SearchStrategy[list[Owned]]:
    """Query, key and value in one tensor, with fewer key heads than ranks."""

    def make(data: tuple[int, int, int, int]) -> list[Owned]:
        ranks, heads, shared, extra = data
        blocks = (heads * ranks * 2, shared * 2, shared * 2)
        strategy = Strategy.parse(f"ddp:{extra},tp:{ranks}")
        placements = (Replicate(), Shard(0, blocks, 2))
        return [held("qkv", (sum(blocks), 6), strategy, placements)]

    numbers = st.tuples(
        st.sampled_from([2, 4]), st.integers(1, 3), st.sampled_from([1, 2]), st.integers(1, 3)
    )
    return numbers.map(make)


def all_writes(arrays: list[Owned]) -> list[list[np.ndarray]]:
    ranks = arrays[0].layout.strategy.world_size
    return [[*chunks_to_write(arrays, rank)] for rank in range(ranks)]


def size_of(array: Owned, chunk: int) -> int:
    index = array.grid.index(chunk)
    return int(np.prod(array.grid.stored_shape(index), dtype=int)) * array.itemsize


@given(jobs() | fused())
def test_every_chunk_is_written_exactly_once(arrays: list[Owned]) -> None:
    writes = all_writes(arrays)
    for number, array in enumerate(arrays):
        written = np.concatenate([chunks[number] for chunks in writes])
        assert sorted(written.tolist()) == list(range(array.grid.chunk_count)), array.name
        assert all(chunks[number].dtype == np.int64 for chunks in writes)


def part_of(array: Owned, rank: int) -> Part:
    assert isinstance(array.layout, Layout)  # as all of these are
    return array.layout.part(rank)


@given(jobs() | fused())
def test_a_rank_writes_only_what_it_holds(arrays: list[Owned]) -> None:
    for rank, writes in enumerate(all_writes(arrays)):
        for array, chunks in zip(arrays, writes, strict=True):
            part = part_of(array, rank)
            for chunk in chunks.tolist():
                box = array.grid.box(array.grid.index(chunk))
                assert any(own.contains(box) for own in part.boxes)


@given(jobs() | fused())
def test_replicas_write_equal_shares_but_for_one_chunk(arrays: list[Owned]) -> None:
    shares: dict[Hashable, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    totals: dict[Hashable, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    largest: dict[Hashable, int] = defaultdict(int)
    members: dict[Hashable, int] = {}
    for rank, writes in enumerate(all_writes(arrays)):
        for array, chunks in zip(arrays, writes, strict=True):
            mine = set(chunks.tolist())
            for share in array.layout.shares(rank):
                key = share.replicas.key
                members[key] = share.replicas.count
                for box in share.boxes:
                    for chunk in chunks_in(array.grid, box).tolist():
                        size = size_of(array, chunk)
                        totals[key][rank] += size
                        shares[key][rank] += size * (chunk in mine)
                        largest[key] = max(largest[key], size)
    for group, by_rank in shares.items():
        assert len(by_rank) == members[group]
        assert len(set(totals[group].values())) == 1, "all members see the same stream"
        fair = totals[group][next(iter(by_rank))] / members[group]
        assert all(abs(written - fair) <= largest[group] for written in by_rank.values())


@given(jobs() | fused())
def test_each_document_has_one_writer(arrays: list[Owned]) -> None:
    all_ranks = all_writes(arrays)
    for number, array in enumerate(arrays):
        writers = [
            rank
            for rank, writes in enumerate(all_ranks)
            if writes_document(array, writes[number], rank)
        ]
        assert len(writers) == 1
        if array.grid.chunk_count:
            assert 0 in all_ranks[writers[0]][number]
        else:
            assert writers == [array.layout.first_rank]


@given(jobs())
def test_ranks_need_to_know_only_the_arrays_they_hold(arrays: list[Owned]) -> None:
    expected = all_writes(arrays)
    for rank, writes in enumerate(expected):
        known = [
            (array, chunks)
            for array, chunks in zip(arrays, writes, strict=True)
            if not part_of(array, rank).is_empty
        ]
        alone = chunks_to_write([array for array, _ in known], rank)
        for (array, chunks), found in zip(known, alone, strict=True):
            assert np.array_equal(chunks, found), array.name


def test_pipeline_stages_that_know_different_arrays_agree() -> None:
    strategy = Strategy.parse("pp:2,ddp:3")
    stages = [
        [held(f"{s}.{i}", (40 + i, 8), strategy, (Stage(s), Replicate())) for i in range(3)]
        for s in range(2)
    ]
    shared = held("norm", (30, 4), strategy, (Replicate(), Replicate()))
    written: dict[str, list[int]] = defaultdict(list)
    bytes_of: dict[int, int] = {}
    for rank in range(6):
        arrays = [*stages[rank // 3], shared]
        chunks = chunks_to_write(arrays, rank)
        for array, mine in zip(arrays, chunks, strict=True):
            written[array.name] += mine.tolist()
        bytes_of[rank] = sum(
            size_of(array, c) for array, mine in zip(arrays, chunks, strict=True) for c in mine
        )
    for array in [*stages[0], *stages[1], shared]:
        assert sorted(written[array.name]) == list(range(array.grid.chunk_count)), array.name
    assert max(bytes_of.values()) - min(bytes_of.values()) <= 4 * 64


def test_a_grid_that_does_not_fit_the_parts_is_refused() -> None:
    layout = layout_of((8,), "fsdp:2", [Shard(0)])
    array = Owned("a", layout, Grid.regular((8,), (3,)), 4)
    with pytest.raises(LayoutError, match="beyond what one rank holds") as error:
        chunks_to_write([array], 0)
    assert error.value.where == "a"


def test_padding_counts_as_bytes_when_shares_are_cut() -> None:
    layout = layout_of((9,), "ddp:2", [Replicate()])
    array = Owned("a", layout, Grid.regular((9,), (4,)), 1)
    # Stored are 4, 4 and 4 bytes: the middle of the second chunk is the middle of all.
    assert [chunks_to_write([array], rank)[0].tolist() for rank in (0, 1)] == [[0], [1, 2]]


def test_shares_are_exact_beyond_64_bits() -> None:
    grid = Grid.regular((2**61,), (2**55,))
    array = Owned("a", layout_of((2**61,), "ddp:4", [Replicate()]), grid, 1)
    found = [chunks_to_write([array], rank)[0].tolist() for rank in range(4)]
    assert found == [list(range(k, k + 16)) for k in (0, 16, 32, 48)]


def test_a_large_job_is_planned_in_no_time() -> None:
    strategy = Strategy.parse("ddp:8,fsdp:64")
    start = time.process_time()
    arrays = [
        held(f"a{i}", (4096, 1024), strategy, (Replicate(), Shard(0)), 1 << 14) for i in range(200)
    ]
    chunks_to_write(arrays, 77)
    assert time.process_time() - start < 2


@given(st.data())
def test_the_chunks_in_a_box_are_those_that_overlap_it(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), max_size=3)))
    edges = tuple(
        tuple(sorted(data.draw(st.sets(st.integers(1, max(1, n - 1)), max_size=3))))
        if n > 1
        else ()
        for n in shape
    )
    grid = data.draw(
        st.sampled_from(
            [
                Grid.rectilinear(shape, edges),
                Grid.regular(shape, tuple(max(1, n // 2) for n in shape)),
            ]
        )
    )
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(
        offset, tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, offset, strict=True))
    )
    expected = [c for c in range(grid.chunk_count) if grid.box(grid.index(c)).intersect(box)]
    assert chunks_in(grid, box).tolist() == expected
