"""The types of elements that a checkpoint may have, by their names in Zarr, numpy and torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# First: imported by the C code of ml_dtypes, it would make an ImportError of Ctrl-C.
import numpy as np

# isort: split
import ml_dtypes

from ckptkit.errors import UnsupportedTypeError, nearest

# Raw elements of a size: numpy moves these fastest. It has no 16-byte integer, and copying
# complex128 to complex128 moves the bits untouched.
_BITS = {1: "|u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


@dataclass(frozen=True, slots=True, eq=False)  # one object each, wherever it comes from
class DType:
    """An element type under its Zarr v3 name, with its numpy and torch counterparts."""

    name: str
    itemsize: int = field(compare=False)
    numpy: np.dtype[Any] = field(compare=False, repr=False)
    torch: str = field(compare=False, repr=False)
    bits: np.dtype[Any] = field(compare=False, repr=False)

    @classmethod
    def of(cls, what: object) -> DType:
        """The DType of a DType, its name, a numpy dtype or scalar type, or a torch dtype."""
        if isinstance(what, DType):
            return what
        if isinstance(what, np.dtype):
            known = _BY_NUMPY.get(what)
            if known is not None:
                return known
            # "T", text of any length, has no byte order: to ask for one is an error.
            if what.kind != "T" and what.newbyteorder("<") in _BY_NUMPY:
                raise UnsupportedTypeError(
                    "big-endian arrays are not supported",
                    value=what,
                    hint='convert with array.astype(array.dtype.newbyteorder("<"))',
                )
            raise _unsupported(what.name, what)
        if isinstance(what, type):
            if what not in _BY_TYPE:
                raise _unsupported(what.__name__, what)
            return _BY_TYPE[what]
        # torch is never imported here: its dtypes are known by their str().
        name = what if isinstance(what, str) else str(what)
        found = _BY_TORCH.get(name)
        if found is None and isinstance(what, str):
            found = DTYPES.get(name)
        if found is None:
            raise _unsupported(name, what)
        return found

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[object], DType], tuple[str]]:
        return (DType.of, (self.name,))


def _make(name: str, numpy: object = None, torch: str = "") -> DType:
    dtype: np.dtype[Any] = np.dtype(numpy or name).newbyteorder("<")  # type: ignore[call-overload]
    return DType(name, dtype.itemsize, dtype, torch or name, np.dtype(_BITS[dtype.itemsize]))


_ALL = (
    _make("bool"),
    *(_make(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    _make("float16"),
    _make("bfloat16", ml_dtypes.bfloat16),
    *map(_make, ("float32", "float64", "complex64", "complex128")),
    _make("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
    _make("float8_e5m2", ml_dtypes.float8_e5m2),
    _make("float8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
    _make("float8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz),
    _make("float8_e8m0fnu", ml_dtypes.float8_e8m0fnu),
    _make("complex_float16", [("real", "<f2"), ("imag", "<f2")], "complex32"),
)
DTYPES: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _ALL})
_BY_TORCH = {f"torch.{dtype.torch}": dtype for dtype in _ALL}
_BY_NUMPY = {dtype.numpy: dtype for dtype in _ALL}
# numpy has two C integer types of the same size; both are known, by their characters.
_BY_TYPE = {dtype.numpy.type: dtype for dtype in _ALL if dtype.numpy.names is None} | {
    np.dtype(char).type: _BY_NUMPY[np.dtype(char)] for char in "bhilqBHILQ"
}

_REASONS = (
    (
        r"u?int[1-7]|float4.*|float6.*|quint4x2|quint2x4|bits(1x8|2x4|4x2)",
        "elements smaller than a byte are not supported: a cut could fall inside a byte",
        "store the packed bytes as uint8",
    ),
    (
        r"q(u?)int\d+",
        "quantised tensors are not supported: their scales are not in their elements",
        "store int_repr() and the scales as tensors of their own",
    ),
    (
        r"(datetime|timedelta)64.*",
        "times have no torch type and are not supported",
        "store them as int64",
    ),
    (
        r"object(_|0)?",
        "Python objects have no fixed size and are never pickled",
        "store arrays of numbers, or pass the value as a non-tensor object",
    ),
    (
        r"(str|string|bytes|stringdtype|void)(_|\d+)?(\(.*)?",
        "arrays of text or raw bytes are not supported",
        "pass text as a non-tensor object, raw bytes as uint8",
    ),
)


def _unsupported(name: str, value: object) -> UnsupportedTypeError:
    short = name.removeprefix("torch.").lower()
    for pattern, reason, hint in _REASONS:
        if re.fullmatch(pattern, short):
            return UnsupportedTypeError(reason, value=value, hint=hint)
    hint = nearest(short, DTYPES).rstrip() or f"supported are {', '.join(DTYPES)}"
    return UnsupportedTypeError("no such element type", value=value, hint=hint)
