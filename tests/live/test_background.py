"""Work in the background: it gives way, keeps its order, and loses no error."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import warnings

import pytest

from ckptkit.live.background import Background


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere priorities are those of whole processes"
)
def test_what_runs_in_the_background_gives_way_and_so_do_its_threads() -> None:
    found: dict[str, int] = {}

    def look(who: str) -> None:
        found[who] = os.getpriority(os.PRIO_PROCESS, 0)

    def work() -> None:
        look("work")
        thread = threading.Thread(target=look, args=("its thread",))
        thread.start()
        thread.join()

    look("before")
    background = Background()
    background.run(work, "step 1")
    background.wait()
    look("after")
    assert found["before"] == found["after"]
    assert found["work"] == found["its thread"] == min(19, found["before"] + 15)


def test_without_a_thread_to_be_had_the_work_is_done_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    background, done = Background(), list[int]()
    for number in range(2):
        background.run(lambda number=number: done.append(number), "step 1")  # type: ignore[misc]
    background.wait()
    assert done == [0, 1]


def test_a_process_that_is_copied_meanwhile_ends_by_itself() -> None:
    """As workers of data loaders do: the thread is in the first process alone."""
    goes_on = threading.Event()

    def work() -> None:
        goes_on.wait()

    background = Background()
    background.run(work, "step 1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copies beside threads
        copied = multiprocessing.get_context("fork").Process(target=len, args=("",))
        copied.start()
    copied.join(20)
    try:
        assert copied.exitcode == 0
    finally:
        copied.kill()
        goes_on.set()
        background.wait()


def failing(number: int) -> None:
    raise ArithmeticError(number)


def test_rounds_keep_the_order_of_their_turns_and_the_errors_of_each() -> None:
    done: list[int] = []
    rounds = Background()
    first, second, third = (
        rounds.turn(lambda: done.append(1), "the first"),
        rounds.turn(lambda: failing(2), "the second"),
        rounds.turn(lambda: done.append(3), "the third"),
    )
    third()
    second()
    assert (done, rounds.newest_failure()) == ([], None)
    first()
    rounds.settle()
    assert done == [1, 3]
    failure = rounds.newest_failure()
    assert failure is not None
    assert failure[0] == 2
    assert rounds.take(1) is None
    assert str(rounds.take(2)) == "2"
    assert rounds.take() is None


def test_rounds_that_are_given_up_are_not_begun_or_waited_for() -> None:
    go, begun, done = threading.Event(), threading.Event(), list[int]()
    rounds = Background()

    def long() -> None:
        begun.set()
        assert go.wait(30)
        failing(1)

    rounds.run(long, "the first")
    rounds.run(lambda: done.append(2), "the second")
    assert begun.wait(30)
    rounds.give_up()
    rounds.settle()
    assert rounds.take() is None
    go.set()
    assert not done


def test_a_failure_is_said_at_once_and_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    background = Background()
    background.run(lambda: failing(7), "saving step 1")
    background.settle()
    assert "saving step 1 failed: ArithmeticError: 7" in caplog.text
    with pytest.raises(ArithmeticError, match="7"):
        background.wait()
    background.wait()
