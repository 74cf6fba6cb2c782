"""Where every request is a round trip: how few there are, and how large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, Strategy
from ckptkit.checkpoint.workers import Pace, asked_in_threads
from ckptkit.errors import CkptkitError, CorruptionError, FormatError, NotFoundError
from ckptkit.model import Box, layout_of, parse_placement
from ckptkit.storage import MemoryStore, Store
from tests.checkpoint.remote import MIB, RemoteStore
from tests.checkpoint.saving import Tensor, memory_with, random_values, same, save

STATE = {
    f"model/{layer}.{name}": Tensor(random_values(shape, seed=layer), {"tp": cut})
    for layer in range(2)
    for name, shape, cut in (
        ("q", (1024, 1024), "shard(0)"),
        ("o", (1024, 1024), "shard(1)"),
        ("down", (1024, 2752), "shard(1)"),
        ("norm", (1024,), "replicate"),
    )
}


@pytest.fixture(scope="module")
def made() -> RemoteStore:
    """A run with a step of four ranks."""
    store = RemoteStore()
    save(store, STATE, strategy="tp:4", chunk_bytes=256 << 10)
    return store


@pytest.fixture
def remote(made: RemoteStore) -> RemoteStore:
    """The same run, nothing asked yet."""
    return RemoteStore(made.behind)


def test_a_run_is_opened_with_two_requests_and_a_step_with_one(remote: RemoteStore) -> None:
    ckptkit.open(remote).close()
    assert remote.operations == {"children": 1, "read_whole": 1}
    save("memory://requests", {"w": Tensor(random_values((4,)))})
    step = RemoteStore(ckptkit.open_store("memory://requests/step-0000000001"))
    ckptkit.open(step).close()
    assert step.operations == {"read_whole": 1}


def test_the_ends_of_a_large_manifest_are_looked_at_before_it_is_fetched(
    remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "step-0000000001/manifest.msgpack"
    store = RemoteStore(memory_with({e.key: remote.read(e.key) for e in remote.list()}))
    good = remote.read(key)
    monkeypatch.setattr("ckptkit.checkpoint.places._AT_ONCE", len(good) - 1)
    with ckptkit.open(store) as checkpoint:
        assert sorted(checkpoint.arrays) == sorted(STATE)
    (info,) = Run(store).listing()
    assert (info.strategy, info.problem) == ("tp:4", "")
    store.reset()
    for bad in (bytes(len(good)), good[:-5] + bytes(5)):
        store.behind.put(key, bad)
        with pytest.raises(FormatError):
            ckptkit.open(store)
        (info,) = Run(store).listing()
        assert info.committed
        assert info.problem
    assert store.bytes_read <= 4 * (4096 + 5)


def test_the_newest_committed_step_is_looked_for_from_the_newest(remote: RemoteStore) -> None:
    begun = {"step-0000000005/data/x/rank-00000.zip": b"x"}
    store = RemoteStore(memory_with({e.key: remote.read(e.key) for e in remote.list()} | begun))
    with ckptkit.open(store) as checkpoint:
        assert checkpoint.step == 1
    assert store.operations == {"children": 1, "read_whole": 1}
    store.reset()
    assert Run(store).latest() == 1
    assert store.operations == {"children": 1, "size": 1}


@pytest.mark.parametrize(
    "objects",
    [
        {},
        {"other/file": b"x"},
        {"step-0000000005/data/x/rank-00000.zip": b"x"},
        {"data/x/rank-00000.zip": b"x"},
        {"data/x/rank-00000.zip": b"x", "manifest.msgpack": b""},
    ],
    ids=["nothing", "others", "begun", "step", "empty"],
)
def test_what_is_no_checkpoint_is_told_as_it_is_of_a_folder(objects: dict[str, bytes]) -> None:
    told = []
    for store in (memory_with(objects), RemoteStore(memory_with(objects))):
        with pytest.raises(NotFoundError) as caught:
            ckptkit.open(store)
        told.append((type(caught.value), caught.value.what, caught.value.hint))
    assert told[0] == told[1]


def test_a_commit_reads_each_pack_once_and_asks_for_no_size_and_no_listing() -> None:
    store = RemoteStore()
    save(store, STATE, strategy="tp:4")
    assert store.operations["read"] == 4
    assert store.operations["size"] == 0
    assert store.operations["list"] == 0
    assert store.operations["put"] == 1


def test_tails_are_read_side_by_side_and_never_far_ahead() -> None:
    asked: list[int] = []

    def ask(number: int) -> int:
        asked.append(number)
        return number

    answers = asked_in_threads(ask, range(100), 4)
    assert [next(answers) for _ in range(10)] == list(range(10))
    assert len(asked) <= 10 + 8
    assert list(answers) == list(range(10, 100))


def test_an_error_ends_the_asking() -> None:
    def ask(number: int) -> int:
        if number == 3:
            raise NotFoundError("gone")
        return number

    with pytest.raises(NotFoundError):
        list(asked_in_threads(ask, range(1000), 2))


def test_the_steps_of_a_run_are_listed_with_one_request_each(remote: RemoteStore) -> None:
    manifest = remote.behind.read("step-0000000001/manifest.msgpack")
    objects = {f"step-{number:010d}/manifest.msgpack": manifest for number in range(20)}
    store = RemoteStore(memory_with(objects))
    assert Run(store).steps() == list(range(20))
    assert store.operations == {"children": 1, "size": 20}


def parts_of(store: RemoteStore, to: str, *, verify: bool) -> tuple[int, int]:
    """The bytes that the ranks of another strategy need, and the reads they made of them."""
    strategy, needed = Strategy.parse(to), 0
    with ckptkit.open(store) as checkpoint:
        store.reset()
        for rank in range(strategy.world_size):
            wanted = []
            for name, tensor in STATE.items():
                cut = [parse_placement("shard(0)")]
                for box in layout_of(tensor.whole.shape, strategy, cut).part(rank).boxes:
                    wanted.append((name, box, np.empty(box.shape, tensor.whole.dtype)))
                    needed += wanted[-1][2].nbytes
            checkpoint.read_many(wanted, verify=verify)
            for name, box, values in wanted:
                whole = STATE[name].whole
                assert same(values, whole[box.within(Box.whole(whole.shape))])
    return needed, store.operations["read_into"]


@pytest.mark.parametrize("verify", [True, False])
def test_a_resharded_load_reads_little_more_than_it_needs_in_few_requests(
    remote: RemoteStore, verify: bool
) -> None:
    needed, reads = parts_of(remote, "fsdp:2", verify=verify)
    assert remote.bytes_read <= 1.05 * needed
    chunks = needed // (256 << 10)
    assert reads <= chunks / 3


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (1024, 2752)),
        Box((100, 0), (300, 2752)),
        Box((0, 100), (1024, 500)),
        Box((0, 2000), (1024, 5)),
        Box((513, 1377), (2, 3)),
    ],
    ids=str,
)
def test_any_slice_reads_little_more_than_from_a_file(
    remote: RemoteStore, box: Box, verify: bool
) -> None:
    plain = RemoteStore(remote.behind)
    plain._abilities = remote.behind.abilities
    for store in (plain, remote):
        with ckptkit.open(store) as checkpoint:
            store.reset()
            values = checkpoint.read("model/1.down", box, verify=verify)
        assert same(values, STATE["model/1.down"].whole[box.within(Box.whole((1024, 2752)))])
    assert remote.bytes_read <= 1.15 * plain.bytes_read
    assert remote.operations["read_into"] <= plain.operations["read_into"]


def test_chunks_side_by_side_are_not_read_row_by_row() -> None:
    # Eight columns of chunks, which a file system gives some rows of each at a time.
    values = random_values((4096, 4096))
    store = RemoteStore()
    save(store, {"w": Tensor(values, {"tp": "shard(1)"})}, strategy="tp:2", chunk_bytes=16 << 20)
    with ckptkit.open(store) as checkpoint:
        store.reset()
        assert same(checkpoint.read("w"), values)
    assert store.operations["read_into"] <= 16


def test_many_requests_are_under_way_at_a_time(remote: RemoteStore) -> None:
    remote.pause = 0.02
    small_requests(remote)
    with ckptkit.open(remote) as checkpoint:
        checkpoint.read("model/1.down")
    assert 8 <= remote.at_once <= 16


def small_requests(remote: RemoteStore) -> None:
    remote._abilities = replace(remote.abilities, request_bytes=256 << 10)


def test_a_missing_or_short_pack_is_told_by_the_read_as_it_is_by_opening_a_file(
    remote: RemoteStore,
) -> None:
    objects = {e.key: remote.behind.read(e.key) for e in remote.list()}
    pack = next(key for key in objects if key.endswith("rank-00002.zip"))
    for damage in ({}, {pack: objects[pack][:5000]}):
        damaged = {key: data for key, data in objects.items() if key != pack} | damage
        told = []
        for store in (memory_with(damaged), RemoteStore(memory_with(damaged))):
            with ckptkit.open(store) as checkpoint, pytest.raises(CorruptionError) as caught:
                checkpoint.read("model/1.down")
            told.append((caught.value.what, caught.value.hint, caught.value.where[-20:]))
        assert told[0] == told[1]


@pytest.mark.parametrize("kind", [MemoryStore, RemoteStore])
def test_a_step_that_goes_while_it_is_read_is_not_called_damaged(
    kind: Callable[[], Store],
) -> None:
    store = kind()
    state = {"w": Tensor(random_values((8,)))}
    ways: dict[str, Callable[[], object]] = {
        "overwritten": lambda: save(store, state, overwrite=True),
        "deleted": lambda: Run(store).delete([1]),
    }
    for how, go in ways.items():
        save(store, state, overwrite=True)
        with ckptkit.open(store) as checkpoint:
            go()
            with pytest.raises(NotFoundError, match=f"{how} while it was read") as caught:
                checkpoint.read("w")
        assert caught.value.where.endswith("step-0000000001")
        assert "open it again" in caught.value.hint


def test_all_that_reads_finds_what_is_damaged(remote: RemoteStore) -> None:
    objects = {e.key: remote.behind.read(e.key) for e in remote.list()}
    pack = next(key for key in objects if key.endswith("rank-00001.zip"))
    data = bytearray(objects[pack])
    data[len(data) // 2] ^= 1
    store = RemoteStore(memory_with(objects | {pack: bytes(data)}))
    assert [finding.kind for finding in ckptkit.verify(store)] == ["corrupt"]
    with pytest.raises(CkptkitError):
        ckptkit.digest(store)
    with pytest.raises(CkptkitError):
        ckptkit.diff(remote, store)
    assert ckptkit.verify(remote) == []
    assert ckptkit.diff(remote, remote).same
    assert ckptkit.digest(remote) == ckptkit.digest(remote.behind)


def test_verifying_reads_each_byte_about_once_in_large_requests(remote: RemoteStore) -> None:
    total = sum(entry.size for entry in remote.behind.list())
    # One request a pack: longer than it takes to begin with the next one, also under load.
    remote.pause = 0.2
    assert ckptkit.verify(remote) == []
    assert remote.bytes_read <= 1.1 * total + 4 * (256 << 10)
    assert remote.at_once > 1
    assert remote.requests <= 40


def test_a_digest_has_some_requests_under_way_within_its_memory(remote: RemoteStore) -> None:
    remote.pause = 0.01
    small_requests(remote)
    ckptkit.digest(remote, memory="64MiB", threads=2)
    assert remote.at_once > 2
    with pytest.raises(ckptkit.CkptkitError, match="32 MiB are needed"):
        ckptkit.digest(remote, memory="16MiB")


def test_zarr_reads_what_is_far_away(remote: RemoteStore) -> None:
    with ckptkit.open(remote) as checkpoint:
        array: Any = checkpoint.zarr["model/1.q"]
        assert same(np.asarray(array[100:200, :]), STATE["model/1.q"].whole[100:200])


def test_a_pace_stays_within_memory() -> None:
    store = RemoteStore()
    whole = Pace.of(store)
    assert (whole.requests, whole.request_bytes, whole.by_request) == (16, 16 * MIB, True)
    for memory in (1 * MIB, 5 * MIB, 16 * MIB, 100 * MIB, 1024 * MIB):
        held = Pace.of(store, memory)
        assert held.nbytes <= max(memory, 2 * MIB)
        assert held.gap_bytes * 32 <= held.request_bytes
    # Many good ones before few large ones.
    for memory, requests, size in (
        (1024, 16, 16),
        (384, 16, 12),
        (256, 16, 8),
        (48, 3, 8),
        (8, 1, 4),
    ):
        held = Pace.of(store, memory * MIB)
        assert (held.requests, held.request_bytes) == (requests, size * MIB)
    little = Pace.of(RemoteStore(), 4 * MIB)
    assert (little.requests, little.request_bytes) == (1, 2 * MIB)
    assert Pace.of(store).shared(4).requests == 4
    assert Pace.of(store).shared(64).requests == 1
    local = Pace.of(MemoryStore(), 1)
    assert (local.request_bytes, local.by_request, local.nbytes) == (2 * MIB, False, 0)


def test_a_lost_answer_to_the_commit_is_read_back_and_nothing_is_put_again() -> None:
    count = 0

    class Lost(RemoteStore):
        """The manifest arrives, and the answer does not."""

        def put(
            self, key: str, data: bytes | bytearray | memoryview, *, exclusive: bool = False
        ) -> None:
            nonlocal count
            count += 1
            super().put(key, data, exclusive=exclusive)
            super().put(key, data, exclusive=exclusive)

    store = Lost()
    save(store, STATE, strategy="tp:4")
    assert count == 1
    assert ckptkit.verify(store) == []
