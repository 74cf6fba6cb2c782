"""Values of one element type as another."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import UsageError
from ckptkit.model import DType

Raw = npt.NDArray[Any]


def cast(name: str, values: Raw, stored: Raw, dtypes: tuple[DType, DType]) -> None:
    """Convert raw elements from the first type to the second; numbers that it lacks are refused."""
    source, target = dtypes
    given = values.view(source.numpy)
    with np.errstate(all="ignore"):
        found = given.astype(target.numpy)
        lost = ~np.isfinite(found) & np.isfinite(given)
        # Some types have no infinity, and make it a NaN.
        lost |= np.isinf(given) & ~np.isinf(found)
    if lost.any():
        raise UsageError(
            f"{int(lost.sum())} values of one chunk are beyond {target.name}",
            where=name,
            value=float(given[lost][0]),
            hint="leave the array out of --cast, or cast to a type with a larger range",
        )
    stored[...] = found.view(target.bits)
