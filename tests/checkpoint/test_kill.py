"""A save that fails or dies at any of its operations: the old step is whole, the new one whole or
not there, and nothing is in the way of the next save.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

import ckptkit
from ckptkit import Run
from ckptkit.storage import FailingStore, LocalStore, MemoryStore, Store
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
    small_state,
)
from tests.checkpoint.saving import add as add_part
from tests.checkpoint.watching import operations_of

ROOT = Path(__file__).resolve().parents[2]
OLD, LAST = small_state(1), small_state(3)
Mode = Literal["another", "overwrite"]
MODES: list[Mode] = ["another", "overwrite"]


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
            folder = f"{checkpoint.prefix}/data/{checkpoint.manifest.save.save_id}"
            keys |= {f"{folder}/{pack.name}" for pack in checkpoint.manifest.packs}
            keys.add(f"{checkpoint.prefix}/manifest.msgpack")
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
    assert count > 15
    for number in range(1, count + 1):
        store = memory_with(base)
        errors = save_new(FailingStore(store, fail_at=number, after=after), mode)
        # Where a rank was told of an error the step may exist all the same: an answer was lost.
        assert_safe(store, mode, is_committed=not any(errors))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_death_at_any_operation(
    base: dict[str, bytes], mode: Mode, when: str, tmp_path: Path
) -> None:
    local = LocalStore(tmp_path / "base")
    for key, data in base.items():
        local.put(key, data)
    command = [sys.executable, "-m", "tests.checkpoint.dying", str(tmp_path), mode, when]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    runs = sorted(tmp_path.glob(f"{when}-*"))
    assert len(runs) > 15
    for run in runs:
        assert_safe(LocalStore(run), mode)
        assert {name.rpartition("/")[2] for name in files(run)} <= {
            "manifest.msgpack",
            "rank-00000.zip",
            "rank-00001.zip",
            "rank-00002.zip",
        }


def test_a_temporary_file_of_a_save_that_died_is_no_step_and_goes_with_it(tmp_path: Path) -> None:
    save(tmp_path, OLD, strategy="fsdp:2")
    before = files(tmp_path)
    step = tmp_path / "step-0000000002"
    (step / "data/20200101T000000Z-0123456789ab").mkdir(parents=True)
    (step / "data/20200101T000000Z-0123456789ab/rank-00000.zip").write_bytes(b"PK")
    (step / ".tmp-0123456789abcdef").write_bytes(b"half a manifest")
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
