"""Objects: the values of a step that are no tensors, with what becomes of them when ranks change
(FORMAT section 8).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
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

    With `ranks` it is the list of the values that so many ranks of another job had.
    """

    name: str
    semantics: str
    value: Any
    ranks: int | None = None


def objects_to_docs(objects: Sequence[ObjectInfo]) -> list[Any]:
    """Entries sorted by name."""
    return [_to_doc(item) for item in sorted(objects, key=lambda item: item.name)]


def _to_doc(item: ObjectInfo) -> dict[str, Any]:
    ranks = {} if item.ranks is None else {"ranks": item.ranks}
    value = encode(item.value, item.name)
    return {"name": item.name, "semantics": item.semantics, "value": value, **ranks}


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
        ranks = _ranks(entry, semantics, value) if entry.has("ranks") else None
        entry.finish()
        objects.append(ObjectInfo(name, semantics, value, ranks))
    names = [o.name for o in objects]
    if any(first >= second for first, second in pairwise(names)):
        raise FormatError("the objects are not sorted by distinct names", where="objects")
    return tuple(objects)


def _ranks(entry: Fields, semantics: str, value: Any) -> int:
    """The number of ranks of another job whose values these are."""
    ranks = entry.integer("ranks")
    if semantics != "per_rank":
        raise FormatError("only values per rank have it", where=entry.at("ranks"), value=ranks)
    if not isinstance(value, list) or len(value) != ranks:
        raise FormatError(f"not a list of {ranks} values", where=entry.at("value"))
    return ranks


def total(values: Sequence[Any]) -> Any:
    """The sum of one value of each rank, in the widest type of their kind: it must not wrap."""
    if isinstance(values[0], np.ndarray):
        kind = values[0].dtype.kind
        widest = {"i": np.int64, "u": np.uint64, "c": np.complex128}.get(kind, np.float64)
        return np.asarray(reduce(operator.add, [value.astype(widest) for value in values], 0))
    numbers = [_widest(value) if isinstance(value, np.generic) else value for value in values]
    # Not `sum`, which rounds otherwise in later Pythons: digests are made of this.
    return reduce(operator.add, numbers, 0)


def _widest(value: np.generic) -> Any:
    # Python's own complex numbers have no form in the format.
    return np.complex128(value) if value.dtype.kind == "c" else value.item()


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


def share_of_total(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """A share, so that those of all ranks add up to the total; whole numbers stay whole."""
    whole = total(values)
    if isinstance(whole, int):
        return whole // world_size + (rank < whole % world_size)
    if isinstance(whole, np.ndarray) and whole.dtype.kind in "iu":
        return whole // world_size + (rank < whole % world_size)
    return whole / world_size


def share_of_items(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """A rank's run of all items, in the order of the ranks that had them."""
    if not isinstance(values[0], (list, tuple)):
        return share_of_total(values, rank, world_size)
    items = [item for value in values for item in value]
    first, more = divmod(len(items), world_size)
    start = rank * first + min(rank, more)
    share = items[start : start + first + (rank < more)]
    return share if isinstance(values[0], list) else tuple(share)


def check_items(values: Sequence[object], where: str) -> None:
    """Refuse what cannot be the items of all ranks: lists, tuples, or counts, of one kind."""
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {list, tuple, int}:
        raise FormatError("not items to split over ranks", where=where, value=values)


def check_number(value: object, where: str) -> None:
    """Refuse what cannot be one of the values of a sum."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.generic, np.ndarray)):
        raise FormatError("not a number, in a sum over ranks", where=where, value=value)
