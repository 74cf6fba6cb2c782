"""One array of a step, as its reader sees it."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.errors import FormatError, LayoutError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box, DType, Grid, Layout, Part, Strategy, layout_of

if TYPE_CHECKING:
    from ckptkit.checkpoint.checkpoint import Checkpoint

Index: TypeAlias = int | slice | EllipsisType


@dataclass(frozen=True, slots=True, eq=False)
class Array:
    """One array of a step; indexing reads, `array[:10, :]` gives a numpy array."""

    _checkpoint: Checkpoint
    name: str
    info: ArrayInfo
    _strategy: Strategy

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.info.shape

    @property
    def dtype(self) -> DType:
        """The element type; `.numpy` is numpy's."""
        return self.info.dtype

    @property
    def grid(self) -> Grid:
        """How it is cut into chunks."""
        return self.info.grid

    @property
    def role(self) -> str:
        """param, buffer, optimizer or other."""
        return self.info.role

    @property
    def alias_of(self) -> str | None:
        """The array that this is a second name of."""
        return self.info.name if self.info.name != self.name else None

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.info.nbytes

    @property
    def layout(self) -> Layout:
        """Which rank of the strategy that wrote it held what."""
        try:
            return layout_of(self.info.shape, self._strategy, self.info.placements)
        except LayoutError as error:
            where = f"{self._checkpoint.location}: {self.info.name}"
            raise FormatError(error.what, where=where, hint=error.hint) from error

    def part(self, rank: int) -> Part:
        """What a rank of the strategy that wrote it held."""
        return self.layout.part(rank)

    def read(self, box: Box | None = None, *, verify: bool = True) -> npt.NDArray[Any]:
        """A box of it, or all of it."""
        return self._checkpoint.read(self.name, box, verify=verify)

    def __getitem__(self, index: Index | tuple[Index, ...]) -> npt.NDArray[Any]:
        box, rest = _as_box(self.name, self.shape, index)
        result: npt.NDArray[Any] = self.read(box)[rest]
        return result

    def __array__(
        self,
        dtype: npt.DTypeLike | None = None,
        copy: bool | None = None,  # noqa: FBT001 — numpy's protocol
    ) -> npt.NDArray[Any]:
        if copy is False:
            raise LayoutError("the array is in storage: reading it is a copy", where=self.name)
        return self.read().astype(dtype or self.dtype.numpy, copy=False)


def _as_box(
    name: str, shape: tuple[int, ...], index: Index | tuple[Index, ...]
) -> tuple[Box, tuple[int | slice, ...]]:
    """The smallest box with all that an index selects, and the index within that box."""
    wanted = _without_ellipsis(name, shape, index if isinstance(index, tuple) else (index,))
    offset, extents = [], []
    rest: list[int | slice] = []
    for item, extent in zip(wanted, shape, strict=True):
        if isinstance(item, slice):
            chosen = range(extent)[item]
            ends = (chosen[0], chosen[-1]) if chosen else ()
            low, high = min(ends, default=0), max(ends, default=-1) + 1
            # A step of -1 from the end down to the first element cannot be written as a stop.
            inner: int | slice = slice(None, None, chosen.step)
        else:
            low = _position(name, item, extent)
            high, inner = low + 1, 0
        offset.append(low)
        extents.append(high - low)
        rest.append(inner)
    return Box(tuple(offset), tuple(extents)), tuple(rest)


def _without_ellipsis(
    name: str, shape: tuple[int, ...], index: tuple[Index, ...]
) -> list[int | slice]:
    dots = [place for place, item in enumerate(index) if item is ...]
    named = len(index) - len(dots)
    if len(dots) > 1 or named > len(shape):
        raise LayoutError(f"the index does not fit {len(shape)} dims", where=name, value=index)
    at = dots[0] if dots else len(index)
    filled = [*index[:at], *[slice(None)] * (len(shape) - named), *index[at + len(dots) :]]
    return [item for item in filled if item is not ...]


def _position(name: str, item: Any, extent: int) -> int:
    if not isinstance(item, (int, np.integer)) or isinstance(item, bool):
        raise LayoutError("an index is made of integers, slices and …", where=name, value=item)
    position = int(item)
    if not -extent <= position < extent:
        raise IndexError(f"{name}: index {position} is out of bounds for a dim of {extent}")
    return position % extent
