"""A run: which steps there are, which may go, and in which order they go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, Writer
from ckptkit.checkpoint.run.run import Retention
from ckptkit.errors import NotFoundError, StorageError, UsageError
from ckptkit.format.manifest import Manifest
from ckptkit.storage import LocalStore, MemoryStore, Store
from tests.checkpoint.saving import at_step, contents, memory_with
from tests.checkpoint.watching import RecordingStore, operations_of
from tests.storage.failing import FailingStore


def save_steps(*steps: int) -> MemoryStore:
    store = MemoryStore()
    for step in steps:
        with Writer(store, step=step) as writer:
            writer.add("w", np.full(10, step))
    return store


def manifest(step: int) -> str:
    return f"step-{step:010d}/manifest.msgpack"


def abandoned(store: Store, step: int, save_id: str = "20200101T000000Z-0123456789ab") -> str:
    """The data of a save that never committed; its key."""
    key = f"step-{step:010d}/data/{save_id}/rank-00000.zip"
    store.put(key, b"half a pack")
    return key


def test_steps_are_the_committed_ones_in_order() -> None:
    store = save_steps(30, 1, 200, 12_345_678_901)
    abandoned(store, 5)
    run = Run(store)
    assert run.steps() == [1, 30, 200, 12_345_678_901]
    assert run.latest() == 12_345_678_901
    assert run.open().step == 12_345_678_901
    assert run.open(30)["w"][0] == 30
    assert run.location == str(store.location)


@pytest.mark.parametrize(
    "name", ["step-1", "step-00000000001", "step-000000000a", "Step-0000000001", "step--000000001"]
)
def test_other_folders_are_no_steps(name: str) -> None:
    store = save_steps(7)
    store.put(f"{name}/manifest.msgpack", store.read(manifest(7)))
    assert Run(store).steps() == [7]
    assert Run(store).prune(keep_last=1, grace=0) == []


def test_the_listing_says_what_each_step_is() -> None:
    store = save_steps(1, 2, 3)
    store.put(manifest(2), b"damaged")
    abandoned(store, 4)
    first, second, third, fourth = Run(store).listing()
    assert (first.step, first.committed, first.strategy, first.problem) == (1, True, "single", "")
    assert first.nbytes > 80
    assert first.time is not None
    assert abs(first.time - time.time()) < 600
    assert (second.step, second.committed) == (2, True)
    assert second.problem
    assert third.nbytes == first.nbytes
    assert (fourth.step, fourth.committed, fourth.nbytes) == (4, False, len(b"half a pack"))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [1, 2, 3, 10, 20, 21]),
        ({"keep_last": 1}, [21]),
        ({"keep_last": 3}, [10, 20, 21]),
        ({"keep_last": 99}, [1, 2, 3, 10, 20, 21]),
        ({"keep_last": 1, "keep_every": 10}, [10, 20, 21]),
        ({"keep_last": 2, "keep_every": 2}, [2, 10, 20, 21]),
        ({"keep_every": 1}, [1, 2, 3, 10, 20, 21]),
        ({"keep_last": 1, "keep": [3, 20, 99]}, [3, 20, 21]),
        ({"keep": [3]}, [1, 2, 3, 10, 20, 21]),
    ],
)
def test_retention_keeps_the_newest_and_the_regular(
    options: dict[str, Any], kept: list[int]
) -> None:
    store = save_steps(1, 2, 3, 10, 20, 21)
    run = Run(store)
    plan = run.plan_prune(**options)
    assert run.steps() == [1, 2, 3, 10, 20, 21]
    assert [removal.step for removal in plan] == [s for s in run.steps() if s not in kept]
    assert all(removal.kind == "step" and removal.nbytes > 80 for removal in plan)
    assert run.prune(**options) == plan
    assert run.steps() == kept
    for step in kept:
        assert ckptkit.verify(at_step(store, step)) == []
    assert {key.partition("/")[0] for key in contents(store)} == {f"step-{s:010d}" for s in kept}


def test_newest_is_the_highest_number_and_not_what_was_saved_last() -> None:
    store = save_steps(30, 20, 10)
    assert Run(store).latest() == 30
    Run(store).prune(keep_last=2)
    assert Run(store).steps() == [20, 30]


def test_the_newest_step_is_never_pruned() -> None:
    assert Retention(keep_every=10).kept([1, 2, 3]) == {3}


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": 3.0},
        {"keep_last": "3"},
        {"keep_every": 0},
        {"keep_every": float("nan")},
    ],
)
def test_retention_that_keeps_nothing_is_refused(options: dict[str, Any]) -> None:
    store = save_steps(1)
    with pytest.raises(UsageError) as caught:
        Run(store).prune(**options)
    assert "leave both out" in caught.value.hint
    assert Run(store).steps() == [1]


def test_a_text_is_no_step_to_keep() -> None:
    store = save_steps(1, 2)
    with pytest.raises(UsageError, match="not steps to keep"):
        Run(store).prune(keep_last=1, keep=["1"])  # type: ignore[list-item]
    assert Run(store).steps() == [1, 2]


def test_every_manifest_goes_before_its_data_and_old_steps_before_new_ones() -> None:
    store = RecordingStore(save_steps(1, 2, 3))
    Run(store).prune(keep_last=1)
    deleted = [entry.split(" ")[1] for entry in store.log if entry.startswith("delete ")]
    assert [key.partition("/")[0][-1] for key in deleted] == ["1", "1", "2", "2"]
    assert [key for key in deleted if key.endswith("manifest.msgpack")] == [
        manifest(1),
        manifest(2),
    ]
    assert deleted[0] == manifest(1)
    assert deleted[2] == manifest(2)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_of_the_steps_that_are_whole_the_newest_stays(damage: str) -> None:
    store = save_steps(1, 2, 3)
    (pack,) = (entry.key for entry in store.list("step-0000000003/data"))
    data = store.read(pack)
    store.delete([pack])
    if damage == "short":
        store.put(pack, data[:-1])
    assert [removal.step for removal in Run(store).prune(keep_last=1)] == [1]
    assert Run(store).steps() == [2, 3]
    assert ckptkit.verify(at_step(store, 2)) == []


@pytest.mark.parametrize("how", ["prune", "delete"])
@pytest.mark.parametrize("after", [False, True])
def test_a_deletion_that_fails_leaves_no_step_that_looks_whole_and_is_not(
    how: str, after: bool
) -> None:
    def act(store: Store) -> None:
        if how == "prune":
            Run(store).prune(keep_last=1)
        else:
            Run(store).delete([1, 2])

    before = contents(save_steps(1, 2, 3))
    for number in range(1, len(operations_of(memory_with(before), act)) + 1):
        store = memory_with(before)
        with pytest.raises(StorageError):
            act(FailingStore(store, fail_at=number, after=after))
        assert 3 in Run(store).steps()
        for step in Run(store).steps():
            assert ckptkit.verify(at_step(store, step)) == []
        Run(store).prune(keep_last=1, grace=0)
        assert {key.partition("/")[0] for key in contents(store)} == {"step-0000000003"}


def test_data_that_no_manifest_names_is_found_and_pruned() -> None:
    store = save_steps(1, 2)
    before = contents(store)
    orphans = [abandoned(store, step) for step in (1, 2, 3)]
    plan = Run(store).plan_prune(grace=0)
    assert [(removal.kind, removal.step) for removal in plan] == [("orphan", s) for s in (1, 2, 3)]
    assert [key for removal in plan for key in removal.keys] == orphans
    assert Run(store).prune(grace=0) == plan
    assert contents(store) == before


def test_data_that_is_young_may_be_a_save_under_way() -> None:
    store = save_steps(1)
    key = abandoned(store, 2)
    assert Run(store).plan_prune() == []
    assert Run(store).plan_prune(grace=60) == []
    assert Run(store).prune(keep_last=1) == []
    for wrong in (float("nan"), -1.0):
        with pytest.raises(UsageError, match="grace has to be at least 0"):
            Run(store).prune(grace=wrong)
    assert key in contents(store)


@pytest.fixture
def with_leftovers(tmp_path: Path) -> Path:
    """Committed steps 1 and 2 and a begun step 3, with files that killed writes left."""
    for step in (1, 2):
        with Writer(tmp_path, step=step) as writer:
            writer.add("w", np.full(10, step))
    abandoned(LocalStore(tmp_path), 3)
    for step in (1, 2, 3):
        (tmp_path / f"step-000000000{step}/.tmp-0123456789abcdef").write_bytes(b"half")
    return tmp_path


def test_files_that_killed_writes_left_are_found_and_pruned(with_leftovers: Path) -> None:
    run = Run(with_leftovers)
    plan = run.plan_prune(grace=0)
    found = [(removal.kind, removal.step) for removal in plan]
    assert found == [("leftover", 1), ("leftover", 2), ("orphan", 3), ("leftover", 3)]
    left = [removal for removal in plan if removal.kind == "leftover"]
    assert {(removal.name, removal.nbytes) for removal in left} == {(".tmp-0123456789abcdef", 4)}
    assert run.prune(grace=0) == plan
    assert not list(with_leftovers.rglob(".tmp-*"))
    assert run.steps() == [1, 2]
    assert run.plan_prune(grace=0) == []


def test_a_young_file_may_be_of_a_write_under_way(with_leftovers: Path) -> None:
    run = Run(with_leftovers)
    assert run.prune() == []
    path = with_leftovers / "step-0000000002/.tmp-0123456789abcdef"
    then = time.time() - 4000
    os.utime(path, (then, then))
    assert [(removal.kind, removal.step) for removal in run.prune()] == [("leftover", 2)]
    assert not path.exists()
    assert len(list(with_leftovers.rglob(".tmp-*"))) == 2


def test_they_go_with_a_step_that_goes(with_leftovers: Path) -> None:
    Run(with_leftovers).prune(keep_last=1)
    assert not (with_leftovers / "step-0000000001").exists()


def test_a_save_that_commits_after_the_plan_was_made_stays() -> None:
    store = save_steps(1)
    saved = contents(save_steps(2))
    for key, data in saved.items():
        if key != manifest(2):
            store.put(key, data)

    class Slow(FailingStore):
        def _delete(self, key: str) -> None:
            raise AssertionError("committed data was deleted")

        def list(self, prefix: str = "", *, deep: bool = True) -> Any:
            found = super().list(prefix, deep=deep)
            store.put(manifest(2), saved[manifest(2)])
            return found

    Run(Slow(store, fail_at=1 << 60)).prune(grace=0)
    assert ckptkit.verify(at_step(store, 2)) == []


def test_a_step_whose_manifest_cannot_be_read_is_left_alone() -> None:
    store = save_steps(1, 2, 3)
    store.put(manifest(1), store.read(manifest(1))[:-1])
    store.put(manifest(3), b"\0")
    before = contents(store)
    assert Run(store).prune(grace=0) == []
    Run(store).prune(keep_last=1, grace=0)
    assert contents(store) == before


def test_steps_that_cannot_be_read_do_not_count_as_kept() -> None:
    store = save_steps(1, 2, 3, 4)
    for step in (3, 4):
        store.put(manifest(step), b"damaged")
    Run(store).prune(keep_last=1, grace=0)
    with Run(store).open(2) as checkpoint:
        assert checkpoint["w"][0] == 2


def test_of_all_the_manifests_one_is_decoded() -> None:
    """That of the newest step: the others may be many, of many arrays each."""
    store = save_steps(1, 2, 3, 4)
    with patch.object(Manifest, "from_bytes", wraps=Manifest.from_bytes) as decoded:
        Run(store).prune(keep_last=2)
    assert Run(store).steps() == [3, 4]
    (call,) = decoded.call_args_list
    assert manifest(4) in call.args[1]


def test_steps_are_deleted_by_number() -> None:
    store = save_steps(1, 2, 3)
    abandoned(store, 9)
    store.put(manifest(2), b"damaged")
    run = Run(store)
    run.delete([1, 2, 9])
    assert {key.partition("/")[0] for key in contents(store)} == {"step-0000000003"}
    with pytest.raises(NotFoundError) as caught:
        run.delete([9])
    assert "step-0000000009" in caught.value.where
    assert "ckpt ls" in caught.value.hint
    with pytest.raises(UsageError) as refused:
        run.delete([-1])
    assert refused.value.hint
    assert run.steps() == [3]


@pytest.mark.parametrize("left", ["", "data", "data/20260101T000000Z-0123456789ab"])
def test_the_empty_folders_of_a_deletion_that_was_killed_are_deleted(
    tmp_path: Path, left: str
) -> None:
    with Writer(tmp_path / "step-0000000002", step=2) as writer:
        writer.add("w", np.zeros(3))
    (tmp_path / "step-0000000001" / left).mkdir(parents=True)
    run = Run(tmp_path)
    assert [info.step for info in run.listing()] == [1, 2]
    run.delete([1])
    assert [info.step for info in run.listing()] == [2]
    with pytest.raises(NotFoundError):
        run.delete([1])


KILLED_AS_IT_CLAIMS = """
import os, signal, sys
from ckptkit.checkpoint.ranks import OneRank
from ckptkit.checkpoint.run.mirror import Mirror
from ckptkit.checkpoint.run.run import Retention
from ckptkit.storage import LocalStore, open_store

if sys.argv[2] == "killed":
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
Mirror(LocalStore(sys.argv[1]), open_store("memory://kept"), Retention()).look(OneRank())
"""


def test_what_a_kill_in_the_first_moment_leaves_in_a_local_folder_is_pruned(tmp_path: Path) -> None:
    def look(how: str) -> int:
        command = [sys.executable, "-c", KILLED_AS_IT_CLAIMS, str(tmp_path), how]
        return subprocess.run(command, check=False).returncode

    assert look("killed") == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".tmp-")
    (tmp_path / ".tmp-mine").touch()
    assert look("alive") == 0
    run = Run(tmp_path)
    assert run.prune() == []  # it may be a write under way
    os.utime(left, (0, 0))
    (removal,) = run.prune(keep_last=1)
    assert (removal.kind, removal.step, removal.name) == ("leftover", None, left.name)
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-mine", "uploads-to.txt"}
