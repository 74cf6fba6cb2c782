"""An empty manifest commits nothing: it is what a commit that is killed leaves where a file
system has no links.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit import Run
from ckptkit.errors import (
    AlreadyExistsError,
    CorruptionError,
    NotCommittedError,
    NotFoundError,
    StepExistsError,
)
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.saving import assert_holds, contents, files, memory_with, save, small_state
from tests.storage.failing import FailingStore

OLD, BEGUN, LAST = small_state(1), small_state(2), small_state(3)
MANIFEST = "step-0000000002/manifest.msgpack"


KILLED = """
import errno, os, sys
import numpy as np
from ckptkit import Writer

def no_link(*_, **__):
    raise OSError(errno.EPERM, "no links here")

os.link = no_link
os.replace = lambda *_, **__: os._exit(17)
with Writer(sys.argv[1], step=2) as writer:
    writer.add("w", np.arange(3))
"""


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """A run of two committed steps."""
    store = MemoryStore()
    save(store, OLD, strategy="fsdp:2", step=1)
    save(store, BEGUN, strategy="fsdp:2", step=2)
    return contents(store)


@pytest.fixture
def store(whole: dict[str, bytes]) -> MemoryStore:
    """Step 1 is committed, the commit of step 2 was killed."""
    return memory_with({**whole, MANIFEST: b""})


@pytest.fixture
def run(whole: dict[str, bytes], tmp_path: Path) -> Path:
    """The same on disk, all of it two hours old."""
    for key, data in {**whole, MANIFEST: b""}.items():
        LocalStore(tmp_path).put(key, data)
    made_older(*tmp_path.rglob("*"))
    return tmp_path


def made_older(*paths: Path) -> None:
    for path in paths:
        then = path.stat().st_mtime - 7200
        os.utime(path, (then, then))


def test_a_commit_killed_where_there_are_no_links_harms_no_other_step(tmp_path: Path) -> None:
    save(tmp_path, OLD, strategy="fsdp:2", step=1)
    before = files(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == 17
    assert (tmp_path / MANIFEST).read_bytes() == b""
    with ckptkit.open(tmp_path) as checkpoint:
        assert_holds(checkpoint, OLD)
    assert ckptkit.verify(tmp_path) == []
    Run(tmp_path).prune(grace=0)
    assert files(tmp_path) == before
    save(tmp_path, LAST, strategy="fsdp:2", step=2)
    assert Run(tmp_path).steps() == [1, 2]


def test_the_newest_step_is_the_one_before(store: MemoryStore) -> None:
    run = Run(store)
    assert run.steps() == [1]
    assert run.latest() == 1
    for checkpoint in (run.open(), ckptkit.open(store)):
        assert checkpoint.step == 1
        assert_holds(checkpoint, OLD)
    assert ckptkit.verify(store) == []


def test_a_listing_shows_it_as_not_committed(store: MemoryStore) -> None:
    first, second = Run(store).listing()
    assert (first.committed, first.problem) == (True, "")
    assert (second.step, second.committed, second.problem) == (2, False, "")
    assert second.nbytes > 100


def test_the_step_itself_is_said_to_be_not_committed(run: Path) -> None:
    step = run / "step-0000000002"
    for look in (ckptkit.open, ckptkit.verify, lambda _: Run(run).open(2)):
        with pytest.raises(NotCommittedError, match="2 objects, an empty manifest") as caught:
            look(step)
        assert caught.value.where == str(step)
        assert "ckpt rebuild" in caught.value.hint


def test_alone_in_a_step_it_is_not_committed_either() -> None:
    store = memory_with({MANIFEST: b""})
    with pytest.raises(NotCommittedError, match="0 objects"):
        Run(store).open(2)
    with pytest.raises(NotFoundError):
        ckptkit.open(store)
    assert [(r.step, r.keys) for r in Run(store).prune(grace=0)] == [(2, (MANIFEST,))]
    assert contents(store) == {}


def test_one_that_is_damaged_but_not_empty_stays_an_error(store: MemoryStore) -> None:
    store.put(MANIFEST, b"\0")
    assert Run(store).latest() == 2
    with pytest.raises(CorruptionError):
        ckptkit.open(store)
    before = contents(store)
    assert Run(store).prune(grace=0) == []
    assert contents(store) == before


def test_it_is_pruned_with_the_data_of_its_save_and_then_the_step_can_be_saved(
    store: MemoryStore, whole: dict[str, bytes]
) -> None:
    plan = Run(store).prune(keep_last=1, grace=0)
    manifest, data = plan
    assert (manifest.kind, manifest.step, manifest.name) == ("orphan", 2, "step-0000000002")
    assert (data.kind, data.step, data.name) == ("orphan", 2, data.save_id)
    assert contents(store) == {
        key: whole[key] for key in whole if key.startswith("step-0000000001")
    }
    save(store, LAST, strategy="fsdp:2", step=2)
    with ckptkit.open(store) as checkpoint:
        assert_holds(checkpoint, LAST)


def test_it_is_pruned_only_when_it_is_old(run: Path) -> None:
    assert len(Run(run).plan_prune()) == 2
    (run / MANIFEST).touch()
    # The data neither: the commit may be about to name it.
    assert Run(run).plan_prune() == []
    assert len(Run(run).plan_prune(grace=0)) == 2


def test_young_data_beside_it_may_be_of_a_save_that_is_about_to_replace_it(run: Path) -> None:
    (run / "step-0000000002/data/20990101T000000Z-0123456789ab").mkdir()
    (run / "step-0000000002/data/20990101T000000Z-0123456789ab/rank-00000.zip").touch()
    (orphan,) = Run(run).plan_prune()
    assert orphan.save_id < "2099"


def test_a_manifest_that_fills_it_after_the_plan_was_made_stays(
    store: MemoryStore, whole: dict[str, bytes]
) -> None:
    class Slow(FailingStore):
        def leftovers(self, prefix: str = "", *, deep: bool = True) -> Any:
            store.put(MANIFEST, whole[MANIFEST])
            return super().leftovers(prefix, deep=deep)

    Run(Slow(store, fail_at=1 << 60)).prune(grace=0)
    assert contents(store) == whole


def test_saving_the_step_again_says_what_is_in_the_way(store: MemoryStore) -> None:
    before = contents(store)
    with pytest.raises(AlreadyExistsError, match="killed while it committed") as caught:
        save(store, LAST, strategy="fsdp:2", step=2)
    assert not isinstance(caught.value, StepExistsError)
    assert caught.value.where.endswith("step-0000000002")
    for way in ("ckpt prune RUN --grace 0", "ckpt rebuild STEP", "overwrite=True"):
        assert way in caught.value.hint
    assert contents(store) == before


@pytest.mark.parametrize("way", ["overwrite", "delete"])
def test_saving_the_step_again_has_other_ways_too(store: MemoryStore, way: str) -> None:
    if way == "delete":
        Run(store).delete([2])
    save(store, LAST, strategy="fsdp:3", step=2, overwrite=way == "overwrite")
    with ckptkit.open(store) as checkpoint:
        assert (checkpoint.step, checkpoint.strategy.world_size) == (2, 3)
        assert_holds(checkpoint, LAST)
    Run(store).prune(grace=0)
    assert len(contents(store)) == 3 + 4


def test_rebuilding_commits_the_save_that_was_killed(run: Path, whole: dict[str, bytes]) -> None:
    ckptkit.rebuild(run / "step-0000000002")
    assert files(run) == whole
