from __future__ import annotations

import copy
import math
import pickle
import time
from collections import defaultdict
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptkit.errors import LayoutError, StrategyError
from ckptkit.model import (
    Axis,
    Box,
    Layout,
    Mesh,
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    layout_of,
)
from tests.model.cover import check_cover

WHOLE = Replicate()


class DoesNotFitError(Exception):
    """The model below says that placements mean nothing for a shape."""


def chunk(items: list[int], ranks: int, coord: int, unit: int) -> list[int]:
    """One block cut by one axis, element by element."""
    if len(items) % unit:
        raise DoesNotFitError
    units = len(items) // unit
    if unit > 1 and 0 < units < ranks:
        if ranks % units:
            raise DoesNotFitError
        place = coord // (ranks // units)
        return items[place * unit : (place + 1) * unit]
    step = -(-units // ranks) * unit
    return items[coord * step : (coord + 1) * step]


def cut(items: list[int], placement: Shard | Strided, ranks: int, coord: int) -> list[int]:
    blocks = getattr(placement, "blocks", None) or (len(items),)
    if sum(blocks) != len(items):
        raise DoesNotFitError
    found, base = [], 0
    for block in blocks:
        found += chunk(items[base : base + block], ranks, coord, placement.unit)
        base += block
    return found


def cut_order(axes: list[int], strided: set[int]) -> list[int]:
    """What cuts a dim: in mesh order, a strided axis after all that stand to its right."""
    if not axes:
        return []
    first, rest = axes[0], cut_order(axes[1:], strided)
    return [*rest, first] if first in strided else [first, *rest]


def held(
    layout: tuple[tuple[int, ...], Strategy, tuple[Placement, ...]], rank: int
) -> list[list[int]] | None:
    """What a rank holds per dim, in the order of its memory; None where it is not the owner."""
    shape, strategy, placements = layout
    coords = strategy.mesh.coords(rank)
    found = []
    for dim, length in enumerate(shape):
        items = list(range(length))
        cutting = [i for i, p in enumerate(placements) if getattr(p, "dim", None) == dim]
        strided = {i for i in cutting if isinstance(placements[i], Strided)}
        for i in cut_order(cutting, strided):
            items = cut(items, placements[i], strategy.mesh.sizes[i], coords[i])  # type: ignore[arg-type]
        found.append(items)
    is_elsewhere = any(
        isinstance(p, Owner | Stage) and p.coord != c
        for p, c in zip(placements, coords, strict=True)
    )
    return None if is_elsewhere else found


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Strategy, tuple[Placement, ...]]:
    ndim = draw(st.integers(0, 3))
    sizes = draw(st.lists(st.integers(1, 4), max_size=3))
    units = st.sampled_from([1, 1, 2, 3])
    placements: list[Placement] = []
    for size in sizes:
        kind = draw(st.sampled_from("rsscbbtop" if ndim else "rop"))
        dim, unit = draw(st.integers(0, max(ndim - 1, 0))), draw(units)
        coord = draw(st.integers(0, size - 1))
        blocks = draw(st.lists(st.integers(1, 4).map(unit.__mul__), min_size=1, max_size=3))
        choices: dict[str, Placement] = {
            "r": Replicate(),
            "s": Shard(dim),
            "c": Shard(dim, None, unit),
            "b": Shard(dim, tuple(blocks), unit),
            "t": Strided(dim, unit),
            "o": Owner(coord),
            "p": Stage(coord),
        }
        placements.append(choices[kind])
    shape = []
    for dim in range(ndim):
        # Lengths that suit blocks, be they cut first or behind another axis.
        wanted = [
            sum(p.blocks) for p in placements if isinstance(p, Shard) and p.dim == dim and p.blocks
        ]
        some = st.integers(0, 9) | st.integers(1, 4).map((6).__mul__)
        fitting = [w * s for w in wanted for s in (1, *sizes)]
        shape.append(draw(st.sampled_from(fitting) if fitting else some))
    axes = tuple(Axis(f"a{i}", "ddp", size) for i, size in enumerate(sizes))
    return tuple(shape), Strategy(Mesh(axes)), tuple(placements)


@st.composite
def fused_cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Strategy, tuple[Placement, ...]]:
    """Query, key and value in one tensor, cut by heads and then by anything else."""
    ranks, unit = draw(st.sampled_from([2, 4, 6])), draw(st.integers(2, 4))
    heads = st.sampled_from([n for n in range(1, 10) if n > ranks or ranks % n == 0])
    blocks = [unit * draw(heads) for _ in range(draw(st.integers(2, 3)))]
    sizes, placements = [ranks], [cast("Placement", Shard(0, tuple(blocks), unit))]
    for _ in range(draw(st.integers(0, 2))):
        before = draw(st.booleans())
        sizes.insert(0 if before else len(sizes), draw(st.integers(2, 3)))
        other = Strided(0) if before else Shard(0)
        chosen = draw(st.sampled_from([other, other, Shard(1), Replicate()]))
        placements.insert(0 if before else len(placements), chosen)
    axes = tuple(Axis(f"a{i}", "ddp", size) for i, size in enumerate(sizes))
    return (sum(blocks), draw(st.integers(1, 3))), Strategy(Mesh(axes)), tuple(placements)


@st.composite
def fitting_cases(draw: st.DrawFn) -> tuple[Layout, list[list[list[int]] | None]]:
    case = draw(cases() | fused_cases())
    try:
        expected = [held(case, rank) for rank in range(case[1].world_size)]
    except DoesNotFitError:
        assume(False)
    return layout_of(*case), expected


def runs(items: list[int]) -> int:
    """How many stretches without a jump."""
    return sum(i == 0 or items[i - 1] + 1 != item for i, item in enumerate(items))


def is_nothing(coords: list[list[int]] | None) -> bool:
    return coords is None or not all(coords)


@given(cases() | fused_cases())
def test_placements_that_do_not_fit_are_refused_and_no_others(
    case: tuple[tuple[int, ...], Strategy, tuple[Placement, ...]],
) -> None:
    try:
        for rank in range(case[1].world_size):
            held(case, rank)
    except DoesNotFitError:
        with pytest.raises(LayoutError):
            layout_of(*case)
    else:
        layout_of(*case)


@given(fitting_cases())
def test_a_part_holds_what_cutting_element_by_element_gives(
    case: tuple[Layout, list[list[list[int]] | None]],
) -> None:
    layout, expected = case
    tensor = np.arange(Box.whole(layout.shape).size).reshape(layout.shape)
    for rank, coords in enumerate(expected):
        part = layout.part(rank)
        assert part.is_empty == is_nothing(coords)
        if coords is None:
            assert 0 in part.shape or part.shape == ()
            continue
        local = tensor[np.ix_(*coords)] if coords else tensor
        assert part.shape == local.shape
        assert len(part.boxes) == math.prod(map(runs, coords))
        for box, place in zip(part.boxes, part.places, strict=True):
            assert (
                tensor[box.within(Box.whole(tensor.shape))]
                == local[place.within(Box.whole(local.shape))]
            ).all()
        assert check_cover(Box.whole(part.shape), part.places if local.size else []) is None
        assert [place.offset for place in part.places] == sorted(p.offset for p in part.places)


@given(fitting_cases())
def test_every_element_has_one_first_holder(
    case: tuple[Layout, list[list[list[int]] | None]],
) -> None:
    layout, expected = case
    shares = [share for rank in range(len(expected)) for share in layout.shares(rank)]
    firsts = [box for share in shares if share.replicas.index == 0 for box in share.boxes]
    assert check_cover(Box.whole(layout.shape), firsts) is None
    members: dict[tuple[Any, Any, int], list[int]] = defaultdict(list)
    for rank in range(len(expected)):
        part, own = layout.part(rank), layout.shares(rank)
        assert (
            check_cover(Box.whole(part.shape), [p for s in own for p in s.places]) is None
            or part.is_empty
        )
        for share in own:
            members[share.boxes, share.replicas.key, share.replicas.count].append(
                share.replicas.index
            )
    for key, places in members.items():
        assert sorted(places) == list(range(key[2]))


@given(fitting_cases())
def test_replicas_are_the_ranks_that_hold_the_same(
    case: tuple[Layout, list[list[list[int]] | None]],
) -> None:
    layout, expected = case
    groups: dict[object, list[int]] = defaultdict(list)
    for rank, coords in enumerate(expected):
        if is_nothing(coords):
            assert layout.replicas(rank).count == 0
        else:
            groups[str(coords)].append(rank)
    keys = []
    for ranks in groups.values():
        replicas = [layout.replicas(rank) for rank in ranks]
        assert {r.count for r in replicas} == {len(ranks)}
        assert sorted(r.index for r in replicas) == list(range(len(ranks)))
        assert len({r.key for r in replicas}) == 1
        keys.append(replicas[0].key)
    assert len(set(keys)) == len(keys)
    assert sorted(layout.distinct_ranks()) == sorted(ranks[0] for ranks in groups.values())
    if groups:
        assert layout.first_rank == min(ranks[0] for ranks in groups.values())


@given(fitting_cases())
def test_edges_are_those_of_all_ranks(
    case: tuple[Layout, list[list[list[int]] | None]],
) -> None:
    layout, expected = case
    found: list[set[int]] = [set() for _ in layout.shape]
    for rank in range(len(expected)):
        for box in layout.part(rank).boxes:
            for dim, ends in enumerate(zip(box.offset, box.stop, strict=True)):
                found[dim].update(ends)
    interior = [ends - {0, n} for ends, n in zip(found, layout.shape, strict=True)]
    assert layout.edges == tuple(tuple(sorted(ends)) for ends in interior)


@given(fitting_cases())
def test_distinct_parts_cover_the_tensor_once_unless_shared_unevenly(
    case: tuple[Layout, list[list[list[int]] | None]],
) -> None:
    layout, _ = case
    ranks = list(layout.distinct_ranks())
    assume(all(len(layout.shares(rank)) == 1 for rank in ranks))
    assume(all(layout.shares(rank)[0].replicas == layout.replicas(rank) for rank in ranks))
    boxes = [box for rank in ranks for box in layout.part(rank).boxes]
    assert check_cover(Box.whole(layout.shape), boxes) is None


@pytest.mark.parametrize(("length", "ranks"), [*product(range(10), range(1, 6))])
def test_a_shard_is_what_torch_chunk_gives(length: int, ranks: int) -> None:
    layout = layout_of((length, 2), f"fsdp:{ranks}", (Shard(0),))
    chunks = torch.arange(length).chunk(ranks)
    for rank in range(ranks):
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        part = layout.part(rank)
        assert [i for box in part.boxes for i in range(box.offset[0], box.stop[0])] == expected
        assert part.shape == (len(expected), 2)


def test_key_heads_fewer_than_ranks_are_shared_by_neighbours() -> None:
    placements = (Shard(0, (8, 4, 4), 2),)
    layout = layout_of((16, 3), "tp:4", placements)
    rows = [[(b.offset[0], b.stop[0]) for b in layout.part(rank).boxes] for rank in range(4)]
    assert rows[1] == [(2, 4), (8, 10), (12, 14)]
    assert rows[2] == [(4, 6), (10, 12), (14, 16)]
    query, keys = layout.shares(2)
    assert (query.replicas.key, query.replicas.count) == ((range(2, 3),), 1)
    assert (keys.replicas.key, keys.replicas.index, keys.replicas.count) == ((range(2, 4),), 0, 2)
    assert [place.offset for place in keys.places] == [(2, 0), (4, 0)]
    assert layout.replicas(2).count == 1


def test_fsdp_over_tp_cuts_inside_the_tp_piece() -> None:
    layout = layout_of((8,), "fsdp:2,tp:2", (Strided(0), Shard(0)))
    starts = [layout.part(rank).boxes[0].offset for rank in range(4)]
    assert starts == [(0,), (4,), (2,), (6,)]


def test_keys_are_equal_across_tensors_that_the_same_ranks_share() -> None:
    strategy = "ddp:2,tp:4"
    rows = layout_of((8, 6), strategy, (WHOLE, Shard(0)))
    columns = layout_of((5, 4), strategy, (WHOLE, Shard(1)))
    heads = layout_of((8,), strategy, (WHOLE, Shard(0, None, 4)))
    tensor = layout_of((5,), strategy, (WHOLE, WHOLE))
    assert rows.replicas(6).key == columns.replicas(2).key != rows.replicas(5).key
    assert heads.replicas(2).key == heads.replicas(7).key != heads.replicas(1).key
    assert tensor.replicas(0).count == 8


def test_a_scalar_is_replicated_or_owned() -> None:
    layout = layout_of((), "pp:2,zero1:2", (Stage(1), Owner(0)))
    assert [layout.part(rank).is_empty for rank in range(4)] == [True, True, False, True]
    assert layout.part(2).boxes == (Box.whole(()),)
    assert layout.first_rank == 2
    assert layout.edges == ()
    with pytest.raises(LayoutError, match="0-d"):
        layout_of((), "fsdp:2", (Shard(0),))


def test_nothing_is_held_of_a_tensor_without_elements() -> None:
    layout = layout_of((0, 4), "fsdp:2", (Shard(1),))
    assert layout.part(1).shape == (0, 2)
    assert layout.part(1).is_empty
    assert (layout.shares(1), list(layout.distinct_ranks()), layout.first_rank) == ((), [], 0)


@pytest.mark.parametrize(
    ("shape", "strategy", "placements", "where"),
    [
        ((4,), "tp:2", (), ""),
        ((4,), "single", (Shard(0),), ""),
        ((4,), "ddp:2,tp:2", (WHOLE, Shard(1)), "axis tp"),
        ((4,), "tp:2", (Owner(2),), "axis tp"),
        ((4,), "tp:2", (Stage(2),), "axis tp"),
        ((4,), "tp:2", (Shard(0, (3, 2)),), "axis tp"),
        ((5,), "tp:2", (Shard(0, None, 2),), "axis tp"),
        ((6,), "tp:4", (Shard(0, None, 2),), "axis tp"),
        ((4,), "tp:2", ("shard(0)",), "axis tp"),
        ((-1,), "single", (), ""),
    ],
)
def test_a_wrong_placement_is_refused_and_the_axis_named(
    shape: tuple[int, ...], strategy: str, placements: tuple[Placement, ...], where: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        layout_of(shape, strategy, placements)
    assert caught.value.where == where


def test_a_rank_off_the_mesh_holds_no_part() -> None:
    with pytest.raises(StrategyError):
        layout_of((4,), "tp:2", (Shard(0),)).part(2)


def test_a_layout_is_cached_and_travels() -> None:
    layout = layout_of([8, 2], "tp:2", [Shard(0)])
    assert layout is layout_of((8, 2), Strategy.of("tp:2"), (Shard(0),))
    assert layout.part(1) is layout.part(1)
    assert pickle.loads(pickle.dumps(layout)) == layout == copy.deepcopy(layout)


@pytest.mark.parametrize(
    "placements",
    [
        (WHOLE, Strided(0), Shard(0)),
        (WHOLE, Shard(0), Shard(1)),
        (WHOLE, Owner(1000), Shard(0, (4096, 1024, 1024), 128)),
        (WHOLE, Strided(0), Shard(0, (4096, 2048, 2048), 128)),
    ],
)
def test_thousands_of_ranks_cost_milliseconds(placements: tuple[Placement, ...]) -> None:
    rows = 6144 if isinstance(placements[1], Owner) else 8192
    start = time.process_time()
    layout = layout_of((rows, 4096), "ddp:2,fsdp:1024,tp:4", placements)
    for rank in range(4001, 8192, 512):
        layout.part(rank)
        layout.replicas(rank)
    _ = layout.edges
    assert time.process_time() - start < 0.25


def test_a_dim_cut_for_every_rank_is_still_quick() -> None:
    start = time.process_time()
    layout = layout_of((2**20, 8), "fsdp:8192", (Shard(0),))
    assert len(layout.edges[0]) == 8191
    assert layout.part(8191).boxes[0].offset == (2**20 - 128, 0)
    assert time.process_time() - start < 0.25
