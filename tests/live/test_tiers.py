"""Saves to a local folder that are copied to another place in the background."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import ckptkit
from ckptkit.checkpoint.places import MANIFEST
from ckptkit.checkpoint.run import mirror
from ckptkit.checkpoint.run.mirror import Copied, copy_step
from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    NotFoundError,
    PeerError,
    StorageError,
    UsageError,
)
from ckptkit.live import Checkpointer
from ckptkit.storage import LocalStore, Location, open_store
from tests.live.pool import Pool
from tests.storage.failing import FailingStore


def value(number: float) -> dict[str, Any]:
    """A state of one number."""
    return {"s": {"x": torch.full((300,), number)}}


def loaded(checkpointer: Checkpointer, **options: Any) -> tuple[int, float] | None:
    """The step that is restored, and the number in it."""
    state = value(0)
    restored = checkpointer.restore(state=state, **options)
    return (restored.step, float(state["s"]["x"][0])) if restored else None


def save_two(kept: Path, local: Path) -> None:
    """Steps 1 and 2, in both places."""
    with Checkpointer(kept, local=local) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state=value(step))


def steps(*places: Path) -> list[list[int]]:
    return [ckptkit.Run(place).steps() for place in places]


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Steps are copied when the event is set."""
    go = threading.Event()

    def late(*arguments: Any) -> Copied:
        assert go.wait(30)
        return copy_step(*arguments)

    with patch.object(mirror, "copy_step", late):
        yield go


@contextmanager
def refusing(*ranks: int) -> Iterator[None]:
    """Copying fails on some ranks."""

    def refuse(source: Any, target: Any, step: int, barrier: Any, options: Any) -> Copied:
        if barrier.rank not in ranks:
            return copy_step(source, target, step, barrier, options)
        barrier.leave("StorageError: the network is gone")
        raise StorageError("the network is gone")

    with patch.object(mirror, "copy_step", refuse):
        yield


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The local folder and the other place."""
    return tmp_path / "local", tmp_path / "kept"


def test_a_save_returns_before_it_is_copied_and_the_end_of_the_block_waits(
    places: tuple[Path, Path],
) -> None:
    local, kept = places
    with held_up() as go, Checkpointer(kept, local=local) as checkpointer:
        checkpointer.save(1, state=value(1))
        checkpointer.save(2, state=value(2))
        assert steps(local, kept) == [[1, 2], []]
        assert loaded(checkpointer) == (2, 2.0)
        go.set()
        checkpointer.wait()
        assert checkpointer.run.steps() == [1, 2]
        checkpointer.save(3, state=value(3))
    assert steps(local, kept) == [[1, 2, 3], [1, 2, 3]]


def test_places_may_have_names_that_are_no_unicode(tmp_path: Path) -> None:
    local, kept = tmp_path / os.fsdecode(b"caf\xe9"), tmp_path / "kept"
    for number in (1, 2):
        with Checkpointer(local / "run", local=local / "near") as checkpointer:
            checkpointer.save(number, state=value(number))
            assert loaded(checkpointer) == (number, float(number))
    with Checkpointer(kept, local=local / "near") as other, pytest.raises(UsageError) as caught:
        other.save(3, state=value(3))
    assert str(local / "run") in str(caught.value)


def test_what_a_killed_job_left_is_copied_by_the_next(places: tuple[Path, Path]) -> None:
    local, kept = places
    with Checkpointer(local) as killed:
        for step in (1, 2):
            killed.save(step, state=value(step))
    with Checkpointer(kept, local=local) as checkpointer:
        assert loaded(checkpointer) == (2, 2.0)
    assert steps(local, kept) == [[1, 2], [1, 2]]


def save_while_refused(kept: str, local: str, failing: int) -> list[Any]:
    said = []
    with Checkpointer(kept, local=local, timeout=20) as checkpointer:
        with refusing(failing):
            checkpointer.save(1, state=value(1))
            settle(checkpointer)
            with pytest.raises(CkptkitError) as caught:
                checkpointer.save(2, state=value(2))
            said.append(f"{type(caught.value).__name__}: {caught.value}")
            with pytest.raises(CkptkitError):
                checkpointer.wait()
        assert ckptkit.Run(local).steps() == [1, 2]
        assert ckptkit.Run(kept).steps() == []
        checkpointer.wait()  # it was said once
        checkpointer.save(3, state=value(3))
        checkpointer.wait()
        assert loaded(checkpointer) == (3, 3.0)
    return said


def settle(checkpointer: Checkpointer) -> None:
    """Wait until a round is over, on all ranks."""
    checkpointer._tiers._copies.settle()
    dist.barrier()


@pytest.mark.parametrize("failing", [0, 1])
def test_copies_that_fail_are_said_on_all_ranks_after_the_save_and_tried_again(
    gloo: Pool, places: tuple[Path, Path], failing: int
) -> None:
    local, kept = places
    found = gloo.run(2, save_while_refused, str(kept), str(local), failing)
    for rank, (message,) in enumerate(found):
        assert "not all steps could be copied" in message
        assert "the network is gone" in message
        assert rank != failing or message.startswith("StorageError")
    assert steps(local, kept) == [[1, 2, 3], [1, 2, 3]]


def test_an_error_of_a_copy_ends_the_block(places: tuple[Path, Path]) -> None:
    local, kept = places
    with (
        pytest.raises(StorageError, match="not all steps could be copied"),
        refusing(0),
        Checkpointer(kept, local=local) as checkpointer,
    ):
        assert checkpointer.save(1, state=value(1))
    assert steps(local, kept) == [[1], []]


class Unreachable(FailingStore):
    """The other place, which nobody can reach."""

    def __init__(self, location: Path) -> None:
        super().__init__(LocalStore(Location.parse(location)), fail_at=1)

    def attempt(self, operation: str, action: Any) -> Any:
        """Fail."""
        raise StorageError(f"no way to {operation}")


def test_where_the_other_place_cannot_be_reached_local_saves_go_on(
    places: tuple[Path, Path],
) -> None:
    local, kept = places
    checkpointer = Checkpointer(Unreachable(kept), local=local, keep_last=1)
    for step in (1, 2, 3):
        with suppress(StorageError):
            checkpointer.save(step, state=value(step))
    with pytest.raises(StorageError, match="fallback=True loads the newest step that is local"):
        loaded(checkpointer)
    assert loaded(checkpointer, fallback=True) == (3, 3.0)
    with pytest.raises(StorageError, match="no way to"):
        checkpointer.close()
    assert steps(local, kept) == [[1, 2, 3], []]


def damage(place: Path, step: int) -> None:
    """A bit of a value."""
    with ckptkit.Run(place).open(step) as opened:
        offset = int(opened.manifest.offset[0])
    (path,) = (place / f"step-{step:010d}").rglob("*.zip")
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def restore_damaged(kept: str, local: str, fallback: bool) -> Any:
    with Checkpointer(kept, local=local, timeout=20) as checkpointer:
        try:
            return loaded(checkpointer, fallback=fallback)
        except (CorruptionError, PeerError) as error:
            return str(error)


def test_a_damaged_step_is_loaded_from_the_other_place(
    gloo: Pool, places: tuple[Path, Path]
) -> None:
    local, kept = places
    save_two(kept, local)
    damage(local, 2)
    for fallback in (False, True):
        found = gloo.run(2, restore_damaged, str(kept), str(local), fallback)
        assert found == [(2, 2.0)] * 2
    damage(kept, 2)
    for message in gloo.run(2, restore_damaged, str(kept), str(local), False):
        assert "has the checksum" in message
    assert gloo.run(2, restore_damaged, str(kept), str(local), True) == [(1, 1.0)] * 2


def test_old_steps_that_cannot_be_deleted_keep_none_from_being_copied(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    local, kept = places
    refuse = StorageError("no right to delete")
    with (
        patch.object(mirror, "prune", side_effect=refuse),
        Checkpointer(kept, local=local, keep_last=1) as checkpointer,
    ):
        for step in (1, 2, 3):
            checkpointer.save(step, state=value(step))
            checkpointer.wait()
    assert steps(kept) == [[1, 2, 3]]
    assert caplog.text.count("older steps could not be deleted") == 3


def test_a_step_that_is_damaged_in_both_places_is_saved_anew_in_both(
    places: tuple[Path, Path],
) -> None:
    local, kept = places
    save_two(kept, local)
    damage(local, 2)
    damage(kept, 2)
    with Checkpointer(kept, local=local) as checkpointer:
        assert loaded(checkpointer, fallback=True) == (1, 1.0)
        checkpointer.save(2, state=value(20))
    for place in places:
        assert not ckptkit.verify(place)
        with Checkpointer(place) as checkpointer:
            assert loaded(checkpointer) == (2, 20.0)


def test_a_manifest_that_is_damaged_in_the_other_place_is_written_anew(
    places: tuple[Path, Path],
) -> None:
    local, kept = places
    save_two(kept, local)
    manifest = kept / "step-0000000002" / MANIFEST
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    with Checkpointer(kept, local=local) as checkpointer:
        assert loaded(checkpointer, fallback=True) == (2, 2.0)
        checkpointer.save(3, state=value(3))
    for place in places:
        assert not ckptkit.verify(place)
        assert ckptkit.Run(place).steps() == [1, 2, 3]


@pytest.mark.parametrize("nearer", [False, True], ids=["in one place", "in two"])
def test_a_step_that_was_asked_for_and_is_damaged_may_replace_to_the_one_before_it(
    places: tuple[Path, Path], nearer: bool
) -> None:
    local, kept = places
    near = local if nearer else None
    with Checkpointer(kept, local=near) as checkpointer:
        for step in (1, 2, 4, 5):
            checkpointer.save(step, state=value(step))
    for place in (local, kept) if nearer else (kept,):
        damage(place, 4)
    with Checkpointer(kept, local=near) as checkpointer:
        assert loaded(checkpointer, step=4, fallback=True) == (2, 2.0)
        with pytest.raises(CorruptionError):
            loaded(checkpointer, step=4)
        with pytest.raises(NotFoundError, match="3"):
            loaded(checkpointer, step=3, fallback=True)


def test_a_step_whose_local_manifest_is_damaged_is_loaded_from_the_other_place(
    places: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    local, kept = places
    save_two(kept, local)
    (local / "step-0000000002" / MANIFEST).write_bytes(b"not a manifest")
    with Checkpointer(kept, local=local) as checkpointer:
        assert loaded(checkpointer) == (2, 2.0)
    (said,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert f"step 2 is damaged in {local}, trying step 2 in {kept}" in said.getMessage()


def save_beside_a_damaged_step(kept: str, local: str) -> list[str]:
    with (
        Checkpointer(kept, local=local, timeout=20) as checkpointer,
        patch.object(mirror.log, "error") as said,
    ):
        assert loaded(checkpointer, fallback=True) == (1, 1.0)
        for step in (4, 5):
            checkpointer.save(step, state=value(step))
            settle(checkpointer)
    return [call.args[0] % call.args[1:] for call in said.call_args_list]


def test_a_damaged_step_that_was_never_copied_does_not_end_the_training(
    gloo: Pool, places: tuple[Path, Path]
) -> None:
    local, kept = places
    with Checkpointer(local) as killed:
        for step in (1, 2, 3):
            killed.save(step, state=value(step))
    damage(local, 2)
    damage(local, 3)
    first, second = gloo.run(2, save_beside_a_damaged_step, str(kept), str(local))
    assert steps(local, kept) == [[1, 2, 3, 4, 5], [1, 4, 5]]
    assert second == []
    assert len(first) == 2
    assert all(
        f"{local}/step-000000000{step} cannot be copied" in first[step - 2] for step in (2, 3)
    )


def test_a_step_that_is_in_one_place_only_is_loaded_from_there(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    local, kept = places
    with Checkpointer(kept, local=local, local_keep_last=1) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state=value(step))
    assert steps(local, kept) == [[2], [1, 2]]
    with Checkpointer(kept, local=local) as checkpointer:
        assert loaded(checkpointer, step=1) == (1, 1.0)
        assert loaded(checkpointer, step=2) == (2, 2.0)
    with Checkpointer(kept, local=tmp_path / "fresh") as checkpointer:
        assert loaded(checkpointer) == (2, 2.0)
    with Checkpointer(tmp_path / "nothing", local=tmp_path / "nor here") as checkpointer:
        assert loaded(checkpointer) is None


def save_where_each_has_a_disk(kept: str, folder: str) -> str:
    local = f"{folder}/{dist.get_rank()}"
    with (
        Checkpointer(kept, local=local, timeout=20) as checkpointer,
        pytest.raises((UsageError, PeerError)) as caught,
    ):
        checkpointer.save(1, state=value(1))
    return str(caught.value)


def test_nothing_is_copied_out_of_the_folder_of_another_run(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    local, kept = places
    with Checkpointer(kept, local=local) as checkpointer:
        checkpointer.save(1, state=value(1))
    with Checkpointer(tmp_path / "other", local=local) as checkpointer:
        for call in (checkpointer.restore, lambda state: checkpointer.save(2, state=state)):
            with pytest.raises(UsageError, match="give every run a local folder of its own"):
                call(state=value(2))
    assert steps(local, tmp_path / "other") == [[1], []]


def test_folders_that_not_all_ranks_see_are_refused(gloo: Pool, places: tuple[Path, Path]) -> None:
    local, kept = places
    for message in gloo.run(2, save_where_each_has_a_disk, str(kept), str(local)):
        assert "rank 1 does not see what rank 0 writes here" in message
    assert not list(local.rglob(MANIFEST))


def fail_to_save(kept: str, local: str) -> str:
    """One rank passes what it must not: the save fails, and rounds of copying go on."""
    bad = {"extra": {}} if dist.get_rank() == 1 else value(2)
    with Checkpointer(kept, local=local, timeout=20, asynchronous=True) as checkpointer:
        checkpointer.save(1, state=value(1))
        with pytest.raises(CkptkitError) as caught:  # noqa: PT012 — rank 0 hears of it later
            checkpointer.save(2, state=bad)
            checkpointer.wait()
        checkpointer.save(3, state=value(3))
    return str(caught.value)


def test_a_save_that_fails_on_one_rank_does_not_upset_copying(
    gloo: Pool, places: tuple[Path, Path]
) -> None:
    local, kept = places
    first, second = gloo.run(2, fail_to_save, str(kept), str(local))
    assert "because of rank 1" in first
    assert "this group is ckptkit's own" in second
    assert steps(local, kept) == [[1, 3], [1, 3]]


def save_and_be_told_to_leave(kept: Path, local: Path) -> None:
    with held_up(), Checkpointer(kept, local=local, on_sigterm="finish") as checkpointer:
        checkpointer.save(1, state=value(1))
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal was not heard")


def test_a_signal_ends_the_process_once_the_step_is_local(places: tuple[Path, Path]) -> None:
    local, kept = places
    with pytest.raises(SystemExit) as ended:
        save_and_be_told_to_leave(kept, local)
    assert ended.value.code == 143
    assert steps(local, kept) == [[1], []]
    with Checkpointer(kept, local=local) as checkpointer:
        assert loaded(checkpointer) == (1, 1.0)
    assert steps(local, kept) == [[1], [1]]


LAST_STATEMENT = """
import sys, torch
from ckptkit.live import Checkpointer
checkpointer = Checkpointer(sys.argv[2], local=sys.argv[1], asynchronous=True)
checkpointer.save(1, model=torch.nn.Linear(1000, 1000))
alone = Checkpointer(sys.argv[3], asynchronous=True)
alone.save(1, model=torch.nn.Linear(2000, 2000))
"""


def test_a_program_that_ends_right_after_saves_finishes_them_and_the_copy(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    every = (*places, tmp_path / "alone")
    command = [sys.executable, "-c", LAST_STATEMENT, *map(str, every)]
    subprocess.run(command, check=True, timeout=100)
    assert steps(*every) == [[1]] * 3
    assert [ckptkit.verify(place) for place in every] == [[]] * 3


def test_a_copy_is_logged(places: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    local, kept = places
    with caplog.at_level(logging.INFO, "ckptkit"), Checkpointer(kept, local=local) as checkpointer:
        checkpointer.save(1, state=value(1))
    assert f"copied step 1 to {kept}" in caplog.text


def test_what_only_a_local_folder_needs_is_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="local_keep_last is for a run with a local folder"):
        Checkpointer(tmp_path, local_keep_last=1)
    with pytest.raises(UsageError, match="the local folder is the run itself"):
        Checkpointer(tmp_path, local=str(tmp_path))
    with pytest.raises(UsageError, match="at least 1"):
        Checkpointer(tmp_path, local=tmp_path / "local", keep_last=0)


def test_a_local_folder_that_is_the_run_by_another_name_is_refused(
    places: tuple[Path, Path],
) -> None:
    local, kept = places
    local.symlink_to(kept)
    with Checkpointer(kept) as checkpointer:
        checkpointer.save(1, state=value(1))
    with Checkpointer(kept, local=local, local_keep_last=1) as checkpointer:
        for step in (2, 3):
            with pytest.raises(UsageError, match="the local folder is the run itself"):
                checkpointer.save(step, state=value(step))
    assert steps(kept) == [[1]]
    assert not list(kept.glob("seen-by-all-*"))


def test_an_open_store_may_be_either_place(places: tuple[Path, Path]) -> None:
    local, kept = places
    with Checkpointer(open_store(kept), local=open_store(local)) as checkpointer:
        assert repr(checkpointer) == f"Checkpointer('{kept}', local='{local}')"
        checkpointer.save(1, state=value(1))
    assert steps(local, kept) == [[1], [1]]
