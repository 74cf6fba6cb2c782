"""What a caller tells a writer of an array, checked: placements, dtype, and the elements in any
buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import LayoutError, UnsupportedTypeError, UsageError
from ckptkit.model import DType, Placement, Replicate, Strategy, parse_placement


def placements_of(
    strategy: Strategy, name: str, given: Mapping[str, Placement | str]
) -> tuple[Placement, ...]:
    """A placement for each axis."""
    axes = [axis.name for axis in strategy.mesh.axes]
    unknown = sorted(set(given) - set(axes))
    if unknown:
        raise LayoutError(
            f"{strategy} has the axes {', '.join(axes) or 'none'}", where=name, value=unknown[0]
        )
    row = (given.get(axis, Replicate()) for axis in axes)
    return tuple(parse_placement(p) if isinstance(p, str) else p for p in row)


def check_sliced(dims: tuple[int, ...] | None, count: int) -> None:
    wrong = [dim for dim in dims or () if type(dim) is not int or not 0 <= dim < count]
    if wrong:
        raise LayoutError(f"sliced= are dims of an array that has {count}", value=wrong[0])


def dtype_of_data(name: str, data: object, dtype: object) -> DType:
    if dtype is None:
        dtype = getattr(data, "dtype", None)
    if dtype is None:
        raise UsageError("the dtype cannot be seen", where=name, hint="pass dtype=…")
    try:
        return DType.of(dtype)
    except UnsupportedTypeError as error:
        error.where = name
        raise


def raw_elements(name: str, data: object, shape: tuple[int, ...], dtype: DType) -> npt.NDArray[Any]:
    """Any buffer as an array of raw elements in the shape of the part, without a copy."""
    if type(data) is np.ndarray and data.dtype is dtype.bits and data.shape == shape:
        return data
    try:
        array = data if isinstance(data, np.ndarray) else np.asarray(memoryview(data))  # type: ignore[arg-type]  # what is no buffer raises
    except (TypeError, ValueError) as error:
        raise UsageError(
            "neither an array nor a buffer",
            where=name,
            value=type(data).__name__,
            hint="pass a numpy array, or anything with the buffer protocol and dtype=…",
        ) from error
    # What numpy lacks may come as raw bits, or as the signed integers that torch's `view` offers.
    spellings = [dtype.numpy, dtype.bits]
    if dtype.numpy.type.__module__ != "numpy":
        spellings.append(np.dtype(f"<i{dtype.itemsize}"))
    if array.dtype not in spellings:
        # Bytes are taken for elements; elements of another type never for the bytes of this one.
        if array.dtype not in (np.uint8, np.int8, np.dtype("S1")) or not array.flags.c_contiguous:
            raise LayoutError(
                f"the buffer is not of {dtype.name}",
                where=name,
                value=array.dtype,
                hint="pass little-endian elements of that dtype, or their contiguous bytes",
            )
        if array.nbytes % dtype.itemsize:
            raise LayoutError(
                f"{array.nbytes} bytes are not a whole number of {dtype.name} elements", where=name
            )
        array = array.reshape(-1)
    array = array.view(dtype.bits)
    if array.ndim == 1 and array.flags.c_contiguous and array.size == math.prod(shape):
        array = array.reshape(shape)
    if array.shape != shape:
        raise LayoutError(
            f"the buffer does not fit: this rank holds {shape} of {dtype.name}",
            where=name,
            value=array.shape,
            hint="pass the local part, in its own shape, or as flat bytes",
        )
    return array
