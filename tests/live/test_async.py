"""Saves in the background: what they hold, and that no failure of theirs is lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

import ckptkit
from ckptkit.checkpoint import workers
from ckptkit.checkpoint.write.commit import commit
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.checkpoint.write.writer import Writer
from ckptkit.errors import CkptkitError, PeerError, StorageError, UsageError
from ckptkit.live import Checkpointer, save
from ckptkit.live.save import prepare
from tests.live.gathering import Arrays, gathered, same, scramble
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, build

begin = Pack.begin


@contextmanager
def held_up() -> Iterator[threading.Event]:
    """Packs are written when the event is set."""
    go = threading.Event()

    def late(*arguments: Any, **keywords: Any) -> None:
        assert go.wait(30)
        begin(*arguments, **keywords)

    with patch.object(Pack, "begin", late):
        yield go


@contextmanager
def broken(rank: int) -> Iterator[None]:
    """The disk of one rank refuses."""

    def refuse(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is gone")

    with patch.object(Pack, "begin", refuse if dist.get_rank() == rank else begin):
        yield


def value(number: float) -> dict[str, Any]:
    """A state of one number."""
    return {"s": {"x": torch.full((3,), number)}}


def cancelled(folder: str, by: tuple[int, ...]) -> tuple[bool, str, list[str], list[int]]:
    """What `cancel` says, what is raised then, what is left of the step, and what comes after."""
    rank = dist.get_rank()
    with Checkpointer(folder, timeout=30, asynchronous=True) as checkpointer:
        checkpointer.save(1, state=value(1))
        checkpointer.wait()
        with held_up() as go:
            checkpointer.save(2, state=value(2))
            threading.Timer(0.2, go.set).start()
            given_up = rank in by and checkpointer.cancel()
            said = ""
            try:
                checkpointer.wait()
            except PeerError as error:
                said = str(error)
        dist.barrier()
        left = sorted(path.name for path in Path(folder).iterdir())
        dist.barrier()
        checkpointer.save(2, state=value(3))
        checkpointer.wait()
        return given_up, said, left, checkpointer.run.steps()


@pytest.mark.parametrize("by", [(0,), (1,), (0, 1)])
def test_a_save_that_is_cancelled_leaves_nothing(
    gloo: Pool, tmp_path: Path, by: tuple[int, ...]
) -> None:
    for rank, (given_up, said, left, steps) in enumerate(gloo.run(2, cancelled, str(tmp_path), by)):
        assert given_up is (rank in by)
        assert ("the save was cancelled" in said) is (rank not in by)
        assert left == ["step-0000000001"]
        assert steps == [1, 2]


def cancelled_too_late(folder: str) -> bool:
    """What `cancel` says on the other rank while the first one commits."""
    committing = Path(folder).with_name("committing")

    def late(*arguments: Any, **keywords: Any) -> None:
        committing.touch()
        time.sleep(0.5)
        commit(*arguments, **keywords)

    with (
        patch("ckptkit.checkpoint.write.writer.commit", late),
        Checkpointer(folder, timeout=30, asynchronous=True) as checkpointer,
    ):
        checkpointer.save(1, state=value(1))
        while not committing.exists():
            time.sleep(0.01)
        given_up = dist.get_rank() == 1 and checkpointer.cancel()
        checkpointer.wait()
        return given_up


def test_a_step_that_is_being_committed_is_cancelled_on_no_rank(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, cancelled_too_late, str(tmp_path / "run")) == [False, False]
    assert ckptkit.Run(tmp_path / "run").steps() == [1]


def test_only_what_is_under_way_can_be_cancelled(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        assert checkpointer.cancel() is False
        with held_up() as go:
            checkpointer.save(1, state=value(1))
            threading.Timer(0.1, go.set).start()
            assert checkpointer.cancel(patience=30) is False
        assert checkpointer.run.steps() == [1]
        with held_up() as go:
            checkpointer.save(2, state=value(2))
            threading.Timer(0.1, go.set).start()
            assert checkpointer.cancel() is True
        checkpointer.wait()
        assert checkpointer.run.steps() == [1]
        assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001"]


def save_and_change(layout: str, location: str) -> Arrays:
    job = build(layout)
    job.train(range(2))
    rate = job.optimizer.param_groups[0]["lr"]
    expected = gathered(job)
    with (
        held_up() as go,
        Checkpointer(location, timeout=30, asynchronous=True, differing=["*seen"]) as checkpointer,
    ):
        checkpointer.save(2, model=job.model, optimizer=job.optimizer, extra={"list": [1]})
        assert not checkpointer.run.steps()
        job.train(range(2, 3))
        scramble(job, forget=False)
        job.optimizer.param_groups[0]["lr"] = 100.0
        go.set()
        checkpointer.wait()
        assert checkpointer.run.steps() == [2]
        job.optimizer.param_groups[0]["lr"] = rate
    return expected


@pytest.mark.parametrize("layout", ["plain", "ddp:2", "fsdp2:3", "zero1:2", "pp:2", "fsdp1:2"])
def test_what_changes_after_save_has_returned_is_not_saved(
    gloo: Pool, tmp_path: Path, layout: str
) -> None:
    whole: dict[str, Any] = {}
    for rank in gloo.run(LAYOUTS[layout].ranks, save_and_change, layout, str(tmp_path)):
        whole = dict(rank) | whole
    with ckptkit.open(tmp_path) as step:
        assert not [name for name in whole if not same(step.read(name), whole[name])]
        assert step.objects["optimizer"][0]["groups"][0]["options"]["lr"] == 0.03


def fail_in_background(location: str, surface: str) -> str:
    checkpointer = Checkpointer(location, timeout=20, asynchronous=True)
    with pytest.raises(CkptkitError) as caught, broken(rank=1):  # noqa: PT012
        checkpointer.save(1, state=value(1))
        if surface == "exit":
            with checkpointer:
                pass
        if surface == "wait":
            checkpointer.wait()
        if surface == "save":
            checkpointer.save(2, state=value(2))
        if surface == "restore":
            checkpointer.restore(state=value(0))
    if surface != "exit":
        checkpointer.wait()  # it was said once
        checkpointer.save(3, state=value(3))
        checkpointer.close()
        checkpointer.close()
    with pytest.raises(UsageError, match="closed"):
        checkpointer.save(4, state=value(4))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("surface", ["exit", "wait", "save", "restore"])
def test_a_failure_in_the_background_surfaces_on_all_ranks(
    gloo: Pool, tmp_path: Path, surface: str
) -> None:
    messages = gloo.run(3, fail_in_background, str(tmp_path), surface)
    assert messages[1].startswith("StorageError: the disk is gone")
    for message in (messages[0], messages[2]):
        assert "because of rank 1: StorageError: the disk is gone" in message
    assert ckptkit.Run(tmp_path).steps() == ([] if surface == "exit" else [3])


def end_the_job_meanwhile(location: str) -> list[int]:
    """As at the end of a program, where rank 0 serves the store."""
    rank, first = dist.get_rank(), dist.distributed_c10d._get_default_store()
    port = torch.tensor(0)
    store = None
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.fill_(store.port)
    dist.broadcast(port, 0)
    store = store or TCPStore("127.0.0.1", int(port), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    del store
    try:
        with held_up() as go, Checkpointer(location, timeout=20, asynchronous=True) as checkpointer:
            checkpointer.save(1, state=value(1))
            dist.destroy_process_group()
            go.set()
            checkpointer.wait()
            return checkpointer.run.steps()
    finally:
        again = PrefixStore("again", first)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=2)


def test_a_save_is_finished_though_the_process_group_ends(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, end_the_job_meanwhile, str(tmp_path)) == [[1], [1]]
    assert ckptkit.verify(tmp_path) == []


def fail_beside(location: str) -> str:
    with broken(rank=0):
        checkpointer = Checkpointer(location, timeout=20, asynchronous=True)
        checkpointer.save(1, state=value(1))
        with pytest.raises(ZeroDivisionError), checkpointer:
            raise ZeroDivisionError
    return "raised"


def test_the_error_that_ends_a_block_is_not_replaced(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, fail_beside, str(tmp_path)) == ["raised"] * 2


def save_while_busy(location: str, when_busy: str) -> list[bool]:
    with (
        held_up() as go,
        Checkpointer(location, timeout=30, asynchronous=True, when_busy=when_busy) as checkpointer,
    ):
        threading.Timer(0.3, go.set).start()
        did = [checkpointer.save(step, state=value(step)) for step in (1, 2)]
        checkpointer.wait()
        did.append(checkpointer.save(3, state=value(3)))
    return [each is not None for each in did]


@pytest.mark.parametrize(
    ("when_busy", "did", "steps"),
    [("wait", [True, True, True], [1, 2, 3]), ("skip", [True, False, True], [1, 3])],
)
def test_a_save_during_another_waits_or_is_skipped(
    gloo: Pool, tmp_path: Path, when_busy: str, did: list[bool], steps: list[int]
) -> None:
    assert gloo.run(2, save_while_busy, str(tmp_path), when_busy) == [did] * 2
    assert ckptkit.Run(tmp_path).steps() == steps
    for step in steps:
        with ckptkit.Run(tmp_path).open(step) as opened:
            assert opened.read("s/x").tolist() == [float(step)] * 3


def train_meanwhile(location: str) -> None:
    job = build("ddp:2")
    with (
        held_up() as go,
        Checkpointer(location, timeout=30, asynchronous=True, differing=["*seen"]) as checkpointer,
    ):
        checkpointer.save(0, model=job.model, optimizer=job.optimizer)
        job.train(range(3))
        go.set()
        job.train(range(3))


def test_ranks_that_write_late_do_not_hold_up_the_training(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, train_meanwhile, str(tmp_path))
    assert ckptkit.Run(tmp_path).steps() == [0]


def save_ahead_of_the_others(location: str) -> str:
    """Buffers have to be the same on all ranks: once they are not, and then they are."""
    rank, model, said = dist.get_rank(), nn.BatchNorm1d(4), ""
    nn.init.constant_(model.get_buffer("running_mean"), float(rank))
    with Checkpointer(location, timeout=20, asynchronous=True) as checkpointer:
        for step in (1, 2):
            if rank:
                dist.barrier()  # where rank 0 comes when its `save` has returned
            checkpointer.save(step, model=model)
            # The copy is what counts.
            nn.init.zeros_(model.get_buffer("running_mean"))
            if not rank:
                dist.barrier()
            try:
                checkpointer.wait()
            except PeerError as error:
                said += str(error)
    return said


def test_what_has_to_be_alike_is_compared_while_the_training_goes_on(
    gloo: Pool, tmp_path: Path
) -> None:
    found = gloo.run(3, save_ahead_of_the_others, str(tmp_path))
    assert found == [found[0]] * 3
    assert found[0].startswith("model/running_mean: the values of rank 1, 2 are not those")
    assert ckptkit.Run(tmp_path).steps() == [2]
    assert ckptkit.verify(tmp_path) == []


def wrong_on_one_rank(location: str, call: str) -> list[Any]:
    """One rank passes what it must not, and then all do what is right."""
    is_wrong = dist.get_rank() == 1
    bad = {"extra": {}} if is_wrong else value(1)
    with Checkpointer(location, timeout=20) as checkpointer:
        checkpointer.save(1, state=value(1))
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: checkpointer.save(2, state=bad),
            "restore": lambda: checkpointer.restore(state=bad),
            "value": lambda: checkpointer.save(2, extra={"x": object() if is_wrong else 1}),
            "step": lambda: checkpointer.save(3 if is_wrong else 2, state=value(1)),
        }
        started = time.monotonic()
        with pytest.raises(CkptkitError) as caught:
            calls[call]()
        took = time.monotonic() - started
        checkpointer.save(4, state=value(4))
        state = value(0)
        restored = checkpointer.restore(state=state)
        assert restored
    return [str(caught.value), took, restored.step, float(state["s"]["x"][0])]


@pytest.mark.parametrize("call", ["save", "restore", "value", "step"])
def test_what_is_wrong_on_one_rank_is_an_error_on_all_and_then_forgotten(
    gloo: Pool, tmp_path: Path, call: str
) -> None:
    for rank, (message, took, step, found) in enumerate(
        gloo.run(3, wrong_on_one_rank, str(tmp_path), call)
    ):
        assert rank == 1 or "rank 1" in message
        assert took < 10
        assert (step, found) == (4, 4.0)


@pytest.mark.parametrize(
    ("cores", "asynchronous", "threads"), [(1, True, 1), (2, True, 2), (9, True, 2), (1, False, 6)]
)
def test_a_rank_without_two_cores_writes_by_one_thread_beside_the_training(
    tmp_path: Path, cores: int, asynchronous: bool, threads: int
) -> None:
    found: list[int] = []

    def noting(*arguments: Any, **options: Any) -> Writer:
        found.append(options["threads"])
        return Writer(*arguments, **options)

    with (
        patch.object(workers, "cores", lambda: cores),
        patch.object(sys.modules[prepare.__module__], "Writer", noting),
        Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer,
    ):
        checkpointer.save(1, state=value(1.0))
    assert found == [threads]


def test_a_save_says_where_the_step_is(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, asynchronous=True, when_busy="skip") as checkpointer:
        with held_up() as go:
            said = checkpointer.save(1, state=value(1))
            assert checkpointer.save(2, state=value(2)) is None
            go.set()
        checkpointer.wait()
    assert said is not None
    with ckptkit.open(said) as checkpoint:
        assert checkpoint.step == 1
    assert save(tmp_path, step=3, state=value(3)).endswith("/step-0000000003")
