"""From lines of ranks to a strategy; no process group is needed for that."""

from __future__ import annotations

import pytest

from ckptkit.errors import StrategyError
from ckptkit.live.groups import Group
from ckptkit.live.topology import Topology
from ckptkit.live.world import World


def line(kind: str, first: int, step: int, count: int, name: str = "") -> Group:
    """Evenly spaced ranks."""
    return Group(kind, tuple(range(first, first + step * count, step)), name)


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
    ],
)
def test_groups_span_a_mesh(size: int, rank: int, groups: list[Group], written: str | None) -> None:
    found = str(Topology.of(World(rank, size), groups).strategy)
    assert found == (written or "replicate=ddp:2,shard=fsdp:2")


def test_ranks_that_only_fill_a_gap_are_not_known_to_hold_the_same() -> None:
    known = Topology.of(World(0, 4), [line("tp", 0, 1, 2), line("ddp", 0, 2, 2)])
    assumed = Topology.of(World(0, 4), [line("tp", 0, 1, 2)])
    assert known.strategy == assumed.strategy
    assert known.replicas == {"ddp"}
    assert not assumed.replicas


@pytest.mark.parametrize(
    "groups",
    [
        [line("tp", 0, 1, 2), line("fsdp", 0, 1, 4)],
        [line("tp", 0, 1, 3)],
        [line("tp", 0, 2, 2), line("fsdp", 0, 3, 2)],
    ],
)
def test_groups_that_are_no_lines_of_one_mesh_are_refused(groups: list[Group]) -> None:
    with pytest.raises(StrategyError, match="do not span a mesh of 8 ranks"):
        Topology.of(World(0, 8), groups)


def test_ranks_that_are_not_evenly_spaced_are_refused() -> None:
    with pytest.raises(StrategyError, match="not evenly spaced"):
        Group("fsdp", (0, 1, 3))
