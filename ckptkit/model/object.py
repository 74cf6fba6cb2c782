"""How a value that is no tensor behaves when the number of ranks changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ckptkit.errors import UnsupportedTypeError


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
