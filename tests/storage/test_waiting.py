"""Answers that one thread waits for and others asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptkit.storage.objects.waiting import waited_for


async def asleep(given_up: threading.Event) -> None:
    """No answer in time."""
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        given_up.set()
        raise


def test_many_wait_side_by_side_and_each_gets_its_own() -> None:
    count = 40
    asked = 0
    all_asked = asyncio.Event()

    async def answer(number: int) -> int:
        nonlocal asked
        asked += 1
        if asked == count:
            all_asked.set()
        await all_asked.wait()
        return number

    with ThreadPoolExecutor(count) as threads:
        answers = list(threads.map(lambda number: waited_for(lambda: answer(number)), range(count)))
    assert answers == [*range(count)]
    assert sum(each.name == "ckptkit answers" for each in threading.enumerate()) == 1


def test_an_error_is_raised_where_it_was_waited_for() -> None:
    async def fails() -> None:
        raise ValueError("as it was")

    with pytest.raises(ValueError, match="as it was"):
        waited_for(fails)


def test_who_is_interrupted_gives_the_question_up() -> None:
    given_up = threading.Event()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        waited_for(lambda: asleep(given_up))
    assert given_up.wait(10)


def test_a_process_ends_while_others_still_wait() -> None:
    program = """
import asyncio, threading, time
from ckptkit.storage.objects.waiting import waited_for
asked = threading.Event()
async def never():
    asked.set()
    await asyncio.sleep(600)
threading.Thread(target=waited_for, args=(never,), daemon=True).start()
asked.wait()
"""
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
