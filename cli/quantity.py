"""Sizes and spans of time, as people write them on a command line and read them in a listing."""

from __future__ import annotations

import re

import click

_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)


def size_of(text: str) -> int:
    """The bytes of a text such as 4096, 512MiB or 1.5 GB."""
    match = _QUANTITY.fullmatch(text.strip())
    unit = _SIZES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is no size: write 4096, 512MiB or 1.5GB")
    size = round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise click.BadParameter(f"{text!r} is less than one byte")
    return size


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
