"""How far apart two values are: elements of arrays, by their bits or within a tolerance, and what
is no array.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import UsageError
from ckptkit.model import DType

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

# So many elements at a time: what they are converted to stays in the cache, and small.
_BLOCK = 1 << 14
_LARGEST = float(2**64)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far apart two numbers may be: `atol`, and `rtol` times the second one."""

    atol: float = 0.0
    rtol: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if not 0 <= value < math.inf:
                raise UsageError("a tolerance is a number from 0 on", where=name, value=value)

    @property
    def is_exact(self) -> bool:
        """Whether only the same bits are the same."""
        return not self.atol and not self.rtol


@dataclass(frozen=True, slots=True)
class Apart:
    """Elements that differ: how many, the first of them, and how far apart any two are."""

    count: int
    first: int
    most: int | float | None
    """None where no difference is a number, as between a number and a NaN."""

    def joined(self, other: Apart) -> Apart:
        known = [most for most in (self.most, other.most) if most is not None]
        first = min(self.first, other.first)
        return Apart(self.count + other.count, first, max(known, default=None))


def apart(dtype: DType, a: Array, b: Array, tolerance: Tolerance, start: int = 0) -> Apart | None:
    """Where two flat arrays of raw elements (`dtype.bits`) differ, the first being the element
    `start`; None where they do not.
    """
    found: Apart | None = None
    for begin in range(0, len(a), _BLOCK):
        ours, theirs = a[begin : begin + _BLOCK], b[begin : begin + _BLOCK]
        word = np.uint64 if ours.nbytes % 8 == 0 else np.uint8
        if not (ours.view(word) != theirs.view(word)).any():
            continue
        here = _block(dtype, ours, theirs, tolerance)
        if here is not None:
            here = Apart(here.count, start + begin + here.first, here.most)
            found = here if found is None else found.joined(here)
    return found


def is_near(a: Any, b: Any, tolerance: Tolerance) -> bool:
    """Whether two values of objects that are not of the same bytes are near each other."""
    if tolerance.is_exact or type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_near(a[key], b[key], tolerance) for key in a)
    if isinstance(a, (list, tuple)):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(is_near(x, y, tolerance) for x, y in pairs)
    if isinstance(a, (float, np.generic, np.ndarray)):
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        dtype = DType.of(x.dtype)
        ours, theirs = (np.ascontiguousarray(v).reshape(-1).view(dtype.bits) for v in (x, y))
        return apart(dtype, ours, theirs, tolerance) is None
    if isinstance(a, int) and not isinstance(a, bool):
        try:
            return bool(abs(a - b) <= tolerance.atol + tolerance.rtol * abs(b))
        except OverflowError:  # too large for a float
            allowed = Fraction(tolerance.atol) + Fraction(tolerance.rtol) * abs(b)
            return bool(abs(a - b) <= allowed)
    return bool(a == b)


def _block(dtype: DType, a: Array, b: Array, tolerance: Tolerance) -> Apart | None:
    x, y = _numbers(dtype, a), _numbers(dtype, b)
    are_integers = x.dtype.kind in "iu"
    distance: Array
    differs: Mask
    if are_integers:
        # Of 64 bits the difference may need 65, but its size does not, and wraps to the right one.
        unsigned = np.dtype(f"<u{x.itemsize}")
        high, low = np.maximum(x, y).view(unsigned), np.minimum(x, y).view(unsigned)
        distance = (high - low).astype(np.uint64)
    else:
        with np.errstate(all="ignore"):
            distance = np.abs(x - y)
    if tolerance.is_exact and a.itemsize <= 8:
        differs = a != b
    elif tolerance.is_exact:
        # Raw elements of 16 bytes are complex numbers, of which -0.0 and 0.0 are equal.
        words = a.view(np.uint64) != b.view(np.uint64)
        differs = words[::2] | words[1::2]
    elif are_integers:
        # Compared as integers: doubles do not tell large ones apart.
        allowed = np.floor(tolerance.atol + tolerance.rtol * np.abs(y.astype(np.float64)))
        limit = np.where(allowed < _LARGEST, allowed, 0).astype(np.uint64)
        differs = (distance > limit) & (allowed < _LARGEST)
    else:
        with np.errstate(all="ignore"):
            allowed = np.asarray(tolerance.atol)
            if tolerance.rtol:
                allowed = allowed + tolerance.rtol * np.abs(y)
            # Nothing else is near to infinity, however much of infinity is allowed.
            differs = ~((distance <= allowed) & (distance < np.inf))
        if differs.any():
            differs &= ~((x == y) | (np.isnan(x) & np.isnan(y)))
    count = int(np.count_nonzero(differs))
    if not count:
        return None
    return Apart(count, int(np.argmax(differs)), _most(distance, differs, tolerance))


def _most(distance: Array, differs: Mask, tolerance: Tolerance) -> int | float | None:
    """The largest distance of elements that differ."""
    if tolerance.is_exact:
        # What is the same is 0 apart, or NaN: mostly there is no need to pick.
        most = np.fmax.reduce(distance).item()
        if most > 0:
            return int(most) if distance.dtype.kind == "u" else float(most)
    known = distance[differs]
    if distance.dtype.kind == "u":
        return int(known.max())
    known = known[~np.isnan(known)]
    return float(known.max()) if len(known) else None


def _numbers(dtype: DType, raw: Array) -> Array:
    """The values: integers as they are, everything else in double precision."""
    if dtype.name == "bool":
        return raw.view(np.uint8)
    if dtype.name == "bfloat16":
        # The upper half of a float32; ml_dtypes takes three times as long.
        return _doubled((raw.astype(np.uint32) << 16).view(np.float32))
    if dtype.itemsize == 1 and dtype.name.startswith("float8"):
        return np.take(_doubles(dtype), raw)
    halves = dtype.name == "complex_float16"
    values = raw.view("<f2") if halves else raw.view(dtype.numpy)
    if values.dtype.kind in "iu":
        return values
    wide = _doubled(values)
    return wide.view(np.complex128) if halves else wide


def _doubled(values: Array) -> Array:
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


@cache
def _doubles(dtype: DType) -> Array:
    """What each of the 256 bytes is."""
    return _doubled(np.arange(256, dtype=np.uint8).view(dtype.numpy))
