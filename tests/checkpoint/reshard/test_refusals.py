"""What cannot be right is said before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.errors import (
    CkptkitError,
    NoSpaceError,
    NotFoundError,
    StepExistsError,
    StrategyError,
    UsageError,
)
from ckptkit.storage import LocalStore, MemoryStore
from tests.checkpoint.reshard.toy import assert_same_state, reshard, save_toy, saved


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"to": "tp:4", "expect": "fsdp:4"}, UsageError, "written by fsdp:3, not by fsdp:4"),
        ({"to": "tq:4"}, StrategyError, "unknown kind of axis"),
        ({"to": "tp:4", "memory": "1MiB"}, UsageError, r"too little memory: .* at least"),
        ({"to": "tp:4", "memory": "lots"}, UsageError, "no size"),
        ({"to": "tp:4", "chunk_bytes": 0}, UsageError, "less than one byte"),
        ({"to": "tp:4", "chunk_bytes": "large"}, UsageError, "no size"),
        ({"to": "tp:4", "workers": 0}, UsageError, "at least one worker"),
        ({"to": "tp:4", "engine": "steam"}, UsageError, "no such engine"),
        ({"to": "tp:4", "engine": "slice:4/4"}, UsageError, "not a slice"),
        ({"to": "tp:4", "engine": "slice:x"}, UsageError, "not a slice"),
    ],
)
def test_what_cannot_be_right_is_refused(
    options: dict[str, Any], kind: type[CkptkitError], message: str
) -> None:
    destination = MemoryStore()
    with pytest.raises(kind, match=message):
        reshard(saved("fsdp:3"), destination, **options)
    assert not destination.list()


def test_a_step_in_the_way_stays_unless_it_may_be_replaced() -> None:
    destination = MemoryStore()
    reshard(saved("fsdp:3"), destination, "tp:2")
    with pytest.raises(StepExistsError, match="the step is committed already"):
        reshard(saved("fsdp:3"), destination, "tp:4")
    reshard(saved("fsdp:3"), destination, "tp:4", overwrite=True)
    with ckptkit.open(destination) as checkpoint:
        assert str(checkpoint.strategy) == "tp:4"
        assert_same_state(checkpoint)
    assert len(destination.list()) == 5


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_step_never_replaces_its_own_source(tmp_path: Path, overwrite: bool) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    save_toy(LocalStore(run), "fsdp:3")
    other.symlink_to(run)
    for source in (run, run / "step-0000000007", other):
        with pytest.raises(StepExistsError, match="in the place of its source"):
            reshard(source, run, "tp:4", overwrite=overwrite)
    with ckptkit.open(run) as checkpoint:
        assert_same_state(checkpoint)


def test_a_step_is_not_put_into_a_step(tmp_path: Path) -> None:
    save_toy(LocalStore(tmp_path), "fsdp:3")
    for destination in (tmp_path / "step-0000000007", tmp_path / "new" / "step-0000000001"):
        with pytest.raises(UsageError, match="a step, not a run"):
            reshard(tmp_path, destination, "tp:4")


def test_nothing_is_written_into_the_folder_of_a_step_which_is_deleted_whole(
    tmp_path: Path,
) -> None:
    save_toy(LocalStore(tmp_path), "fsdp:3")
    place = tmp_path / "step-0000000007" / "other"
    before = sorted(tmp_path.rglob("*"))
    for destination in (place, place / "deeper"):
        with pytest.raises(UsageError, match="would be deleted with it"):
            reshard(tmp_path, destination, "tp:4")
        with pytest.raises(UsageError, match="would be deleted with it"):
            ckptkit.export(tmp_path, destination, to_format="safetensors")
        with ckptkit.open(tmp_path) as step, pytest.raises(UsageError, match="deleted with it"):
            ckptkit.unpack(step, destination)
    assert sorted(tmp_path.rglob("*")) == before
    # A folder that is only called so is nobody's step.
    reshard(tmp_path, tmp_path / "new" / "step-0000000001" / "other", "tp:4")


def test_there_must_be_something_to_reshard() -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        reshard(MemoryStore(), MemoryStore(), "tp:4")


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    destination = MemoryStore()
    monkeypatch.setattr(destination, "room", lambda: 100)
    with pytest.raises(NoSpaceError, match="100 are free"):
        reshard(saved("fsdp:3"), destination, "tp:4")
    assert not destination.list()


def test_a_step_without_arrays_goes_over() -> None:
    source, destination = MemoryStore(), MemoryStore()
    with ckptkit.Writer(source, step=1) as writer:
        writer.add_object("note", "x")
    ckptkit.reshard(source, destination, to="fsdp:4")
    with ckptkit.open(destination) as checkpoint:
        assert (dict(checkpoint.arrays), dict(checkpoint.objects)) == ({}, {"note": "x"})


def test_an_empty_array_of_long_rows_takes_no_memory() -> None:
    source, destination = MemoryStore(), MemoryStore()
    with ckptkit.Writer(source, step=1) as writer:
        writer.add("model/w", np.empty((0, 1 << 33), np.float32))
    ckptkit.reshard(source, destination, to="fsdp:2", memory="64MiB")
    with ckptkit.open(destination) as checkpoint:
        assert checkpoint["model/w"].shape == (0, 1 << 33)


def test_chunks_larger_than_the_memory_are_read_in_bands() -> None:
    source, destination = MemoryStore(), MemoryStore()
    values = np.random.default_rng(0).integers(0, 1 << 30, (6000, 4096), np.int32)
    with ckptkit.Writer(source, step=1, chunk_bytes=1 << 30) as writer:
        writer.add("model/w", values)
    rules = {"rules": [{"match": "w", "tp": "shard(1)"}]}
    ckptkit.reshard(source, destination, to="tp:4", rules=rules, memory="160MiB")
    with ckptkit.open(destination) as checkpoint:
        assert np.array_equal(checkpoint.read("model/w"), values)
