"""Strict readers of what comes from outside: a checked value, or an error that says where."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from operator import index
from typing import Any, SupportsIndex

from ckptkit.errors import CkptkitError, FormatError, UsageError
from ckptkit.model.box import MAX_COORDINATE


def fields(
    doc: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The document as a dict that has all required keys and none but the optional ones besides."""
    if type(doc) is not dict:
        raise FormatError("must be a map", where=where, value=doc)
    for key in required:
        if key not in doc:
            raise FormatError(f"lacks {key!r}", where=where, value=doc)
    # As the required ones are all there, only a longer document can have others to look at.
    if len(doc) > len(required):
        for key in doc:
            if key not in required and key not in optional:
                raise FormatError("has an unknown key", where=where, value=key)
    return doc


def integer(value: object, where: str, *, least: int = 0, most: int = MAX_COORDINATE) -> int:
    if type(value) is not int:  # not isinstance, here and below: True would be an integer
        raise FormatError("must be an integer", where=where, value=value)
    if not least <= value <= most:
        raise FormatError(f"must be from {least} to {most}", where=where, value=value)
    return value


def integers(
    value: object, where: str, *, least: int = 0, most: int = MAX_COORDINATE
) -> tuple[int, ...]:
    """A list of such ints, as a tuple."""
    if type(value) is not list and type(value) is not tuple:
        raise FormatError("must be a list of integers", where=where, value=value)
    for i, item in enumerate(value):
        if type(item) is not int or not least <= item <= most:
            integer(item, f"{where}.{i}", least=least, most=most)
    return tuple(value)


def text(value: object, where: str) -> str:
    if type(value) is not str:
        raise FormatError("must be a string", where=where, value=value)
    return value


_SIZES: dict[str, int] = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(what: int | str) -> int:
    """The bytes of a number, or of a text such as 4096, 512MiB or 1.5 GB."""
    if isinstance(what, int) and not isinstance(what, bool):
        size = what
    else:
        match = _QUANTITY.fullmatch(what.strip()) if isinstance(what, str) else None
        unit = _SIZES.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise UsageError("no size", value=what, hint="write 4096, 512MiB or 1.5GB")
        size = round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if size < 1:
        raise UsageError("less than one byte", value=what, hint="write 512MiB or 1.5GB")
    return size


def parse_seconds(what: object, name: str) -> float:
    """The seconds of a number, a text or a timedelta; `name` is what they are for."""
    seconds = math.nan
    with suppress(TypeError, ValueError):
        seconds = what.total_seconds() if isinstance(what, timedelta) else float(what)  # type: ignore[arg-type]
    if not 0 < seconds < math.inf or isinstance(what, bool):
        raise UsageError(f"{name} is a number of seconds, above 0", value=what)
    return seconds


def check_count(what: object, name: str, hint: str = "") -> None:
    """Refuse what is not a whole number of at least one."""
    if not isinstance(what, SupportsIndex) or index(what) < 1:
        raise UsageError(f"{name} is a whole number, at least 1", value=what, hint=hint)


def size_text(nbytes: float) -> str:
    """A size for people: `1.5 GiB`."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    amount, power = nbytes / 1024, 0
    # 1023.96 would be rounded to 1024.0.
    while amount >= 1023.95 and power < 4:
        amount, power = amount / 1024, power + 1
    return f"{amount:.1f} {'KMGTP'[power]}iB"


def time_text(seconds: float | None) -> str | None:
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


# A file may say a lot in few lines, by aliases of aliases.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 6
_SHORT.maxstring = _SHORT.maxother = 80


def in_short(value: object, width: int = 80) -> str:
    """A value on one line, cut where it gets long."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python turns no integer of thousands of digits into text
        text = f"<{type(value).__name__}>"
    return text if len(text) <= width else f"{text[: width - 1]}…"


LIMIT = 1 << 63


class Fields:
    """A map from a document, whose keys are taken one by one."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise FormatError("not a map", where=where, value=value)
        self.rest = dict(value)
        """The keys that have not been taken yet."""
        self._where = where

    def at(self, key: str) -> str:
        """Where a key stands, for messages: `arrays.3.shape`."""
        return f"{self._where}.{key}" if self._where else key

    def has(self, key: str) -> bool:
        return key in self.rest

    def any(self, key: str) -> Any:
        """The value as it is; the caller checks it."""
        if key not in self.rest:
            raise FormatError("the field is missing", where=self.at(key))
        return self.rest.pop(key)

    def integer(self, key: str, *, least: int = 0, below: int = LIMIT) -> int:
        return integer(self.any(key), self.at(key), least=least, most=below - 1)

    def integers(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        return integers(self.any(key), self.at(key), least=least)

    def number(self, key: str) -> float:
        value = self.any(key)
        # A range, which refuses NaN and infinities too.
        if type(value) not in (int, float) or not -(2**63) <= value < 2**64:
            raise FormatError("not a finite number", where=self.at(key), value=value)
        return float(value)

    def form(self, key: str) -> str:
        """The text that says which of several forms this has; nothing where it is no text."""
        value = self.rest.pop(key, "")
        return value if type(value) is str else ""

    def text(self, key: str) -> str:
        return text(self.any(key), self.at(key))

    def items(self, key: str) -> list[Any]:
        value = self.any(key)
        if not isinstance(value, list):
            raise FormatError("not a list", where=self.at(key), value=value)
        return value

    def bytes(self, key: str) -> bytes:
        value = self.any(key)
        if not isinstance(value, bytes):
            raise FormatError("not bytes", where=self.at(key), value=type(value).__name__)
        return value

    def finish(self) -> None:
        """Refuse what this version does not know: it could change the meaning of the rest."""
        if self.rest:
            raise FormatError(
                "unknown keys, which this version of the format does not have",
                where=self._where,
                value=list(self.rest),
            )


@contextmanager
def located(where: str) -> Iterator[None]:
    """What is wrong inside is said to be in a file: `FILE: arrays.3.shape`."""
    try:
        yield
    except CkptkitError as error:
        error.where = f"{where}: {error.where}" if error.where else where
        raise
