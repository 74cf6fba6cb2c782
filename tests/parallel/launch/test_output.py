"""What is shown of many ranks at once, and in which order."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ckptkit.parallel.launch import output
from ckptkit.parallel.launch.output import Output, Streams

HEADER = "Traceback (most recent call last):"


class Shown:
    """Collects lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, stream: str, line: str) -> None:
        """Take one."""
        self.lines.append(f"{stream}: {line}")


@pytest.fixture
def shown() -> Shown:
    return Shown()


def fail(out: Output, rank: int, problem: str) -> None:
    for line in (HEADER, "  File ...", problem):
        out.line(rank, "stderr", line)


def test_a_line_has_its_rank_and_stays_on_its_stream(shown: Shown) -> None:
    out = Output(shown)
    out.line(3, "stdout", "loss 1.0")
    out.line(0, "stderr", "a warning")
    assert shown.lines == ["stdout: [rank 3] loss 1.0", "stderr: [rank 0] a warning"]


def test_the_first_traceback_is_shown_first_whoever_ends_first(shown: Shown) -> None:
    out = Output(shown)
    fail(out, 2, "ValueError: the reason")
    fail(out, 0, "RuntimeError: connection closed")
    out.ended(0, 1)
    out.ended(2, 3)
    out.tell()
    out.line(1, "stdout", "still here")
    out.finish()
    assert out.first_failure() == (2, 3)
    assert shown.lines == [
        "stderr: rank 2 ended with exit code 3, before any other rank failed:",
        f"stderr: [rank 2] {HEADER}",
        "stderr: [rank 2]   File ...",
        "stderr: [rank 2] ValueError: the reason",
        "stdout: [rank 1] still here",
        f"stderr: [rank 0] {HEADER}",
        "stderr: [rank 0]   File ...",
        "stderr: [rank 0] RuntimeError: connection closed",
    ]


def test_a_rank_that_was_killed_says_nothing_but_is_the_first(shown: Shown) -> None:
    out = Output(shown)
    out.ended(1, -9)
    fail(out, 0, "RuntimeError: connection closed")
    out.ended(0, 1)
    out.tell()
    assert out.first_failure() == (1, -9)
    said = "stderr: rank 1 was ended by signal 9 (SIGKILL), before any other rank failed:"
    assert shown.lines == [said]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(output, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


class Clock:
    """The time, as a test sets it."""

    now = 0.0


def test_a_traceback_that_a_rank_outlives_is_shown_whatever_it_says_then(
    shown: Shown, clock: Clock
) -> None:
    out = Output(shown)
    fail(out, 0, "KeyError: caught and logged")
    clock.now = 0.9
    out.line(0, "stderr", "going on")
    out.tick()
    assert shown.lines == []
    clock.now = 1.1
    out.tick()
    assert shown.lines[-2:] == [
        "stderr: [rank 0] KeyError: caught and logged",
        "stderr: [rank 0] going on",
    ]
    out.line(0, "stderr", "and on")
    assert shown.lines[-1] == "stderr: [rank 0] and on"


def test_a_rank_that_has_outlived_its_traceback_is_not_to_blame(shown: Shown, clock: Clock) -> None:
    out = Output(shown)
    fail(out, 0, "KeyError: caught and logged")
    clock.now = 60.0
    out.tick()
    out.ended(1, -9)
    assert out.first_failure() == (1, -9)
    clock.now = 60.1
    out.ended(0, 1)
    assert out.first_failure() == (1, -9)


def test_a_rank_that_takes_its_time_to_end_is_to_blame(shown: Shown, clock: Clock) -> None:
    out = Output(shown)
    fail(out, 0, "ValueError: the reason")
    clock.now = 2.0
    out.tick()
    out.line(0, "stderr", "a warning at the end of the process")
    fail(out, 1, "RuntimeError: connection closed")
    out.ended(1, 1)
    assert out.first_failure() == (0, None)
    clock.now = 3.0
    out.ended(0, 1)
    assert out.first_failure() == (0, 1)


def test_a_rank_that_is_ended_while_it_dies_failed_of_its_traceback(
    shown: Shown, clock: Clock
) -> None:
    out = Output(shown)
    fail(out, 0, "ValueError: the reason")
    fail(out, 1, "RuntimeError: connection closed")
    clock.now = 0.5
    out.ended(1, 1)
    clock.now = 3.0
    out.ended(0, -15)
    out.tell()
    assert out.first_failure() == (0, None)
    assert shown.lines[0] == "stderr: rank 0 failed, before any other rank failed:"
    assert shown.lines[3] == "stderr: [rank 0] ValueError: the reason"


def test_a_rank_that_goes_on_printing_is_not_to_blame(shown: Shown, clock: Clock) -> None:
    out = Output(shown)
    fail(out, 0, "KeyError: caught and logged")
    clock.now = 2.0
    out.tick()
    out.line(0, "stdout", "loss 1.0")
    out.ended(1, 1)
    assert out.first_failure() == (1, 1)


def test_a_rank_that_ends_well_has_its_traceback_shown(shown: Shown) -> None:
    out = Output(shown)
    fail(out, 0, "KeyError: caught and logged")
    out.ended(0, 0)
    assert len(shown.lines) == 3
    assert out.first_failure() is None


def test_torchs_own_prefix_is_not_shown_twice(shown: Shown) -> None:
    out = Output(shown)
    out.line(1, "stderr", "[rank1]: Warning: x")
    assert shown.lines == ["stderr: [rank 1] Warning: x"]


def test_an_interruption_hides_what_it_caused(shown: Shown) -> None:
    out = Output(shown)
    fail(out, 0, "KeyboardInterrupt")
    fail(out, 1, "ValueError: a real one")
    out.finish(interrupted=True)
    assert shown.lines[-1] == "stderr: [rank 1] ValueError: a real one"
    assert not any("rank 0" in line for line in shown.lines)


def test_streams_hand_over_whole_lines_and_the_rest_at_the_end() -> None:
    found: list[str] = []
    streams = Streams()
    reading, writing = os.pipe()
    streams.add(reading, found.append)
    os.write(writing, b"one\ntw")
    streams.drain()
    assert found == ["one"]
    os.write(writing, "o é\r\n10%\r100%\n\nlast".encode())
    os.close(writing)
    streams.close()
    assert found == ["one", "two é", "100%", "", "last"]


def test_a_line_that_cannot_be_shown_is_an_error_and_leaves_nobody_waiting() -> None:
    def refuse(line: str) -> None:
        raise OSError(28, line)

    streams = Streams()
    reading, writing = os.pipe()
    streams.add(reading, refuse)
    os.write(writing, b"one\n")
    streams.drain()
    with pytest.raises(OSError, match="one"):
        streams.check()
    for _ in range(4):
        os.write(writing, b"x" * 40_000 + b"\n")  # more than a pipe holds
    os.close(writing)
    with pytest.raises(OSError, match="one"):
        streams.close()


def test_all_that_was_printed_is_shown_however_slow_that_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine the last lines were lost."""
    monkeypatch.setattr(output, "_LAST_LINES", 0.001)
    found: list[str] = []

    def slowly(line: str) -> None:
        time.sleep(0.001)
        found.append(line)

    streams = Streams()
    reading, writing = os.pipe()
    printed = list(map(str, range(1000)))
    os.write(writing, "\n".join(printed).encode())
    streams.add(reading, slowly)
    os.close(writing)
    streams.close()
    assert found == printed


def test_nobody_waits_for_what_prints_for_ever() -> None:
    streams = Streams()
    reading, writing = os.pipe()
    streams.add(reading, lambda _: None)

    def print_for_ever() -> None:
        with suppress(BrokenPipeError):
            while True:
                os.write(writing, b"more\n")

    left_behind = threading.Thread(target=print_for_ever)
    left_behind.start()
    streams.close()
    left_behind.join()
    os.close(writing)
