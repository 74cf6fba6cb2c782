"""Work that threads share out: each item once, and of errors the one that explains the others."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest

from ckptkit.checkpoint.workers import share_out


def test_each_item_is_taken_once() -> None:
    found: list[int] = []
    share_out(iter(range(100)), found.append, 4)
    assert sorted(found) == list(range(100))


def test_the_error_that_others_came_from_is_raised() -> None:
    met = threading.Barrier(2)
    first = RuntimeError("the reason")

    def work(number: int) -> None:
        met.wait(10)
        if number == 0:
            failed.wait(10)
            raise first
        failed.set()
        raise ValueError("a consequence") from first

    failed = threading.Event()
    with pytest.raises(RuntimeError, match="the reason"):
        share_out(range(2), work, 2)


def test_what_failed_threads_held_is_let_go_of_with_their_error() -> None:
    class Held:
        pass

    known: list[weakref.ref[Held]] = []

    def work(number: int) -> None:
        held = Held()
        known.append(weakref.ref(held))
        raise RuntimeError(str(number))

    gc.disable()
    try:
        with pytest.raises(RuntimeError) as caught:
            share_out(range(4), work, 4)
        del caught
        assert [each() for each in known] == [None] * len(known)
    finally:
        gc.enable()


def test_any_number_of_interrupts_waits_for_what_is_under_way() -> None:
    begun, go, done = threading.Barrier(3), threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.wait(60)
        go.wait(60)
        done.append(number)

    def interrupt() -> None:
        begun.wait(60)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
        go.set()

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        share_out(range(2), work, 2)
    assert sorted(done) == [0, 1], "the caller's memory is free when the error comes"
    other.join()
