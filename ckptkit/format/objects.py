"""Objects: the values of a step that are no tensors, with what becomes of them when ranks change
(FORMAT section 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.format.fields import Fields
from ckptkit.format.leaves import check_leaf, encode

SEMANTICS = ("replicated", "per_rank", "sum", "split")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object; in a manifest the value of all but `replicated` is the list of all ranks'
    values.
    """

    name: str
    semantics: str
    value: Any


def objects_to_docs(objects: Sequence[ObjectInfo]) -> list[Any]:
    """Entries sorted by name."""
    return [
        {"name": o.name, "semantics": o.semantics, "value": encode(o.value, o.name)}
        for o in sorted(objects, key=lambda o: o.name)
    ]


def objects_from_docs(fields: Fields) -> tuple[ObjectInfo, ...]:
    """Take `objects` out of a document."""
    objects = []
    for number, doc in enumerate(fields.items("objects")):
        entry = Fields(doc, f"objects.{number}")
        name, semantics = entry.text("name"), entry.text("semantics")
        value = check_leaf(entry.any("value"), entry.at("value"))
        if semantics not in SEMANTICS:
            raise FormatError(
                f"not one of {', '.join(SEMANTICS)}", where=entry.at("semantics"), value=semantics
            )
        entry.finish()
        objects.append(ObjectInfo(name, semantics, value))
    names = [o.name for o in objects]
    if any(first >= second for first, second in pairwise(names)):
        raise FormatError("the objects are not sorted by distinct names", where="objects")
    return tuple(objects)


def total(values: Sequence[Any]) -> Any:
    """The sum of one value of each rank, in the widest type of their kind: it must not wrap."""
    if isinstance(values[0], np.ndarray):
        kind = values[0].dtype.kind
        widest = {"i": np.int64, "u": np.uint64, "c": np.complex128}.get(kind, np.float64)
        return np.sum([value.astype(widest) for value in values], axis=0)
    return sum(value.item() if isinstance(value, np.generic) else value for value in values)


def whole(item: ObjectInfo) -> Any:
    """An object of a manifest as a reader without ranks sees it: totals, and items in order."""
    if item.semantics == "sum":
        return total(item.value)
    return joined(item.value) if item.semantics == "split" else item.value


def joined(values: Sequence[Any]) -> Any:
    """The items of all ranks in the order of the ranks, or how many there are."""
    if isinstance(values[0], int):
        return sum(values)
    return type(values[0])(item for value in values for item in value)


def check_items(values: Sequence[object], where: str) -> None:
    """Refuse what cannot be the items of all ranks: lists, tuples, or counts, of one kind."""
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {list, tuple, int}:
        raise FormatError("not items to split over ranks", where=where, value=values)


def check_number(value: object, where: str) -> None:
    """Refuse what cannot be one of the values of a sum."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.generic, np.ndarray)):
        raise FormatError("not a number, in a sum over ranks", where=where, value=value)
