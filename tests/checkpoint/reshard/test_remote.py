"""Resharding where every request is a round trip."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import ckptkit
from ckptkit.checkpoint.places import stores_at
from ckptkit.checkpoint.reshard import engines
from ckptkit.checkpoint.reshard.engines import Task
from ckptkit.checkpoint.reshard.target import Budget, ReshardOptions
from ckptkit.storage import Address, LocalStore, Location, MemoryStore
from ckptkit.storage.base.store import piece_size
from tests.checkpoint.remote import MIB, RemoteStore
from tests.checkpoint.reshard.toy import assert_same_state, reshard, save_toy, saved
from tests.checkpoint.saving import Tensor, contents, memory_with, random_values, save

CUTS = {"rules": [{"match": "*", "tp": "shard(1)"}]}


@pytest.fixture(scope="module")
def large() -> RemoteStore:
    """A step of 64 MiB in one pack."""
    store = RemoteStore()
    state = {f"model/w{n}": Tensor(random_values((1024, 2048), seed=n)) for n in range(8)}
    save(store, state, chunk_bytes=1 << 20)
    return store


def test_the_pieces_of_a_huge_pack_have_the_memory_that_they_are_sent_from() -> None:
    huge = 200 << 30
    places = MemoryStore(), RemoteStore()
    budget = Budget.of(183 * MIB, 1, *places, largest=0, pack_bytes=huge)
    assert piece_size(huge, 16 * MIB) == 23 * MIB
    assert budget.sink_bytes == 46 * MIB


@pytest.mark.parametrize("to", ["tp:4", "fsdp:3", "single"])
def test_the_same_bytes_come_out_as_in_a_file_system(to: str) -> None:
    source, destination, plain = RemoteStore(saved("fsdp:3")), RemoteStore(), MemoryStore()
    reshard(saved("fsdp:3"), plain, to)
    reshard(source, destination, to)
    assert contents(destination.behind) == contents(plain)
    with ckptkit.open(destination) as checkpoint:
        assert_same_state(checkpoint)


def test_each_byte_is_read_once_in_few_requests_many_at_a_time(large: RemoteStore) -> None:
    source, destination = RemoteStore(large.behind), RemoteStore()
    source.pause = 0.01
    done = ckptkit.reshard(source, destination, to="tp:4", rules=CUTS)
    total = sum(entry.size for entry in large.behind.list())
    assert done.committed
    assert source.bytes_read <= 1.05 * total
    with ckptkit.open(large) as checkpoint:
        assert source.operations["read_into"] <= len(checkpoint.manifest.pack)
    assert source.at_once > 4
    assert ckptkit.verify(destination) == []


def test_sinks_are_told_what_they_may_keep(large: RemoteStore) -> None:
    destination = RemoteStore()
    plan = ckptkit.plan_reshard(large, destination, to="tp:4", rules=CUTS, memory="512MiB")
    ckptkit.reshard(large, destination, to="tp:4", rules=CUTS, memory="512MiB")
    packs = destination.sinks[:4]
    assert packs == [64 * MIB] * 4
    assert plan.memory <= 512 * MIB


def budget(memory: int, pack_bytes: int = 0) -> Budget:
    stores = RemoteStore(), RemoteStore()
    return Budget.of(memory, 4, *stores, largest=4 * MIB, pack_bytes=pack_bytes)


@pytest.mark.parametrize("memory", [192, 256, 512, 1024, 4096])
def test_what_is_under_way_counts_as_memory(memory: int) -> None:
    found = budget(memory * MIB)
    batches = found.workers * 3 * found.batch_bytes
    assert batches + found.under_way + 24 * MIB <= memory * MIB
    assert found.under_way <= memory * MIB // 2
    assert found.pace.nbytes * found.workers <= found.whole_pace.nbytes


def test_with_little_memory_one_pack_is_written_at_a_time_and_less_asked_for_at_once() -> None:
    little, much = budget(160 * MIB), budget(2048 * MIB)
    assert little.packs == 1
    assert much.packs == 2
    assert little.whole_pace.nbytes < much.whole_pace.nbytes
    with pytest.raises(ckptkit.CkptkitError, match="too little memory"):
        budget(64 * MIB)


def test_the_parts_of_very_large_packs_are_larger_and_count_so() -> None:
    found = budget(1 << 30, pack_bytes=1 << 40)
    assert found.packs == 1
    assert found.sink_bytes is not None
    assert found.sink_bytes // 2 * 9000 >= 1 << 40


def test_files_need_no_memory_besides(tmp_path: Path) -> None:
    local = LocalStore(Location.parse(tmp_path))
    assert Budget.of(1 << 30, 2, local, local, largest=MIB).under_way == 0


def test_an_unfinished_looking_pack_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object) -> None:
        raise AssertionError("nobody can still be writing what can be seen")

    monkeypatch.setattr(engines, "_wait_until_quiet", wait)
    whole = RemoteStore()
    reshard(saved("fsdp:3"), whole, "tp:4")
    objects = contents(whole.behind)
    del objects["step-0000000007/manifest.msgpack"]
    packs = sorted(key for key in objects if key.endswith(".zip"))
    objects[packs[1]] = objects[packs[1]][:-9]
    again = RemoteStore(memory_with(objects))
    done = reshard(saved("fsdp:3"), again, "tp:4")
    assert done.finished == (0, 2, 3)
    assert again.operations["sync"] == 0
    assert contents(again.behind) == contents(whole.behind)


def test_a_task_carries_credentials_and_shows_none(tmp_path: Path) -> None:
    secret = Address(Location.parse(tmp_path), {"secret_key": "hush-hush"})
    options = ReshardOptions(to="tp:2")
    task = Task(secret, "", "a", secret, "b", options, "", 0, budget(1 << 30))
    assert "hush" not in repr(task)
    assert "hush" not in str(task)
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert again.source.options["secret_key"] == "hush-hush"


def test_a_checkpoint_is_opened_again_with_the_options_it_was_opened_with(tmp_path: Path) -> None:
    save_toy(LocalStore(tmp_path), "fsdp:3")
    with ckptkit.open(tmp_path) as checkpoint, pickle.loads(pickle.dumps(checkpoint)) as again:
        assert again.location == checkpoint.location


def test_options_of_one_side_do_not_reach_the_other() -> None:
    seen = []

    def noted(place: object, options: object = None) -> object:
        seen.append((place, options))
        return RemoteStore()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptkit.checkpoint.places.open_store", noted)
        stores_at("a", "b", {"region": "x"}, None)
        stores_at("a", "b", {"region": "x"}, {"region": "y"})
        stores_at(RemoteStore(), "b", {"region": "x"}, None)
        stores_at("a", RemoteStore(), {"region": "x"}, None)
    assert [options for _, options in seen] == [
        {"region": value} for value in ("x", "x", "y", "x", "x", "x")
    ]
    with pytest.raises(ckptkit.CkptkitError, match="open already"):
        stores_at(RemoteStore(), RemoteStore(), None, {"region": "y"})


def test_small_steps_take_few_requests() -> None:
    source, destination = RemoteStore(saved("fsdp:3")), RemoteStore()
    reshard(source, destination, "single")
    # The manifest, and each of three packs: small enough to be read at once.
    assert source.operations["read_into"] <= 20
