"""SIGTERM: a save under way is finished, or one more is made at the same step on all ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.errors import UsageError
from ckptkit.live import Checkpointer
from tests.live.pool import Pool
from tests.live.test_async import held_up, value


def train_until_stopped(location: str, signalled: int) -> int:
    """One rank gets the signal in step 3; the step after which this rank stopped."""
    model = nn.Linear(3, 3)
    with Checkpointer(location, on_sigterm="save", asynchronous=True, timeout=30) as checkpointer:
        for step in range(20):
            torch.distributed.barrier()  # as an exchange of gradients does
            if step == 3 and torch.distributed.get_rank() == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpointer.should_stop(step):
                checkpointer.save(step, model=model)
                return step
    return -1


@pytest.mark.parametrize("signalled", [0, 1])
def test_all_ranks_save_and_stop_at_the_same_step(
    gloo: Pool, tmp_path: Path, signalled: int
) -> None:
    stopped = gloo.run(2, train_until_stopped, str(tmp_path), signalled)
    assert len(set(stopped)) == 1
    assert 3 <= stopped[0] <= 6
    assert ckptkit.Run(tmp_path).steps() == [stopped[0]]


def save_and_be_told_to_leave(location: Path) -> None:
    with Checkpointer(location, on_sigterm="finish", asynchronous=True) as checkpointer:
        checkpointer.save(1, model=nn.Linear(300, 300))
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal was not heard")


def save_and_be_told_at_the_end(location: Path, mode: str) -> None:
    with (
        held_up() as go,
        Checkpointer(location, on_sigterm=mode, asynchronous=True) as checkpointer,
    ):
        checkpointer.save(1, state=value(1))
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
        threading.Timer(0.5, go.set).start()


@pytest.mark.parametrize("mode", ["finish", "save"])
def test_a_save_that_the_end_waits_for_is_finished_too(tmp_path: Path, mode: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        save_and_be_told_at_the_end(tmp_path, mode)
    assert ended.value.code == 143
    assert ckptkit.verify(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_save_under_way_is_finished_before_the_process_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        save_and_be_told_to_leave(tmp_path)
    assert ended.value.code == 143
    assert ckptkit.verify(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_save_that_fails_does_not_swallow_the_signal(tmp_path: Path) -> None:
    class Stubborn:
        def state_dict(self) -> dict[str, int]:
            os.kill(os.getpid(), signal.SIGTERM)
            raise ValueError("no state")

        def load_state_dict(self, _: object) -> None: ...

    with pytest.raises(SystemExit) as ended, Checkpointer(tmp_path, on_sigterm="finish") as each:
        each.save(1, state={"a": Stubborn()})
    assert ended.value.code == 143


class Telling:
    """Gets the signal in the middle of a save."""

    def state_dict(self) -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"x": 1}

    def load_state_dict(self, _: object) -> None: ...


@pytest.mark.parametrize("saving", [0, 1])
def test_a_save_is_finished_whichever_of_two_checkpointers_makes_it(
    tmp_path: Path, saving: int
) -> None:
    places = [tmp_path / "newest", tmp_path / "best"]
    with (
        pytest.raises(SystemExit) as ended,
        Checkpointer(places[0], on_sigterm="finish") as first,
        Checkpointer(places[1], on_sigterm="finish") as second,
    ):
        (first, second)[saving].save(1, state={"a": Telling()})
    assert ended.value.code == 143
    assert ckptkit.verify(places[saving]) == []


@pytest.mark.parametrize("modes", [("save", "save"), ("save", "finish"), ("finish", "save")])
def test_all_checkpointers_hear_the_signal_and_may_save_once_more(
    tmp_path: Path, modes: tuple[str, str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        Checkpointer(tmp_path / "newest", on_sigterm=modes[0]) as first,
        Checkpointer(tmp_path / "best", on_sigterm=modes[1]) as second,
    ):
        first.save(1, state=value(1))
        os.kill(os.getpid(), signal.SIGTERM)
        for each in (first, second):
            assert each.should_stop(2)
            each.save(2, state=value(2))
    assert signal.getsignal(signal.SIGTERM) == before


def begin(told: int) -> None:
    os.write(told, b"!")
    time.sleep(60)


@pytest.mark.parametrize("mode", ["save", "finish"])
def test_a_copy_of_the_process_ends_by_the_signal(tmp_path: Path, mode: str) -> None:
    """As workers do, which have no part in a save that is under way."""
    begun = os.pipe()
    with Checkpointer(tmp_path, asynchronous=True, on_sigterm=mode) as each, held_up() as go:
        each.save(1, state=value(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of copies beside threads
            copied = multiprocessing.get_context("fork").Process(target=begin, args=(begun[1],))
            copied.start()
        # What comes while Python still copies the process is forgotten by Python itself.
        assert os.read(begun[0], 1)
        copied.terminate()
        copied.join(20)
        go.set()
        try:
            assert copied.exitcode == -signal.SIGTERM
        finally:
            copied.kill()
            for end in begun:
                os.close(end)


def test_asking_without_listening_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(UsageError, match="on_sigterm"):
        checkpointer.should_stop(1)
