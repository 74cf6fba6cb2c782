from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from ckptkit.errors import StrategyError

KINDS = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "pp", "ep")
MAX_WORLD_SIZE = 2**24
# Axes of size one cost nothing in ranks, so ranks alone would not bound a hostile mesh.
MAX_AXES = 32

_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a mesh: what kind of parallelism runs along it, and over how many ranks."""

    name: str
    kind: str
    size: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise StrategyError(
                "not a name for a mesh axis",
                value=self.name,
                hint="lower-case letters, digits and _, at most 64",
            )
        if self.kind not in KINDS:
            raise StrategyError("unknown kind of axis", value=self.kind, hint=_kind_hint(self.kind))
        if type(self.size) is not int or not 1 <= self.size <= MAX_WORLD_SIZE:
            raise StrategyError(
                f"the size of axis {self.name} must be an integer from 1 to 2**24",
                value=self.size,
                hint=f"leave the axis out, or say how many ranks lie along it: {self.kind}:2",
            )


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid, numbered row-major: the first axis is the slowest. No axes: one rank."""

    axes: tuple[Axis, ...] = ()

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise StrategyError(
                    f"axis {name} appears twice", hint=f"give it one size: {name}:<n>"
                )
        if len(self.axes) > MAX_AXES:
            raise StrategyError(
                f"more than {MAX_AXES} axes",
                value=len(self.axes),
                hint="axes of size 1 can be left out",
            )
        if self.world_size > MAX_WORLD_SIZE:
            raise StrategyError(
                "a mesh of more than 2**24 ranks",
                value=self.world_size,
                hint="it has as many ranks as the product of the sizes of its axes",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def coords(self, rank: int) -> tuple[int, ...]:
        """The coordinate of a rank on every axis."""
        if not 0 <= rank < self.world_size:
            raise StrategyError(f"no such rank on a mesh of {self.world_size} ranks", value=rank)
        coords = []
        for axis in reversed(self.axes):
            rank, coord = divmod(rank, axis.size)
            coords.append(coord)
        return tuple(reversed(coords))

    def rank(self, coords: tuple[int, ...]) -> int:
        """The rank at these coordinates."""
        if len(coords) != len(self.axes):
            raise StrategyError(f"a mesh of {len(self.axes)} axes needs as many", value=coords)
        rank = 0
        for axis, coord in zip(self.axes, coords, strict=True):
            if not 0 <= coord < axis.size:
                raise StrategyError(f"axis {axis.name} has {axis.size} ranks", value=coord)
            rank = rank * axis.size + coord
        return rank

    def index(self, name: str) -> int:
        """The position of the axis of this name."""
        for i, axis in enumerate(self.axes):
            if axis.name == name:
                return i
        names = ", ".join(axis.name for axis in self.axes) or "none"
        raise StrategyError("no such axis", value=name, hint=f"the axes of this mesh: {names}")


def _kind_hint(kind: str) -> str:
    close = difflib.get_close_matches(kind[:40], KINDS, n=1, cutoff=0.5)
    guess = f"did you mean {close[0]}? " if close else ""
    return f"{guess}accepted are {', '.join(KINDS)}, hsdp:<n>x<m>, or single"
