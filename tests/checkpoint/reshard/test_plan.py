"""The plan says what will happen, and that is what happens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.reshard.toy import RULES, STRATEGIES, reshard, save_toy, saved
from tests.storage.counting import CountingStore


@pytest.mark.parametrize("to", ["single", "tp:4", "fsdp:8", "ddp:2", "pp:2,tp:2", "zero1:3"])
@pytest.mark.parametrize("source", ["single", "fsdp:8", "tp:4", "fsdp:3", "pp:2,tp:2,fsdp:2"])
def test_the_plan_foresees_what_is_read_and_written(
    source: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Chunks that lie beside each other are read together, with what is between them.
    monkeypatch.setattr("ckptkit.checkpoint.read.reader.WIDEST_GAP", 0)
    monkeypatch.setattr("ckptkit.checkpoint.reshard.copy.READ_ALONG", 0)
    counting, destination = CountingStore(saved(source)), MemoryStore()
    plan = ckptkit.plan_reshard(counting, destination, to=to, rules=RULES)
    assert not destination.list()
    counting.reset()
    reshard(counting, destination, to)
    # What several ranks share of a fused tensor may be next to what its writer has of its own.
    most = 4 if "tp" in to else 0
    manifest = counting.size("step-0000000007/manifest.msgpack")
    assert 0 <= plan.requests - counting.operations["read_into"] <= most
    assert 0 <= plan.bytes_read - (counting.bytes_read - manifest) <= most * 256
    with ckptkit.open(destination) as checkpoint:
        packs = np.bincount(
            checkpoint.manifest.pack, checkpoint.manifest.length, len(plan.bytes_by_rank)
        )
        assert plan.chunks == len(checkpoint.manifest.pack)
        assert plan.bytes_written == pytest.approx(packs.sum(), abs=len(packs))
        assert plan.files == len(destination.list()) - bool(checkpoint_has_groups(destination))


def checkpoint_has_groups(store: MemoryStore) -> bool:
    return any(entry.key.endswith("groups.zip") for entry in store.list())


@pytest.mark.parametrize("to", STRATEGIES)
def test_sharded_bytes_are_foreseen_rank_by_rank(to: str) -> None:
    destination = MemoryStore()
    plan = ckptkit.plan_reshard(saved("fsdp:8"), destination, to=to, rules=RULES)
    reshard(saved("fsdp:8"), destination, to)
    with ckptkit.open(destination) as checkpoint:
        manifest = checkpoint.manifest
        found = np.bincount(manifest.pack, manifest.length, len(plan.bytes_by_rank))
        # What ranks share is planned in equal shares, and written in whole chunks.
        largest = float(manifest.length.max())
        streams = len({array.placements for array in manifest.arrays})
        assert np.abs(found - plan.bytes_by_rank).max() <= largest * streams


def test_a_dry_run_with_a_probe_leaves_nothing(tmp_path: Path) -> None:
    destination = tmp_path / "b"
    plan = ckptkit.plan_reshard(saved("fsdp:3"), destination, to="tp:2", rules=RULES, probe=True)
    assert plan.seconds is not None
    assert plan.seconds > 0
    assert not destination.exists()


def test_chunks_go_over_as_they_are_where_the_borders_fit(tmp_path: Path) -> None:
    source, destination = LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b")
    values = np.random.default_rng(1).random((1024, 4096), np.float32)
    with ckptkit.Writer(source, step=1) as writer:
        writer.add("model/up", values, role="param")
    rules = {"rules": [{"match": "up", "tp": "shard(1)"}]}
    plan = ckptkit.plan_reshard(source, destination, to="tp:4", rules=rules)
    assert plan.arrays[0].is_kept
    assert plan.read_amplification == 1
    ckptkit.reshard(source, destination, to="tp:4", rules=rules)
    with ckptkit.open(source) as before, ckptkit.open(destination) as after:
        assert after.manifest.arrays[0].grid == before.manifest.arrays[0].grid
        assert after.manifest.crc32.tolist() == before.manifest.crc32.tolist()


def test_finished_packs_are_in_the_plan(tmp_path: Path) -> None:
    source, destination = tmp_path / "a", tmp_path / "b"
    save_toy(LocalStore(source), "fsdp:3")
    reshard(source, destination, "tp:4", engine="slice:1/4")
    plan = ckptkit.plan_reshard(source, destination, to="tp:4", rules=RULES)
    assert plan.finished == (1,)
