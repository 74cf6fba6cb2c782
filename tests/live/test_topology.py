"""From lines of ranks to a strategy, and what its axes then cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptkit.errors import LayoutError, StrategyError
from ckptkit.live.state.entries import Line, SharedOut, dtensor_lines
from ckptkit.live.state.topology import Topology
from ckptkit.model import Box, Owner, Shard


def line(kind: str, first: int, step: int, count: int, name: str = "") -> Line:
    """Evenly spaced ranks."""
    return Line(kind, tuple(range(first, first + step * count, step)), name)


@pytest.mark.parametrize(
    ("size", "rank", "groups", "written"),
    [
        (1, 0, [], "single"),
        (4, 2, [], "ddp:4"),
        (4, 1, [line("ddp", 0, 1, 4)], "ddp:4"),
        (4, 1, [line("fsdp", 0, 1, 4), line("ddp", 0, 1, 4)], "fsdp:4"),
        (4, 1, [line("ddp", 0, 1, 4), line("zero1", 0, 1, 4)], "zero1:4"),
        (8, 5, [line("tp", 4, 1, 2)], "ddp:4,tp:2"),
        (8, 5, [line("tp", 4, 1, 2), line("fsdp", 1, 2, 4)], "fsdp:4,tp:2"),
        (8, 5, [line("pp", 1, 4, 2)], "pp:2,ddp:4"),
        (8, 5, [line("tp", 4, 1, 2), line("pp", 1, 4, 2)], "pp:2,ddp:2,tp:2"),
        (8, 5, [line("fsdp", 5, 2, 2), line("pp", 1, 4, 2)], "pp:2,fsdp:2,ddp:2"),
        (4, 3, [line("ddp", 1, 2, 2, "replicate"), line("fsdp", 2, 1, 2, "shard")], None),
        (1, 0, [line("fsdp", 0, 1, 1)], "fsdp:1"),
        (4, 0, [line("ddp", 0, 2, 2, "pp"), line("fsdp", 0, 1, 2)], "pp:2,fsdp:2"),
        # Lines inside of lines: the axes are those that all of them are made of.
        (
            8,
            5,
            [line("fsdp", 0, 1, 8), line("fsdp", 1, 2, 4, "efsdp"), line("ep", 4, 1, 2)],
            "efsdp=fsdp:4,ep:2",
        ),
        (8, 5, [line("tp", 4, 1, 2), line("fsdp", 4, 1, 4)], "ddp:2,fsdp:2,tp:2"),
        (8, 5, [line("fsdp", 0, 1, 8), line("fsdp", 1, 2, 4)], "fsdp:4,ep:2"),
        (
            8,
            0,
            [
                line("fsdp", 0, 2, 4),
                line("tp", 0, 1, 2),
                line("ep", 0, 1, 4),
                line("fsdp", 0, 4, 2),
            ],
            "fsdp:2,ep:2,tp:2",
        ),
        (4, 0, [line("ddp", 0, 1, 4), line("ep", 0, 1, 2)], "ddp:2,ep:2"),
    ],
)
def test_groups_span_a_mesh(size: int, rank: int, groups: list[Line], written: str | None) -> None:
    found = str(Topology.of(rank, size, groups).strategy)
    assert found == (written or "replicate=ddp:2,shard=fsdp:2")


def test_ranks_that_only_fill_a_gap_are_not_known_to_hold_the_same() -> None:
    known = Topology.of(0, 4, [line("tp", 0, 1, 2), line("ddp", 0, 2, 2)])
    assumed = Topology.of(0, 4, [line("tp", 0, 1, 2)])
    assert known.strategy == assumed.strategy
    assert known.replicas == {"ddp"}
    assert not assumed.replicas


@pytest.mark.parametrize(
    "groups",
    [
        [line("tp", 0, 1, 3)],
        [line("fsdp", 1, 1, 2)],
        [line("tp", 0, 2, 2), line("fsdp", 0, 3, 2)],
    ],
)
def test_groups_that_are_no_lines_of_one_mesh_are_refused(groups: list[Line]) -> None:
    with pytest.raises(StrategyError, match="do not span a mesh of 8 ranks"):
        Topology.of(0, 8, groups)


def test_only_what_nothing_cuts_is_known_to_hold_the_same() -> None:
    known = Topology.of(0, 4, [line("ddp", 0, 1, 4), line("ep", 0, 1, 2)])
    assert known.replicas == {"ddp"}


def test_one_rank_of_a_line_owns_along_each_axis_of_it() -> None:
    lines = [line("zero1", 0, 1, 8), line("ep", 0, 1, 2)]
    topology = Topology.of(0, 8, lines)
    ranks = tuple(range(8))
    one_of_them = topology.of_shared("x", SharedOut(ranks, (3,), owner=5))
    assert one_of_them == {"zero1": Owner(2), "ep": Owner(1)}
    assert topology.of_shared("x", SharedOut(ranks, (16,))) == {"zero1": Shard(0), "ep": Shard(0)}
    with pytest.raises(LayoutError, match="17 rows over 8 ranks"):
        topology.of_shared("x", SharedOut(ranks, (17,)))


def factors(draw: st.DrawFn, size: int) -> list[int]:
    """Numbers greater than one whose product is a size."""
    found = []
    while size > 1:
        found.append(draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0])))
        size //= found[-1]
    return found


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], list[Any], list[int]]]]:
    """A number of ranks, and the meshes, placements and shapes of a few tensors."""
    world = draw(st.sampled_from([4, 6, 8, 12]))
    found = []
    outer = draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    for _ in range(draw(st.integers(2, 3))):
        # All cut the same numbers, so that many have a common mesh.
        sizes = [*factors(draw, outer), *factors(draw, world // outer)]
        if draw(st.booleans()):
            sizes = [world]
        shape = draw(st.lists(st.one_of(st.integers(1, 40), st.just(24)), min_size=1, max_size=2))
        places: list[Any] = []
        for _ in sizes:
            dim = draw(st.integers(0, len(shape) - 1))
            factor = draw(st.sampled_from([1, 2, 2, 3, 4]))
            strided = _StridedShard(dim, split_factor=factor)
            places.append(draw(st.sampled_from([TorchReplicate(), TorchShard(dim), strided])))
        found.append((sizes, places, shape))
    return world, found


@given(layouts(), st.data())
def test_the_axes_cut_as_torch_does(
    job: tuple[int, list[tuple[list[int], list[Any], list[int]]]], data: st.DataObject
) -> None:
    world, described = job
    ranks = {0, world - 1, data.draw(st.integers(0, world - 1))}
    strategies = set()
    for rank in sorted(ranks):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            tensors = []
            for sizes, places, shape in described:
                whole = torch.arange(math.prod(shape)).reshape(shape)
                mesh = DeviceMesh("cpu", torch.arange(world).reshape(sizes))
                tensors.append((whole, distribute_tensor(whole, mesh, places, src_data_rank=None)))
            try:
                groups = dtensor_lines([tensor for _, tensor in tensors])
                topology = Topology.of(rank, world, groups)
            except StrategyError as error:
                assert "do not span" in str(error)  # noqa: PT017
                return
            strategies.add(str(topology.strategy))
            for whole, tensor in tensors:
                size, local = tuple(whole.shape), tensor.to_local()
                strided = any(isinstance(place, _StridedShard) for place in tensor.placements)
                if strided and any(length % world for length in size):
                    continue  # torch's own strided pieces are then not those that FSDP2 makes
                try:
                    placements, _, own = topology.of_dtensor("x", tensor)
                except LayoutError as error:
                    assert "has two readings" in str(error)  # noqa: PT017
                    continue
                part = own or topology.part("x", size, placements)
                mine = torch.empty(part.shape, dtype=torch.int64)
                for box, place in zip(part.boxes, part.places, strict=True):
                    mine[place.within(Box.whole(part.shape))] = whole[box.within(Box.whole(size))]
                assert torch.equal(mine.flatten(), local.flatten()), (tensor, topology.strategy)
        finally:
            dist.destroy_process_group()
    assert len(strategies) == 1


def test_ranks_that_are_not_evenly_spaced_are_refused() -> None:
    with pytest.raises(StrategyError, match="not evenly spaced"):
        Line("fsdp", (0, 1, 3))
