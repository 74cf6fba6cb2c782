"""Pruning where unfinished uploads are seen by no listing, and another clock stamps objects."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest

from ckptkit import Run
from ckptkit.errors import NotFoundError
from ckptkit.storage import Stored
from tests.checkpoint.remote import RemoteStore
from tests.checkpoint.saving import Tensor, random_values, save

STATE = {"model/w": Tensor(random_values((8, 4)), {"fsdp": "shard(0)"})}
NAME = ".tmp-0123456789abcde"


@pytest.fixture
def run() -> RemoteStore:
    """Steps 1 to 3, and an upload of a fourth of which nothing can be seen."""
    store = RemoteStore()
    for step in (1, 2, 3):
        save(store, STATE, strategy="fsdp:2", step=step)
    store.reset()
    store.deleted.clear()
    return store


def upload(step: int, number: int, age: float) -> Stored:
    return Stored(f"step-{step:010d}/data/x/{NAME}{number}", 7, time.time() - age)


def test_uploads_are_asked_for_once_and_grouped_by_step(run: RemoteStore) -> None:
    run.left = [upload(4, 1, 9999), upload(4, 2, 9999), upload(2, 3, 9999), upload(2, 4, 10)]
    removed = Run(run).prune()
    assert [(it.kind, it.step, it.nbytes) for it in removed] == [
        ("leftover", 2, 7),
        ("leftover", 4, 7),
        ("leftover", 4, 7),
    ]
    assert [entry.key for entry in run.left] == [f"step-0000000002/data/x/{NAME}4"]
    assert run.operations["leftovers"] <= 2
    assert Run(run).steps() == [1, 2, 3]


def test_all_uploads_go_with_one_deletion(run: RemoteStore) -> None:
    run.left = [upload(4, number, 9999) for number in range(9)]
    Run(run).prune(grace=0)
    assert [len(keys) for keys in run.deleted] == [9]


def test_what_is_no_part_of_a_step_is_left_alone(run: RemoteStore) -> None:
    run.left = [Stored(f"{NAME}1", 7, 0.0), Stored(f"elsewhere/{NAME}2", 7, 0.0)]
    assert Run(run).prune(grace=0) == []
    assert len(run.left) == 2


def test_the_manifest_of_a_step_goes_before_its_data(run: RemoteStore) -> None:
    removed = Run(run).prune(keep_last=1, grace=0)
    assert [it.step for it in removed] == [1, 2]
    assert [keys[0] for keys in run.deleted] == [
        "step-0000000001/manifest.msgpack",
        "step-0000000002/manifest.msgpack",
    ]
    assert all(len(keys) == 3 for keys in run.deleted)


@pytest.mark.parametrize("late", [7200.0, -7200.0])
def test_a_save_under_way_stays_whatever_the_server_takes_the_time_for(
    run: RemoteStore, late: float
) -> None:
    key = "step-0000000004/data/x/rank-00000.zip"
    run.behind.put(key, b"x")
    run.late = late
    assert Run(run).prune(grace=3600) == []
    assert run.behind.read(key) == b"x"
    assert not [entry for entry in run.behind.list() if "clock" in entry.key]
    assert [it.kind for it in Run(run).prune(grace=0)] == ["orphan"]


def test_clocks_that_were_left_go_with_the_next_one_and_nothing_else_does(run: RemoteStore) -> None:
    at = time.time()
    with patch("ckptkit.storage.time.time", lambda: at - 9999):
        for name in (f"clock/{7:016x}", "clock/my-notes.csv", f"clock/{8:016x}/x"):
            run.behind.put(name, b"now")
    run.behind.put("clock/of-another", b"now")
    run.left = [upload(4, 1, 9999)]
    Run(run).prune()
    left = [entry.key for entry in run.behind.list("clock")]
    assert left == [f"clock/{8:016x}/x", "clock/my-notes.csv", "clock/of-another"]


def test_a_plan_changes_nothing(run: RemoteStore) -> None:
    run.behind.put("step-0000000004/data/x/rank-00000.zip", b"x")
    run.left = [upload(4, 1, 9999)]
    assert len(Run(run).plan_prune(grace=0)) == 2
    assert run.operations["put"] == run.operations["delete"] == 0


def test_deleting_a_step_ends_its_uploads(run: RemoteStore) -> None:
    run.left = [upload(2, 1, 0), upload(4, 2, 0)]
    Run(run).delete([2, 4])
    assert run.left == []
    assert Run(run).steps() == [1, 3]
    assert run.deleted[0][0] == "step-0000000002/manifest.msgpack"
    with pytest.raises(NotFoundError):
        Run(run).delete([2])


def test_a_large_manifest_that_is_damaged_counts_for_nothing(
    run: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "step-0000000002/manifest.msgpack"
    good = run.behind.read(key)
    monkeypatch.setattr("ckptkit.checkpoint.places._AT_ONCE", len(good) - 1)
    monkeypatch.setattr("ckptkit.checkpoint.places._HEAD_BYTES", 256)
    run.behind.put(key, good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
    assert Run(run).prune(keep_last=2) == []
    assert Run(run).steps() == [1, 2, 3]
    run.behind.put(key, good)
    assert [it.step for it in Run(run).prune(keep_last=2)] == [1]
