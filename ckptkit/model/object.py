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
