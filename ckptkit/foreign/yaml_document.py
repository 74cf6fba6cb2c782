"""YAML of somebody else's: maps, lists and plain values.

It is read event by event. The loader in C ends the process at a deep value, and with aliases a
short document would stand for one that never ends.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from ckptkit.errors import FormatError

_DEPTH = 64
_WORDS = {"null": None, "true": True, "false": False}


def read_yaml(data: bytes, where: str) -> Any:
    """The value of a document; FormatError where it is none, or has what is not read here."""
    try:
        return _value(data)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise FormatError(
            "neither valid JSON nor valid YAML",
            where=where,
            value=str(error)[:200],
            hint="it was cut short or changed; copy it again",
        ) from error


def _value(data: bytes) -> Any:
    values: list[Any] = []
    above: list[list[Any]] = []
    for event in yaml.parse(data, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(event, yaml.CollectionStartEvent) and event.implicit:
            above.append(values)
            values = []
            if len(above) > _DEPTH:
                raise ValueError(f"more than {_DEPTH} levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            made: Any = values
            if isinstance(event, yaml.MappingEndEvent):
                made = dict(zip(values[::2], values[1::2], strict=True))
                if len(made) < len(values) // 2:
                    raise ValueError("a key is there twice")
            values = above.pop()
            values.append(made)
        elif isinstance(event, yaml.ScalarEvent) and any(event.implicit):
            is_plain = event.implicit[0]
            values.append(_plain(event.value) if is_plain else event.value)
        elif isinstance(event, yaml.NodeEvent):
            raise ValueError("an alias, or a value of a type of its own")
    return values[0] if values else None


def _plain(text: str) -> Any:
    """What a text without quotes is."""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else _WORDS.get(text, text)
