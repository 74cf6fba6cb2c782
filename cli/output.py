"""What goes to stdout: aligned lines for people, one document for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, TextIO

import click

from ckptkit.errors import StorageError


def emit(lines: Iterable[str]) -> None:
    """Print lines; one write, since there may be many."""
    found = [printable(line) for line in lines]
    if found:
        with printing():
            click.echo("\n".join(found))


def emit_json(document: Any) -> None:
    """Print a document on one line."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    with printing():
        click.echo(text)


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
    return [form.format(*row).rstrip() for row in rows]


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
