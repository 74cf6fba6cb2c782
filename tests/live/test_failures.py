"""Ranks that die, steps that were never finished, and bytes that have changed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import fully_shard

import ckptkit
from ckptkit.checkpoint.places import step_name
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    PeerError,
    StepExistsError,
    StorageError,
)
from ckptkit.live import Checkpointer, background
from ckptkit.live.state.ranks import StoreRanks, World
from tests.live.pool import Died, Pool


def model(number: float) -> nn.Module:
    made = nn.Linear(16, 8)
    for parameter in made.parameters():
        nn.init.constant_(parameter, number)
    fully_shard(made)
    return made


def first_value(module: nn.Module) -> float:
    local: Any = next(module.parameters())
    return float(local.to_local().flatten()[0])


def die_while_saving(location: str, dying: int, asynchronous: bool) -> Any:
    begin = Pack.begin

    def die(*arguments: Any, **keywords: Any) -> None:
        if dist.get_rank() == dying:
            os._exit(9)
        begin(*arguments, **keywords)

    save_steps(location, [1])
    with Checkpointer(location, timeout=2, asynchronous=asynchronous) as checkpointer:
        started = time.monotonic()
        with patch.object(Pack, "begin", die), pytest.raises(PeerError) as caught:  # noqa: PT012
            checkpointer.save(2, model=model(2.0))
            checkpointer.wait()
    return [str(caught.value), time.monotonic() - started]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_that_dies_leaves_no_step_and_is_named(
    gloo: Pool, tmp_path: Path, dying: int, asynchronous: bool
) -> None:
    found = gloo.run(3, die_while_saving, str(tmp_path), dying, asynchronous, may_die=[dying])
    assert found.pop(dying) == Died(9)
    for message, took in found:
        assert f"rank {dying} did not come within 2 s" in message
        assert took < 8
    assert ckptkit.Run(tmp_path).steps() == [1]
    (tmp_path / "step-0000000003" / "data").mkdir(parents=True)  # left by another that died
    assert gloo.run(2, restore, str(tmp_path), False) == [[1, 1.0, []]] * 2


class Listening(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep errors."""
        if record.levelno >= logging.ERROR:
            self.messages.append(record.getMessage())


def restore(location: str, fallback: bool) -> list[Any]:
    made, heard = model(0.0), Listening()
    logger = logging.getLogger("ckptkit.live")
    logger.addHandler(heard)
    try:
        with Checkpointer(location, timeout=20) as checkpointer:
            try:
                restored = checkpointer.restore(model=made, fallback=fallback)
            except CkptkitError as error:
                return [f"{type(error).__name__}: {error}"]
    finally:
        logger.removeHandler(heard)
    assert restored
    return [restored.step, first_value(made), heard.messages]


def save_steps(location: str, steps: Sequence[int]) -> None:
    with Checkpointer(location, timeout=20) as checkpointer:
        for step in steps:
            checkpointer.save(step, model=model(float(step)))


def damage(location: Path, step: int, rank: int) -> None:
    """A bit of a value that a rank has saved."""
    with ckptkit.Run(location).open(step) as opened:
        manifest = opened.manifest
        offset = int(manifest.offset[manifest.pack == rank][0])
    (path,) = (location / f"step-{step:010d}").rglob(manifest.packs[rank].name)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_step_is_an_error_on_all_ranks_or_they_all_go_back(
    gloo: Pool, tmp_path: Path, rank: int
) -> None:
    gloo.run(2, save_steps, str(tmp_path), [1, 2, 3])
    damage(tmp_path, 3, rank)
    for number, (message,) in enumerate(gloo.run(2, restore, str(tmp_path), False)):
        assert "CorruptionError" in message
        assert number == rank or f"because of rank {rank}" in message
    for step, value, logged in gloo.run(2, restore, str(tmp_path), True):
        assert (step, value) == (2, 2.0)
        assert "step 3 is damaged" in logged[0]
    damage(tmp_path, 2, 1 - rank)
    damage(tmp_path, 1, 0)
    for (message,) in gloo.run(2, restore, str(tmp_path), True):
        assert "CorruptionError" in message


def test_a_damaged_manifest_makes_all_ranks_go_back(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_steps, str(tmp_path), [1, 2])
    path = tmp_path / "step-0000000002" / "manifest.msgpack"
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    for step, value, _ in gloo.run(2, restore, str(tmp_path), True):
        assert (step, value) == (1, 1.0)


def save_again_where_it_was_damaged(location: str) -> None:
    with Checkpointer(location, timeout=20) as checkpointer:
        restored = checkpointer.restore(model=model(0.0), fallback=True)
        assert restored
        assert restored.step == 1
        for step in (2, 3):
            checkpointer.save(step, model=model(10.0 * step))
        # What is sound now is no longer replaced.
        with pytest.raises((StepExistsError, PeerError), match="committed already"):
            checkpointer.save(3, model=model(0.0))


def test_steps_that_a_load_went_past_are_saved_anew(gloo: Pool, tmp_path: Path) -> None:
    """A job that may go back would end at their numbers, again after each start."""
    gloo.run(2, save_steps, str(tmp_path), [1, 2, 3])
    damage(tmp_path, 2, 1)
    manifest = tmp_path / "step-0000000003" / "manifest.msgpack"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    gloo.run(2, save_again_where_it_was_damaged, str(tmp_path))
    for step in (2, 3):
        assert not ckptkit.verify(tmp_path / step_name(step))
    for step, value, _ in gloo.run(2, restore, str(tmp_path), False):
        assert (step, value) == (3, 30.0)


def save_where_nothing_is_deleted(location: str) -> list[str]:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("no right to delete", where=location)

    with (
        patch("ckptkit.live.background.prune", refuse),
        patch.object(background.log, "error") as said,
        Checkpointer(location, keep_last=1, asynchronous=True, timeout=20) as checkpointer,
    ):
        for step in (1, 2, 3):
            checkpointer.save(step, model=model(1.0))
    return [call.args[0] % call.args[1:] for call in said.call_args_list]


def test_old_steps_that_cannot_be_deleted_cost_no_new_one(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(2, save_where_nothing_is_deleted, str(tmp_path))
    assert ckptkit.Run(tmp_path).steps() == [1, 2, 3]
    assert len(first) == 3
    assert "step 3 was saved, but older ones could not be deleted" in first[2]
    assert "no right to delete" in first[2]
    assert second == []


def restore_what_does_not_fit(location: str) -> str:
    with Checkpointer(location, timeout=20) as checkpointer, pytest.raises(CkptkitError) as caught:
        checkpointer.restore(model=nn.Linear(3, 3), fallback=True)
    return str(caught.value)


def test_going_back_is_for_damage_only(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_steps, str(tmp_path), [1, 2])
    for message in gloo.run(2, restore_what_does_not_fit, str(tmp_path)):
        assert "(8, 16) in the step, (3, 3) here" in message


def list_nothing(location: str) -> str:
    def refuse(self: Run) -> int:
        raise StorageError("cannot list")

    with (
        patch.object(Run, "latest", refuse),
        Checkpointer(location, timeout=20) as checkpointer,
        pytest.raises(CkptkitError) as caught,
    ):
        checkpointer.restore(model=model(0.0))
    return str(caught.value)


def test_all_ranks_learn_that_the_run_cannot_be_listed(gloo: Pool, tmp_path: Path) -> None:
    first, second = gloo.run(2, list_nothing, str(tmp_path))
    assert first.startswith("cannot list")
    assert "because of rank 0: StorageError: cannot list" in second


def call_unlike(location: str, local: str | None, rank: int) -> list[str]:
    """One rank has a local folder, or another place."""
    mine = dist.get_rank() == rank
    place = location if local or mine else f"{location}-2"
    near, told = local if mine else None, []
    for call in ("restore", "save"):
        with Checkpointer(place, local=near, timeout=30) as checkpointer:
            try:
                how = {"step": 1} if call == "save" else {}
                getattr(checkpointer, call)(model=model(1), **how)
            except CkptkitError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize("rank", [0, 1])
def test_a_local_folder_of_some_ranks_is_refused(gloo: Pool, tmp_path: Path, rank: int) -> None:
    for told in gloo.run(2, call_unlike, str(tmp_path / "run"), str(tmp_path / "near"), rank):
        assert [("`local` is passed on rank 1" in message) for message in told] == [True, True]
    assert not list(tmp_path.rglob("step-*"))


def test_ranks_that_save_to_different_places_are_told_that(gloo: Pool, tmp_path: Path) -> None:
    for told in gloo.run(2, call_unlike, str(tmp_path / "run"), None, 0):
        assert "not all ranks save to this place" in told[-1]
    assert Run(tmp_path / "run").steps() == []


def lose_the_store() -> str:
    rank = dist.get_rank()
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.broadcast(torch.tensor(store.port), 0)
        StoreRanks(World(0, 2, store), "first").wait()
        dist.barrier()  # the other has seen that both were there
        os._exit(3)
    port = torch.tensor(0)
    dist.broadcast(port, 0)
    world = World(1, 2, TCPStore("127.0.0.1", int(port), is_master=False))
    StoreRanks(world, "first").wait()
    dist.barrier()
    with pytest.raises(PeerError) as caught:
        StoreRanks(world, "second", timeout=10).wait()
    return str(caught.value)


def test_a_store_that_is_gone_is_said_to_be(gloo: Pool) -> None:
    assert "store does not answer" in gloo.run(2, lose_the_store, may_die=[0])[1]


def test_one_process_goes_back_too(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state={"s": {"x": torch.full((64,), float(step))}})
        damage(tmp_path, 2, 0)
        state = {"x": torch.zeros(64)}
        with pytest.raises(CorruptionError):
            checkpointer.restore(state={"s": state})
        assert checkpointer.restore(state={"s": state}, fallback=True)
        assert state["x"].tolist() == [1.0] * 64
