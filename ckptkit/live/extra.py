"""Values that are no tensors, given back to the ranks of another job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.errors import CkptkitError
from ckptkit.format.objects import ObjectInfo, share_of_items, share_of_total, total


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
        share = share_of_items if item.semantics == "split" else share_of_total
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
