"""Values that are no tensors, given back to the ranks of another job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckptkit.errors import CkptkitError
from ckptkit.format.objects import ObjectInfo, total


class WorldSizeError(CkptkitError, KeyError):
    """A value of each rank, asked for by a job with another number of ranks."""

    __str__ = CkptkitError.__str__


class Extra(Mapping[str, Any]):
    """The `extra` of a save, as this rank gets it back.

    What was the same on all ranks is given to each; `PerRank` values return to their rank if there
    are as many ranks as there were: otherwise `extra[name]` raises a `WorldSizeError`, and
    `extra.get(name, fallback)` gives the fallback. `Sum` and `Split` values are the rank's own if
    there are as many ranks, and its share of all otherwise.
    """

    def __init__(self, objects: Mapping[str, ObjectInfo], rank: int, world_size: int) -> None:
        self._objects = objects
        self._rank = rank
        self._world_size = world_size

    def __getitem__(self, name: str) -> Any:
        item = self._objects[name]
        if item.semantics == "replicated":
            return item.value
        if len(item.value) == self._world_size:
            return item.value[self._rank]
        if item.semantics == "per_rank":
            raise WorldSizeError(
                f"the value belongs to the ranks of a job of {len(item.value)}, "
                f"this one has {self._world_size}",
                where=name,
                hint=f"extra.get({name!r}, fallback) gives a fallback, "
                f"extra.of_ranks({name!r}) the values of all",
            )
        share = _share_of_list if item.semantics == "split" else _share_of_total
        return share(item.value, self._rank, self._world_size)

    def of_ranks(self, name: str) -> list[Any]:
        """The values of all ranks of the job that saved."""
        item = self._objects[name]
        return [item.value] if item.semantics == "replicated" else list(item.value)

    def total(self, name: str) -> Any:
        """What the values of all ranks add up to."""
        return total(self.of_ranks(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def _share_of_total(values: list[Any], rank: int, world_size: int) -> Any:
    """A share, so that those of all ranks add up to the total; whole numbers stay whole."""
    whole = total(values)
    if isinstance(whole, int):
        return whole // world_size + (rank < whole % world_size)
    if isinstance(whole, np.ndarray) and whole.dtype.kind in "iu":
        return whole // world_size + (rank < whole % world_size)
    return whole / world_size


def _share_of_list(values: list[Any], rank: int, world_size: int) -> Any:
    """The rank's run of all items, in the order of the ranks that had them."""
    if not isinstance(values[0], (list, tuple)):
        return _share_of_total(values, rank, world_size)
    items = [item for value in values for item in value]
    first, more = divmod(len(items), world_size)
    start = rank * first + min(rank, more)
    share = items[start : start + first + (rank < more)]
    return share if isinstance(values[0], list) else tuple(share)
