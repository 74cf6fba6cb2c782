"""What goes to stdout: aligned lines for people, one document for programs; and, on stderr, a bar
for work that turns out to take longer than a moment.
"""

from __future__ import annotations

import gc
import json
import math
import os
import reprlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, TextIO

import click

from ckptkit.errors import StorageError

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

    from ckptkit import Checkpoint

PATIENCE = 1.0
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def answer(document: Any, lines: Iterable[str], *, as_json: bool) -> None:
    """Print a document for programs on one line, or the same for people."""
    if not as_json:
        emit(lines)
        return
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    with printing():
        click.echo(text)


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
        with printing():
            click.echo("\n".join(found))


def remark(line: str) -> None:
    """Print a line on stderr; where that cannot be written, there is nobody to tell."""
    try:
        click.echo(printable(line), err=True)
    except OSError:
        let_go(sys.stderr)


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


def aligned(rows: Sequence[Sequence[str]], *, right: Iterable[int] = ()) -> list[str]:
    """Rows of text as lines with columns of one width, those in `right` flush right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if number in set(right) else "<" for number in range(len(widths))]
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    # Of many rows most end as others do.
    first, _, rest = form.partition("  ")
    ends: dict[tuple[str, ...], str] = {}
    lines = []
    for row in rows:
        end = tuple(row[1:])
        if end not in ends:
            ends[end] = ("  " if end else "") + rest.format(*end)
        lines.append((first.format(row[0]) + ends[end]).rstrip())
    return lines


def moment(seconds: float | None) -> str | None:
    """Unix seconds as an ISO 8601 text in UTC; None where they are no date."""
    if seconds is None:
        return None
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, OSError, ValueError):
        return None


def counted(number: int, what: str) -> str:
    """`1 pack`, `8 packs`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def size_text(nbytes: int) -> str:
    """A size for people: `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    amount, power = nbytes / 1024, 0
    # 1023.96 would be rounded to 1024.0.
    while amount >= 1023.95 and power < len(_UNITS) - 1:
        amount, power = amount / 1024, power + 1
    return f"{amount:.1f} {_UNITS[power]}"


def stored_bytes(checkpoint: Checkpoint) -> int:
    """The size of a step's packs, or of the files of a foreign checkpoint."""
    if checkpoint.foreign is not None:
        return sum(checkpoint.foreign.files.values())
    return sum(pack.size for pack in checkpoint.manifest.packs)


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
    return {"type": type(value).__name__, "text": _SHORT.repr(value)}


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
        self._label = label
        self._total = total
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._done = 0
        self._shown: Progress | None = None
        self._wanted = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], completed=self._done)
            elif self._wanted and time.monotonic() - self._begun > PATIENCE:
                self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            # A thread that is still at work may count on, and must not begin a bar now.
            self._wanted = False
            if self._shown is not None:
                self._shown.stop()

    def _show(self) -> None:
        # Here, because rich takes longer to import than most commands run.
        from rich import progress  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415

        self._shown = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._shown.add_task(self._label, total=self._total or None, completed=self._done)
        self._shown.start()
