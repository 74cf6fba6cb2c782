"""What goes to stdout: aligned lines for people, one document for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import click


def emit(lines: Iterable[str]) -> None:
    """Print lines; one write, since there may be many."""
    found = [printable(line) for line in lines]
    if found:
        click.echo("\n".join(found))


def emit_json(document: Any) -> None:
    """Print a document on one line."""
    click.echo(json.dumps(document, separators=(",", ":"), allow_nan=False))


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
