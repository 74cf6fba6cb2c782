"""Strict readers of documents: a checked value, or a FormatError that says where."""

from __future__ import annotations

from typing import Any

from ckptkit.errors import FormatError
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
    if len(doc) > len(required):
        for key in doc:
            if key not in required and key not in optional:
                raise FormatError("has an unknown key", where=where, value=key)
    return doc


def integer(value: object, where: str, *, least: int = 0, most: int = MAX_COORDINATE) -> int:
    """An int (never a bool) between two bounds, both included."""
    if type(value) is not int:
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
    """A string."""
    if type(value) is not str:
        raise FormatError("must be a string", where=where, value=value)
    return value
