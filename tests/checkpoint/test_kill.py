"""A save that fails or dies at any of its operations, or of its barrier's: the old step is whole,
the new one whole or not there, and nothing is in the way of the next save. And so for rebuild and
prune, which can be run again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import ckptkit
from ckptkit import Run
from ckptkit.storage import LocalStore, MemoryStore, Store
from tests.checkpoint.dying import NEW
from tests.checkpoint.saving import (
    State,
    assert_holds,
    at_step,
    contents,
    files,
    memory_with,
    outcomes,
    save,
    save_by,
    small_state,
)
from tests.checkpoint.saving import add as add_part
from tests.checkpoint.watching import operations_of
from tests.storage.failing import FailingStore

ROOT = Path(__file__).resolve().parents[2]
OLD, LAST = small_state(1), small_state(3)
Mode = Literal["another", "overwrite"]
MODES: list[Mode] = ["another", "overwrite"]
# Of both ranks and of all kinds: one that is added or gone is a change of the protocol.
OPERATIONS = {"another": 14, "overwrite": 18}


def save_new(store: Store, mode: Mode) -> list[BaseException | None]:
    def fill(writer: ckptkit.Writer) -> None:
        for name, tensor in NEW.items():
            add_part(writer, name, tensor)

    overwrite = mode == "overwrite"
    step = 1 if overwrite else 2
    return outcomes(store, fill, strategy="fsdp:2", step=step, overwrite=overwrite)


def held_by(store: Store, step: int, *choices: State) -> State:
    """Which state a step holds whole; fails where it is none of them."""
    assert ckptkit.verify(at_step(store, step)) == []
    with Run(store).open(step) as checkpoint:
        found = checkpoint.read("model/w").tobytes()
        (state,) = [c for c in choices if c["model/w"].whole.tobytes() == found]
        assert_holds(checkpoint, state)
    return state


def named_by_manifests(store: Store) -> set[str]:
    """The keys of all files that belong to committed steps."""
    keys = set()
    for step in Run(store).steps():
        with Run(store).open(step) as checkpoint:
            folder = checkpoint.folder.data(checkpoint.save_id)
            keys |= {f"{folder}/{pack.name}" for pack in checkpoint.manifest.packs}
            keys.add(checkpoint.folder.key("manifest.msgpack"))
    return keys


def assert_safe(store: Store, mode: Mode, *, is_committed: bool = False) -> None:
    """What has to be true after any failure; `is_committed` where no rank was told
    otherwise.
    """
    if mode == "another":
        held_by(store, 1, OLD)
        is_new = Run(store).steps() == [1, 2]
        assert is_new or Run(store).steps() == [1]
        if is_new:
            held_by(store, 2, NEW)
    else:
        assert Run(store).steps() == [1]
        is_new = held_by(store, 1, OLD, NEW) is NEW
    assert is_new or not is_committed
    needed = {
        key: data for key, data in contents(store).items() if key in named_by_manifests(store)
    }
    Run(store).prune(grace=0)
    assert contents(store) == needed
    save(store, LAST, strategy="fsdp:3", step=2, overwrite=is_new)
    held_by(store, 2, LAST)


@pytest.fixture(scope="module")
def base() -> dict[str, bytes]:
    """A run with one step."""
    store = MemoryStore()
    save(store, OLD, strategy="fsdp:2")
    return contents(store)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_a_failure_at_any_operation(base: dict[str, bytes], mode: Mode, after: bool) -> None:
    count = len(operations_of(memory_with(base), lambda store: save_new(store, mode)))
    assert count == OPERATIONS[mode]
    for number in range(1, count + 1):
        store = memory_with(base)
        errors = save_new(FailingStore(store, fail_at=number, after=after), mode)
        # Where a rank was told of an error the step may exist all the same: an answer was lost.
        assert_safe(store, mode, is_committed=not any(errors))


def put_all(run: Path, objects: dict[str, bytes]) -> None:
    store = LocalStore(run)
    for key, data in objects.items():
        store.put(key, data)


def program(name: str, *arguments: str) -> list[str]:
    """The lines that a program of tests prints."""
    command = [sys.executable, "-m", f"tests.checkpoint.{name}", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.splitlines()


def died(root: Path, mode: str, when: str) -> list[Path]:
    """A copy of root/base for each operation of something, which died there in it."""
    program("dying", str(root), mode, when)
    return sorted(root.glob(f"{when}-*"))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_death_at_any_operation(
    base: dict[str, bytes], mode: Mode, when: str, tmp_path: Path
) -> None:
    put_all(tmp_path / "base", base)
    runs = died(tmp_path, mode, when)
    assert len(runs) == OPERATIONS[mode] + 1
    for run in runs:
        assert_safe(LocalStore(run), mode)
        assert {name.rpartition("/")[2] for name in files(run)} <= {
            "manifest.msgpack",
            "rank-00000.zip",
            "rank-00001.zip",
            "rank-00002.zip",
        }


def test_death_at_any_operation_of_the_barrier(base: dict[str, bytes], tmp_path: Path) -> None:
    put_all(tmp_path / "base", base)
    lines = [line.split() for line in program("dying_at_barrier", str(tmp_path))]
    assert len(lines) > 20
    outcomes = set()
    for name, code in lines:
        assert code in ("0", "3"), name
        run = LocalStore(tmp_path / name)
        outcomes.add((code, Run(run).latest()))
        assert_safe(run, "another", is_committed=code == "0")
    # Either rank may die too early for a step, or when nothing more depends on it.
    assert outcomes >= {("0", 2), ("3", 1)}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("manifest", ["lost", "empty", "damaged"])
def test_death_at_any_operation_of_a_rebuild(tmp_path: Path, manifest: str, when: str) -> None:
    def fill(writer: ckptkit.Writer) -> None:
        placed = {"pp": f"stage({writer.rank})"}
        writer.add(f"stage{writer.rank}/w", np.arange(3), placements=placed)

    base = tmp_path / "base"
    save(base, OLD, strategy="fsdp:2")
    save_by(base, fill, strategy="pp:2", step=2)
    whole = files(base)
    (groups,) = base.glob("step-0000000002/data/*/groups.zip")
    groups.unlink()
    path = base / "step-0000000002/manifest.msgpack"
    if manifest == "lost":
        path.unlink()
    else:
        path.write_bytes(b"" if manifest == "empty" else path.read_bytes()[:-1])
    runs = died(tmp_path, "rebuild", when)
    assert len(runs) >= 10  # the group documents are one operation
    for run in runs:
        held_by(LocalStore(run), 1, OLD)
        if files(run) != whole:
            assert manifest == "damaged" or Run(run).steps() == [1]
            ckptkit.rebuild(run / path.parent.name)
        assert files(run) == whole
        assert Run(run).prune(grace=0) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_death_at_any_operation_of_a_prune(tmp_path: Path, when: str) -> None:
    run = tmp_path / "base"
    for step, state in ((1, OLD), (2, NEW), (3, LAST)):
        save(run, state, strategy="fsdp:2", step=step)
    kept = {name: data for name, data in files(run).items() if "step-0000000003" in name}
    save(run, NEW, strategy="fsdp:2", step=4)
    (run / "step-0000000004/manifest.msgpack").write_bytes(b"")
    shutil.copytree(run / "step-0000000004/data", run / "step-0000000003/data", dirs_exist_ok=True)
    (run / "step-0000000003/.tmp-0123456789abcdef").write_bytes(b"half a manifest")
    runs = died(tmp_path, "prune", when)
    assert len(runs) > 25
    for left in map(LocalStore, runs):
        assert Run(left).steps()[-1] == 3
        for step, state in ((1, OLD), (2, NEW), (3, LAST)):
            if step in Run(left).steps():
                held_by(left, step, state)
        Run(left).prune(keep_last=1, grace=0)
        assert files(Path(left.location.path)) == kept


def test_a_temporary_file_of_a_save_that_died_is_no_step_and_goes_with_it(tmp_path: Path) -> None:
    save(tmp_path, OLD, strategy="fsdp:2")
    before = files(tmp_path)
    step = tmp_path / "step-0000000002"
    (step / "data/20200101T000000Z-0123456789ab").mkdir(parents=True)
    (step / "data/20200101T000000Z-0123456789ab/rank-00000.zip").write_bytes(b"PK")
    for folder in (step, tmp_path / "step-0000000001"):
        (folder / ".tmp-0123456789abcdef").write_bytes(b"half a manifest")
    assert Run(tmp_path).steps() == [1]
    Run(tmp_path).prune(grace=0)
    assert files(tmp_path) == before


@pytest.mark.parametrize("made", ["", "data", "data/20200101T000000Z-0123456789ab"])
@pytest.mark.parametrize("step", [1, 2])
def test_empty_folders_of_a_save_that_died_are_no_step_and_go(
    tmp_path: Path, step: int, made: str
) -> None:
    save(tmp_path, OLD, strategy="fsdp:2")
    before = files(tmp_path)
    (tmp_path / f"step-000000000{step}" / made).mkdir(parents=True, exist_ok=True)
    assert Run(tmp_path).steps() == [1]
    Run(tmp_path).prune(grace=0)
    assert files(tmp_path) == before
