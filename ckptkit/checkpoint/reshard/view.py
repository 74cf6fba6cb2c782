"""A target before it exists: what is in the source, under its new names and in its new types."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.check import digest
from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.reshard.casting import cast
from ckptkit.checkpoint.reshard.target import Target
from ckptkit.checkpoint.stored import StoredArray, StoredArrays
from ckptkit.checkpoint.streaming import LEAST_MEMORY, Limits, Readable
from ckptkit.model import Box, DType, Grid

# So many elements at a time are converted.
_BLOCK = 1 << 16


def digest_of(checkpoint: Checkpoint, target: Target, memory: int) -> str:
    """The digest that a target will have, from its source, in bounded memory."""
    # The values of a cast array are in memory twice, in both types.
    casts = [a for a in target.arrays if a.chosen.is_cast]
    ratios = [a.chosen.source.dtype.itemsize / a.chosen.dtype.itemsize for a in casts]
    share = max(LEAST_MEMORY, int(memory / (1 + max(ratios, default=0))))
    limits = Limits.of(share, None, stores=[checkpoint.store])
    with StoredArrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store)) as stored:
        arrays: dict[str, Readable] = {}
        for array in target.arrays:
            source = stored[array.chosen.source.name]
            cast_to = array.chosen.dtype
            arrays[array.info.name] = (
                CastArray(array.info.name, source, cast_to) if array.chosen.is_cast else source
            )
        for alias in target.choice.aliases:
            arrays[alias.name] = arrays[alias.alias_of]
        return digest.digest_of(arrays, target.objects, limits).step


class CastArray:
    """An array of a step as another element type."""

    def __init__(self, name: str, source: StoredArray, dtype: DType) -> None:
        self._name = name
        self._source = source
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._source.shape

    @property
    def dtype(self) -> DType:
        """The type it is converted to."""
        return self._dtype

    @property
    def grid(self) -> Grid:
        """How the source is cut into chunks."""
        return self._source.grid

    def read_into(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Fill `out` with converted elements."""
        source = self._source.dtype
        values = np.empty(box.shape, source.bits)
        self._source.read_into(box, values)
        given, found = values.reshape(-1), out.reshape(-1)
        for start in range(0, len(given), _BLOCK):
            part = slice(start, start + _BLOCK)
            cast(self._name, given[part], found[part], (source, self._dtype))
