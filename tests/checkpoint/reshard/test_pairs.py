"""Every strategy into every other: the same bits, and each rank's pack is what the rank needs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import ckptkit
from ckptkit import Strategy
from ckptkit.storage import MemoryStore
from tests.checkpoint.reshard.toy import (
    STRATEGIES,
    assert_packs_fit_ranks,
    assert_same_state,
    placed_once,
    reshard,
    saved,
    toy,
)
from tests.checkpoint.saving import same


def in_core(source: str, to: str) -> bool:
    """Whether every run tries this pair: each becomes itself and two that are far off."""
    return (STRATEGIES.index(source) - STRATEGIES.index(to)) % len(STRATEGIES) in (0, 4, 7)


@pytest.mark.parametrize(
    ("source", "to"),
    [
        pytest.param(source, to, marks=() if in_core(source, to) else pytest.mark.long)
        for source in STRATEGIES
        for to in STRATEGIES
    ],
)
def test_any_strategy_becomes_any_other(source: str, to: str) -> None:
    destination = MemoryStore()
    done = reshard(saved(source), destination, to)
    assert (done.step, done.committed, done.finished) == (7, True, ())
    with ckptkit.open(destination) as checkpoint:
        assert (checkpoint.step, checkpoint.strategy) == (7, Strategy.parse(to))
        assert_same_state(checkpoint)
        assert_packs_fit_ranks(checkpoint)
        rows = placed_once(to)
        assert {a.name: a.placements for a in checkpoint.manifest.arrays} == rows
    assert ckptkit.digest(destination) == ckptkit.digest(saved(source))
    assert not ckptkit.verify(destination)


@pytest.mark.parametrize(
    ("to", "name", "dim"),
    [
        ("fsdp:3", "model/embed", 0),
        ("fsdp:8", "optimizer/layers.1.up/exp_avg", 0),
        ("zero3:4", "model/layers.0.down", 0),
        ("tp:2", "model/layers.2.up", 0),
        ("tp:4", "optimizer/layers.0.down/exp_avg_sq", 1),
        ("tp:4", "model/embed", 0),
    ],
)
def test_parts_are_the_slices_that_numpy_makes(to: str, name: str, dim: int) -> None:
    destination = MemoryStore()
    reshard(saved("pp:2,tp:2"), destination, to)
    ranks, whole = int(to.partition(":")[2]), np.moveaxis(toy()[name].values, dim, 0)
    rows = -(-len(whole) // ranks)
    with ckptkit.open(destination) as checkpoint:
        for rank in range(ranks):
            expected = np.moveaxis(whole[rank * rows : (rank + 1) * rows], 0, dim)
            boxes = checkpoint[name].part(rank).boxes
            assert len(boxes) == (expected.size > 0)
            for box in boxes:
                assert same(checkpoint.read(name, box), np.ascontiguousarray(expected))


def test_the_source_is_only_read() -> None:
    store = saved("fsdp:8")
    before = {entry.key: store.read(entry.key) for entry in store.list()}
    reshard(store, MemoryStore(), "tp:4")
    assert {entry.key: store.read(entry.key) for entry in store.list()} == before


def test_a_way_through_many_strategies_ends_where_it_began() -> None:
    runs = [saved("tp:2,fsdp:2")]
    for to in ("pp:2", "zero1:3", "fsdp:8", "ddp:2", "fsdp:2,tp:3", "tp:2,fsdp:2"):
        runs.append(MemoryStore())
        for source, destination in pairwise(runs[-2:]):
            reshard(source, destination, to)
    with ckptkit.open(runs[-1]) as checkpoint:
        assert_same_state(checkpoint)


def test_the_same_strategy_gets_the_same_chunks() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:8"), destination, "fsdp:8", chunk_bytes=256)
    with ckptkit.open(destination) as copy, ckptkit.open(saved("fsdp:8")) as source:
        assert copy.manifest.arrays == source.manifest.arrays
        assert copy.manifest.crc32.tolist() == source.manifest.crc32.tolist()
