"""Spans of time as people write them on a command line, and sizes as they read them."""

from __future__ import annotations

import re

import click

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)


def seconds_of(text: str) -> float:
    """The seconds of a text such as 90s, 30m, 1h or 2d; only 0 needs no unit."""
    match = _QUANTITY.fullmatch(text.strip())
    unit = _SPANS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        if text.strip() == "0":
            return 0.0
        raise click.BadParameter(f"{text!r} is no span of time: write 90s, 30m, 1h or 2d")
    return float(match[1]) * unit


def size_text(nbytes: int) -> str:
    """A size for people: `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes} B"
    amount, power = nbytes / 1024, 0
    # 1023.96 would be rounded to 1024.0.
    while amount >= 1023.95 and power < len(_UNITS) - 1:
        amount, power = amount / 1024, power + 1
    return f"{amount:.1f} {_UNITS[power]}"
