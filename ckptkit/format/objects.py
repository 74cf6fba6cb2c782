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
import numpy.typing as npt

from ckptkit.errors import FormatError, UnsupportedTypeError
from ckptkit.format.encoding import check_leaf, encode
from ckptkit.model.document import Fields

SEMANTICS = ("replicated", "per_rank", "sum", "split")


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every rank: stored once, given to every rank of the new job."""

    value: Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """Its own on every rank: given back to the same rank of a job of the same size only."""

    value: Any


@dataclass(frozen=True, slots=True)
class PerDataRank:
    """Where a rank is in its share of the data, for training jobs (`ckptkit.live`).

    It is given back to the ranks that read the same share (those that differ along `tp` and `pp`
    only), in a job that shares out its data between as many.
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Sum:
    """A share of a total: the shares of the new job add up to the total of the old one."""

    value: Any

    def __post_init__(self) -> None:
        # These have a + or none at all, and no share of a total either way.
        if self.value is None or isinstance(self.value, bool | str | bytes | list | tuple | dict):
            raise UnsupportedTypeError(
                "only numbers can be summed over ranks",
                value=self.value,
                hint="use PerRank or Replicated",
            )


@dataclass(frozen=True, slots=True)
class Split:
    """The items that a rank has of something that is shared out: a list, or a count of such items.

    The items of all ranks, in the order of the ranks, are shared out anew among the new ones.
    """

    value: Any

    def __post_init__(self) -> None:
        if not isinstance(self.value, (list, tuple, int)) or isinstance(self.value, bool):
            raise UnsupportedTypeError(
                "only lists, tuples and whole numbers can be split over ranks",
                value=self.value,
                hint="use PerRank or Replicated",
            )


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
    docs: list[dict[str, Any]] = []
    for item in sorted(objects, key=lambda item: item.name):
        value = encode(item.value, item.name)
        docs.append({"name": item.name, "semantics": item.semantics, "value": value})
        if item.ranks is not None:
            docs[-1]["ranks"] = item.ranks
    return docs


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
        ranks = entry.integer("ranks") if entry.has("ranks") else None
        if ranks is not None:  # of another job, whose values these are
            if semantics != "per_rank":
                where = entry.at("ranks")
                raise FormatError("only values per rank have it", where=where, value=ranks)
            if not isinstance(value, list) or len(value) != ranks:
                raise FormatError(f"not a list of {ranks} values", where=entry.at("value"))
        entry.finish()
        objects.append(ObjectInfo(name, semantics, value, ranks))
    names = [o.name for o in objects]
    if any(first >= second for first, second in pairwise(names)):
        raise FormatError("the objects are not sorted by distinct names", where="objects")
    return tuple(objects)


def total(values: Sequence[Any], where: str = "") -> Any:
    """The sum of one value of each rank, in a type that holds them all; FormatError where there is
    none: a total never wraps.

    Scalars add up as plain numbers, so that whole ones stay exact. Arrays have the first rank's
    type widened to 64 bits, or what another rank's floats or complex numbers need.
    """
    check_values("sum", values, where)
    with np.errstate(all="ignore"):  # infinities and NaNs add up to what IEEE 754 says
        if all(isinstance(value, np.ndarray) for value in values):
            return _total_of_arrays([_numeric(value) for value in values], where)
        try:
            # Not `sum`, which rounds otherwise in later Pythons: digests are made of this.
            return reduce(operator.add, map(_plain, values), 0)
        except OverflowError as error:
            raise FormatError("an integer too large to be added to a float", where=where) from error


def _total_of_arrays(arrays: Sequence[npt.NDArray[Any]], where: str) -> npt.NDArray[Any]:
    widest: Any = {"i": np.int64, "u": np.uint64}.get(arrays[0].dtype.kind, np.float64)
    kinds = {array.dtype.kind for array in arrays}
    if kinds - set("iub"):
        widest = np.complex128 if "c" in kinds else np.float64
    if widest in (np.int64, np.uint64) and arrays[0].size:
        # The ends alone tell of most that it fits; only the rest is added as Python's integers,
        # which is slow.
        low = sum(int(array.min()) for array in arrays)
        high = sum(int(array.max()) for array in arrays)
        limits = np.iinfo(widest)
        if low < limits.min or high > limits.max:
            exact = np.asarray(reduce(operator.add, [array.astype(object) for array in arrays]))
            if exact.min() < limits.min or exact.max() > limits.max:
                raise FormatError(
                    f"the total does not fit {limits.dtype}",
                    where=where,
                    hint="add the numbers as Python integers, or as floats",
                )
    # Integers on the way may wrap, and wrap back: the total fits.
    return np.asarray(reduce(operator.add, [array.astype(widest) for array in arrays], 0))


def _numeric(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array that numpy can add: it knows no complex number of two float16."""
    if array.dtype.names is None:
        return array
    wide = np.empty(array.shape, np.complex128)
    wide.real, wide.imag = array["real"], array["imag"]
    return wide


def _plain(value: Any) -> Any:
    """A scalar without a dtype, a 0-d array too, which older writers let stand beside scalars."""
    if not isinstance(value, (np.generic, np.ndarray)):
        return value
    number = _numeric(np.asarray(value))
    # Python's own complex numbers have no form in the format.
    return np.complex128(number[()]) if number.dtype.kind == "c" else number.item()


def whole(item: ObjectInfo) -> Any:
    """An object of a manifest as a reader without ranks sees it: totals, and items in order."""
    if item.semantics == "sum":
        return total(item.value, item.name)
    return joined(item.value) if item.semantics == "split" else item.value


def joined(values: Sequence[Any]) -> Any:
    """The items of all ranks in the order of the ranks, or how many there are."""
    if isinstance(values[0], int):
        return sum(values)
    return type(values[0])(item for value in values for item in value)


def share_of(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """A rank's run of all items, in the order of the ranks that had them; of numbers a share, so
    that those of all ranks add up to the total. Whole numbers stay whole.
    """
    if isinstance(values[0], (list, tuple)):
        items = joined(values)
        first, more = divmod(len(items), world_size)
        start = rank * first + min(rank, more)
        return items[start : start + first + (rank < more)]
    whole = total(values)
    is_array = isinstance(whole, np.ndarray)
    is_integer = whole.dtype.kind in "iu" if is_array else isinstance(whole, int)
    if is_integer:
        share = whole // world_size + (rank < whole % world_size)
    else:
        share = whole / world_size
    # Arrays without dims stay arrays.
    return np.asarray(share) if is_array else share


def check_values(semantics: str, values: Sequence[Any], where: str) -> None:
    """Refuse what cannot be the values of ranks: of a sum numbers of one shape, of what is split
    lists, tuples or counts.
    """
    if semantics == "split":
        kinds = {type(value) for value in values}
        if len(kinds) != 1 or not kinds <= {list, tuple, int}:
            raise FormatError("not items to split over ranks", where=where, value=values)
    if semantics == "sum":
        for value in values:
            if not is_number(value):
                raise FormatError("not a number, in a sum over ranks", where=where, value=value)
        if len({np.shape(value) for value in values}) > 1:
            raise FormatError("values of different shapes have no sum", where=where)


def is_number(value: object) -> bool:
    """Whether a value can be one of those of a sum."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float, np.generic, np.ndarray))


def check_total(item: ObjectInfo) -> None:
    """Refuse values whose total no reader could give, before they are committed."""
    if item.semantics != "sum":
        return
    arrays = [isinstance(value, np.ndarray) for value in item.value]
    if len(set(arrays)) > 1:
        raise FormatError(
            f"rank {arrays.index(True)} adds an array, rank {arrays.index(False)} a plain number",
            where=item.name,
            hint="pass arrays on all ranks, or numbers on all",
        )
    total(item.value, item.name)
