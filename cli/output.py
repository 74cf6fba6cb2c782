"""What goes to stdout: aligned lines for people, one document for programs; and, on stderr, a bar
for work that turns out to take longer than a moment, and what went wrong, with the exit code of it.

In a terminal tables fit its width, and strategies have colours. What is piped is as wide as it
needs to be, and plain.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import reprlib
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TextIO

import click

import ckptkit
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    FormatError,
    NotFoundError,
    PeerError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

PATIENCE = 1.0
_STRATEGY = re.compile(r"(?<![\w.:/%-])(?:\w+=)?(ddp|fsdp|zero[123]|tp|pp|ep):\d+\b(?!/)")
_COLOURS = {"ddp": 32, "fsdp": 36, "zero1": 34, "zero2": 34, "zero3": 34, "tp": 35, "pp": 33}
_BLOCKS = " ▏▎▍▌▋▊▉█"
# Where a terminal has letters of ASCII only, or of one country.
_PLAIN = str.maketrans({"…": "~", **dict(zip(_BLOCKS, "    ####" + "#", strict=True))})
_LEAST, _BAR, _LEAST_BAR = 16, 20, 6  # letters


class Reply(NamedTuple):
    """What a command has found."""

    document: Any
    """For programs."""
    lines: Iterable[str] = ()
    """What people see; worked out when it is asked for."""
    remarks: Sequence[str] = ()
    """What people are told besides, on stderr."""
    code: int = 0
    """The exit code."""

    def show(self, *, as_json: bool) -> None:
        """Print it."""
        if as_json:
            text = json.dumps(self.document, separators=(",", ":"), allow_nan=False)
            with printing():
                click.echo(text)
            return
        emit(self.lines)
        for line in self.remarks:
            remark(line)


@contextmanager
def keeping() -> Iterator[None]:
    """Python looks for no garbage meanwhile: some objects for each of many arrays are kept to the
    end.
    """
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


def emit(lines: Iterable[str]) -> None:
    """Print lines; one write, since there may be many."""
    found = [printable(line) for line in lines]
    if found:
        text = "\n".join(found)
        try:
            "…█".encode(sys.stdout.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            text = text.translate(_PLAIN)
        # Whether stdout is a terminal that shows colours, and they are wanted.
        is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if screen_width() is not None and not is_plain:
            text = _STRATEGY.sub(
                lambda part: f"\x1b[{_COLOURS.get(part[1], 31)}m{part[0]}\x1b[0m", text
            )
        with printing():
            click.echo(text)


def remark(line: str) -> None:
    """Print a line on stderr; where that cannot be written, there is nobody to tell."""
    try:
        click.echo(printable(line), err=True)
    except OSError:
        let_go(sys.stderr)


def screen_width() -> int | None:
    """The columns of the terminal that stdout is; None where it is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextmanager
def printing(to: TextIO | None = None) -> Iterator[None]:
    """Say what is wrong with stdout, or another, that cannot be written; that its reader went away
    is nothing to talk about.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        let_go(to or sys.stdout)
        raise StorageError(
            f"the output cannot be written: {error.strerror}",
            where="stderr" if to is sys.stderr else "stdout",
        ) from error


def let_go(stream: TextIO) -> None:
    """Python flushes streams once more at its end, and would complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(line: str) -> str:
    """A line with control characters escaped: what a file says must not steer a terminal."""
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def aligned(
    rows: Sequence[Sequence[str]],
    *,
    right: Iterable[int] = (),
    spare: Sequence[int] = (),
    is_cut: bool = False,
    bars: Sequence[float] = (),
) -> list[str]:
    """Rows of text as lines with columns of one width, those in `right` flush right.

    Columns with nothing in them are left out. So are those in `spare`, one after another, where a
    terminal is too narrow; where `is_cut` the names in the first column lose their middle then, if
    that helps. A terminal that has room shows `bars`, numbers from 0 to 1, behind the rows.
    """
    if not rows:
        return []
    columns: list[Sequence[str]] = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    shown = [number for number, most in enumerate(widths) if most]
    width = screen_width()
    if width is not None:
        for number in spare:
            if number in shown and _together(widths, shown) > width:
                shown.remove(number)
        too_wide = _together(widths, shown) - width
        # Where even short names would not make them fit, lines are broken anyway.
        if is_cut and 0 < too_wide <= widths[0] - _LEAST:
            widths[0] -= too_wide
            columns[0] = [_cut(text, widths[0]) for text in columns[0]]
    sides = set(right)
    forms = [f"{{:{'>' if number in sides else '<'}{widths[number]}}}" for number in shown]
    first, rest = forms[0], "".join(f"  {form}" for form in forms[1:])
    # Of many rows most end as others do.
    ends: dict[tuple[str, ...], str] = {}
    lines = []
    for name, *end in zip(*(columns[number] for number in shown), strict=True):
        if (key := tuple(end)) not in ends:
            ends[key] = rest.format(*end)
        lines.append((first.format(name) + ends[key]).rstrip())
    length = 0 if width is None else min(_BAR, width - _together(widths, shown) - 2)
    if not bars or length < _LEAST_BAR:
        return lines
    start = _together(widths, shown) + 2
    return [
        f"{line:<{start}}{_bar(share, length)}" if share else line
        for line, share in zip(lines, bars, strict=True)
    ]


def _together(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[number] for number in shown) + 2 * (len(shown) - 1)


def _cut(text: str, width: int) -> str:
    """A text without its middle, where it is too long; its end says more than its beginning."""
    if len(text) <= width:
        return text
    kept = (width - 1) // 3
    return f"{text[:kept]}…{text[kept + 1 - width :]}"


def _bar(share: float, length: int) -> str:
    """A bar of blocks, the last of which may be narrow; what there is has at least some of one."""
    eighths = max(1, round(share * length * 8))
    return _BLOCKS[8] * (eighths // 8) + _BLOCKS[eighths % 8].strip()


def counted(number: int, what: str) -> str:
    """`1 pack`, `8 packs`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def json_value(value: Any) -> Any:
    """A value as JSON has it; what JSON lacks is `{"type": …, "text": …}`, in short."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    # Readers of JSON may hold numbers as doubles.
    if isinstance(value, int) and abs(value) <= 1 << 53:
        return value
    if isinstance(value, list):
        return [json_value(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: json_value(item) for key, item in value.items()}
    return Spelled(type=type(value).__name__, text=_SHORT.repr(value))


class Spelled(dict[str, str]):
    """A value that JSON lacks; as text it is what it was."""


def in_short(value: Any, width: int = 72) -> str:
    """A value on one line, cut where it gets long."""
    text = _SHORT.repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."


class _Short(reprlib.Repr):
    """repr with bounds, by the name of the type, as `reprlib` asks for."""

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:  # Python turns no integer of thousands of digits into text
            return f"<an integer of {value.bit_length()} bits>"

    def repr_Spelled(self, value: Spelled, level: int) -> str:  # noqa: ARG002, N802
        return value["text"]

    def repr_bytes(self, value: bytes, level: int) -> str:  # noqa: ARG002
        return f"<{len(value)} bytes>"

    def repr_ndarray(self, value: np.ndarray[Any, Any], level: int) -> str:  # noqa: ARG002
        return f"<{value.dtype} of shape {value.shape}>"

    def repr_datetime(self, value: datetime, level: int) -> str:  # noqa: ARG002
        return value.isoformat()

    def repr_instance(self, value: Any, level: int) -> str:
        import numpy as np  # noqa: PLC0415 - takes longer than all else of a short command

        if isinstance(value, np.generic):
            return f"{value.dtype}({value})"
        return super().repr_instance(value, level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlong = 40


class Bar:
    """Counts bytes from any thread; after a second, and if stderr is a terminal, it shows."""

    def __init__(self, label: str, total: int) -> None:
        self._count = ckptkit.ProgressBar(label, total)
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._shown: Progress | None = None
        self._wanted = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, nbytes: int) -> None:
        self._count(nbytes)
        with self._lock:
            if self._wanted and self._shown is None and time.monotonic() - self._begun > PATIENCE:
                # Here, because rich takes longer to import than most commands run.
                from rich import progress  # noqa: PLC0415
                from rich.console import Console  # noqa: PLC0415
                from rich.table import Column  # noqa: PLC0415

                # Its own speed would be since the bar appeared, and a narrow terminal would break
                # lines.
                told = Column(no_wrap=True, overflow="ellipsis")
                bar = progress.Progress(
                    progress.TextColumn("{task.description}", markup=False, table_column=told),
                    progress.BarColumn(None, table_column=Column(ratio=1)),
                    console=Console(stderr=True),
                    transient=True,
                    expand=True,
                )
                bar.add_task(repr(self._count), total=self._count.total or None)
                self._shown = bar
                bar.start()
            if self._shown is not None:
                task = self._shown.task_ids[0]
                self._shown.update(task, description=repr(self._count), completed=self._count.done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            # A thread that is still at work may count on, and must not begin a bar now.
            self._wanted = False
            if self._shown is not None:
                self._shown.stop()


# How a command ends: the exit codes, and the one place that maps errors to them.

OK, NO, USAGE, CORRUPT, ABSENT, STORAGE, PEER = range(7)
BUG, INTERRUPTED, PIPE = 70, 130, 141

MEANING = {
    OK: "done",
    NO: "the answer is no",
    USAGE: "wrong usage, or something is in the way",
    CORRUPT: "corrupt, or no format that this version reads",
    ABSENT: "not found, or not committed",
    STORAGE: "the storage refused, or the output cannot be written",
    PEER: "another rank failed",
    BUG: "a bug in ckptkit",
    INTERRUPTED: "interrupted",
    PIPE: "the reader of the output went away",
}

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (click.ClickException, USAGE),
    (UsageError, USAGE),
    (AlreadyExistsError, USAGE),
    (FormatError, CORRUPT),
    (NotFoundError, ABSENT),
    (StorageError, STORAGE),
    (PeerError, PEER),
    (KeyboardInterrupt, INTERRUPTED),
    (click.Abort, INTERRUPTED),
    (BrokenPipeError, PIPE),
)


def code_of(error: BaseException) -> int:
    """The exit code that an error ends the program with."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, KeyboardInterrupt):
        return INTERRUPTED  # in the middle of a class: until Python 3.12 that wraps what is raised
    return next((code for kind, code in _CODES if isinstance(error, kind)), BUG)


def report(error: BaseException) -> int:
    """Say on stderr what went wrong, as `error: …` and `hint: …`; returns the exit code."""
    if isinstance(error, SystemExit):
        raise error
    code = code_of(error)
    if code == PIPE:
        let_go(sys.stdout)
        return code
    if os.environ.get("CKPTKIT_DEBUG") == "1":
        traceback.print_exception(error)
    if code == INTERRUPTED:
        lines = ["interrupted"]
    elif isinstance(error, CkptkitError):
        lines = f"error: {error}".splitlines()
    elif isinstance(error, click.ClickException):
        said = " ".join(error.format_message().split()).rstrip(".")  # click lists choices in lines
        lines = [f"error: {said[:1].lower()}{said[1:]}"]
        context = getattr(error, "ctx", None)
        if context is not None:
            lines.append(f"hint: `{context.command_path} --help` shows the usage")
    else:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        told = "with what CKPTKIT_DEBUG=1 makes it print"
        lines = [
            f"error: this is a bug in ckptkit: {text}",
            f"hint: report it to the project's issue tracker, {told}",
        ]
    for line in lines:
        remark(line)
    return code
