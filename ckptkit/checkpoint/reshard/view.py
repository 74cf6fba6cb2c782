"""A target before it exists: what is in the source, under its new names and in its new types."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.check import digest
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import LEAST_MEMORY, Limits, Readable, stored_arrays
from ckptkit.checkpoint.reshard.casting import cast
from ckptkit.checkpoint.reshard.target import Target
from ckptkit.model import Box, DType

# So many elements at a time are converted.
_BLOCK = 1 << 16


def digest_of(checkpoint: Checkpoint, target: Target, memory: int) -> str:
    """The digest that a target will have, from its source, in bounded memory."""
    # The values of a cast array are in memory twice, in both types.
    casts = [a for a in target.arrays if a.chosen.is_cast]
    ratios = [a.chosen.source.dtype.itemsize / a.chosen.dtype.itemsize for a in casts]
    share = max(LEAST_MEMORY, int(memory / (1 + max(ratios, default=0))))
    limits = Limits.of(share, None, stores=[checkpoint.store])
    stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store))
    arrays: dict[str, Readable] = {}
    for array in target.arrays:
        source, name = stored[array.chosen.source.name], array.info.name
        is_cast = array.chosen.is_cast
        arrays[name] = _as_type(name, source, array.chosen.dtype) if is_cast else source
    for alias in target.choice.aliases:
        arrays[alias.name] = arrays[alias.alias_of]
    return digest.digest_of(arrays, target.objects, limits).step


def _as_type(name: str, source: Readable, dtype: DType) -> Readable:
    """An array of a step as another element type."""

    def read_into(box: Box, out: npt.NDArray[Any]) -> None:
        values = np.empty(box.shape, source.dtype.bits)
        source.read_into(box, values)
        given, found = values.reshape(-1), out.reshape(-1)
        for start in range(0, len(given), _BLOCK):
            part = slice(start, start + _BLOCK)
            cast(name, given[part], found[part], (source.dtype, dtype))

    return Readable(source.shape, dtype, source.grid, read_into)
