"""Typed msgpack: the closed set of values a document may hold besides tensors (FORMAT section
8).
"""

from __future__ import annotations

import datetime
import enum
import io
import os
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np

from ckptkit.errors import CkptkitError, FormatError, UnsupportedTypeError
from ckptkit.model.dtype import DTYPES, DType

MAX_DEPTH = 32

_TUPLE, _INTEGER, _ARRAY, _SCALAR, _DATETIME = 1, 2, 3, 4, 5
_ACCEPTED = (
    "None, bool, int, float, str, bytes, list, tuple, dict with str or int keys, "
    "numpy scalars and arrays, datetime"
)


def encode(value: object, path: str = "", depth: int = 0) -> Any:
    """The value as msgpack types and extension types; what has none is refused by its path."""
    if depth >= MAX_DEPTH:
        raise UnsupportedTypeError(
            f"more than {MAX_DEPTH} levels deep (or it contains itself)", where=path
        )
    # The very type: a subclass would come back as something else, without what it adds.
    kind = type(value)
    if value is None or kind in (bool, float, bytes):
        return value
    if kind is str:
        return _text(value, path)
    if kind is int:
        small = _is_plain_integer(value)
        return value if small else msgpack.ExtType(_INTEGER, _shortest(value))  # type: ignore[arg-type]
    if kind is list or kind is tuple:
        items = [encode(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return items if kind is list else msgpack.ExtType(_TUPLE, msgpack.packb(items))
    if kind is dict or kind is OrderedDict:
        return {
            _key(key, path): encode(item, f"{path}.{key}" if path else str(key), depth + 1)
            for key, item in value.items()  # type: ignore[attr-defined]
        }
    if isinstance(value, (np.generic, np.ndarray)) and not isinstance(value, np.character):
        return _numpy(value, path)
    if kind is datetime.datetime:
        return msgpack.ExtType(_DATETIME, value.isoformat().encode())  # type: ignore[attr-defined]
    instead = next((text for known, text in _INSTEAD if isinstance(value, known)), "")
    if (kind.__module__, kind.__name__) in (("torch", "dtype"), ("torch", "device")):
        instead = "str(x)"
    hint = f"write {instead}; " if instead else ""
    raise UnsupportedTypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be stored",
        where=path,
        hint=f"{hint}accepted are {_ACCEPTED}; tensors belong among the arrays",
    )


# Types that people pass all the same, the narrower ones first, and what to write for such an x.
_INSTEAD: tuple[tuple[type, str], ...] = (
    (enum.Enum, "x.name"),
    (os.PathLike, "str(x)"),
    (str, "str(x)"),
    (bytes, "bytes(x)"),
    (int, "int(x)"),
    (float, "float(x)"),
    (complex, "numpy.complex128(x)"),
    (datetime.timedelta, "x.total_seconds()"),
    (datetime.date, "x.isoformat()"),
    (datetime.time, "x.isoformat()"),
    (Mapping, "dict(x)"),
    (AbstractSet, "sorted(x)"),
    (tuple, "tuple(x)"),
    (Sequence, "list(x)"),
    (deque, "list(x)"),
)


def dumps(value: object, path: str = "") -> bytes:
    """The value as bytes, equal for equal values: dictionaries keep their order."""
    return bytes(msgpack.packb(encode(value, path)))


def canonical(value: object, path: str = "") -> bytes:
    """The value as bytes that do not tell in which order its dictionaries have their keys: what
    digests are made of, and what ranks are compared by (FORMAT section 11).
    """
    return dumps(_in_order(value), path)


def unpack(data: bytes | memoryview, where: str, depth: int = 0) -> Any:
    """Decode one document or leaf; anything outside the closed set is a FormatError."""
    if depth >= MAX_DEPTH:
        raise FormatError(f"more than {MAX_DEPTH} levels deep", where=where)
    with _as_format_errors(where):
        return msgpack.unpackb(data, **_hooks(where, depth))


def unpack_items(data: bytes | memoryview, where: str, most: int) -> Iterator[Any]:
    """Decode the items of a list of at most so many one by one.

    Each takes many times its bytes as an object: the first that is wrong ends a list of millions
    before the others are made.
    """
    unpacker = msgpack.Unpacker(
        io.BytesIO(data), max_buffer_size=max(1, len(data)), **_hooks(where, 1)
    )
    with _as_format_errors(where):
        try:
            count = unpacker.read_array_header()
        except ValueError as error:
            raise FormatError("not a list", where=where) from error
        if count > most:
            raise FormatError(f"more than {most} entries", where=where, value=count)
        for _ in range(count):
            yield unpacker.unpack()


def _hooks(where: str, depth: int) -> dict[str, Any]:
    def extension(code: int, payload: bytes) -> object:
        return _extension(code, payload, where, depth + 1)

    def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise FormatError("a key appears twice in one map", where=where)
        return result

    return {"strict_map_key": False, "object_pairs_hook": unique, "ext_hook": extension}


@contextmanager
def _as_format_errors(where: str) -> Iterator[None]:
    try:
        yield
    except CkptkitError:
        raise
    except Exception as error:  # msgpack raises a dozen unrelated types on bad input
        raise FormatError(f"not valid msgpack: {error}", where=where) from error


def _in_order(value: Any) -> Any:
    """A value with the keys of every map in order: integers first, then text."""
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: (isinstance(key, str), key))
        return {key: _in_order(value[key]) for key in keys}
    if isinstance(value, (list, tuple)):
        items = [_in_order(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def check_leaf(value: object, where: str, depth: int = 0) -> Any:
    """The decoded value if its keys and depth are those of a leaf."""
    if depth >= MAX_DEPTH:
        raise FormatError(f"more than {MAX_DEPTH} levels deep", where=where)
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str and not _is_plain_integer(key):
                raise FormatError("a key that is neither text nor integer", where=where, value=key)
            check_leaf(item, where, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_leaf(item, where, depth + 1)
    elif isinstance(value, (msgpack.ExtType, msgpack.Timestamp)):
        raise FormatError("a value of an unknown type", where=where)
    return value


def _text(value: object, path: str) -> object:
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnsupportedTypeError("text that is not valid Unicode", where=path) from error
    return value


def _shortest(value: int) -> bytes:
    length = (value + (value < 0)).bit_length() // 8 + 1
    return value.to_bytes(length, "big", signed=True)


def _is_plain_integer(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**64


def _key(key: object, path: str) -> object:
    if _is_plain_integer(key):
        return key
    if type(key) is str:
        return _text(key, path)
    raise UnsupportedTypeError(
        "a dictionary key has to be a str or a 64-bit int", where=path, value=key
    )


def _numpy(value: np.generic | np.ndarray[Any, Any], path: str) -> msgpack.ExtType:
    if isinstance(value, np.ma.MaskedArray):
        raise UnsupportedTypeError("a masked array would lose its mask", where=path)
    try:
        dtype = DType.of(value.dtype)
    except UnsupportedTypeError as error:
        raise UnsupportedTypeError(error.what, where=path, hint=error.hint) from error
    if isinstance(value, np.generic):
        return msgpack.ExtType(_SCALAR, msgpack.packb([dtype.name, value.tobytes()]))
    payload = [dtype.name, list(value.shape), value.tobytes(order="C")]
    return msgpack.ExtType(_ARRAY, msgpack.packb(payload))


def _extension(code: int, payload: bytes, where: str, depth: int) -> object:
    if code == _INTEGER:
        number = int.from_bytes(payload, "big", signed=True)
        if _is_plain_integer(number) or _shortest(number) != payload:
            raise FormatError("an integer not spelled as the format demands", where=where)
        return number
    if code == _DATETIME:
        return datetime.datetime.fromisoformat(payload.decode("ascii"))
    if code == _TUPLE:
        return tuple(_items(unpack(payload, where, depth), None, where))
    # Arrays and scalars have no typed values inside.
    if code == _SCALAR:
        name, data = _items(unpack(payload, where, MAX_DEPTH - 1), 2, where)
        return _elements(name, [], data, where)[()]
    if code == _ARRAY:
        name, shape, data = _items(unpack(payload, where, MAX_DEPTH - 1), 3, where)
        return _elements(name, shape, data, where)
    raise FormatError("a value of an unknown type", where=where, value=code)


def _items(value: object, count: int | None, where: str) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise FormatError("a typed value of the wrong form", where=where)
    return value


def _elements(name: object, shape: object, data: object, where: str) -> np.ndarray[Any, Any]:
    if not (isinstance(name, str) and isinstance(shape, list) and isinstance(data, bytes)):
        raise FormatError("a typed array of the wrong form", where=where)
    dtype = DTYPES.get(name)
    if dtype is None:
        raise FormatError("no dtype of the format", where=where, value=name)
    if len(shape) > MAX_DEPTH:
        raise FormatError("a typed array of too many dims", where=where, value=len(shape))
    size, spanned = dtype.itemsize, 1
    for extent in shape:
        if type(extent) is not int or extent < 0:
            raise FormatError("a typed array of an impossible shape", where=where, value=shape)
        size *= extent
        spanned *= max(1, extent)
    if size != len(data):
        raise FormatError("a typed array whose bytes do not fit its shape", where=where)
    if spanned >= 1 << 59:  # numpy cannot hold it, or not in a wider type, even if it is empty
        raise FormatError("a typed array of an impossible shape", where=where, value=shape)
    if name == "bool" and data.strip(b"\0\1"):
        raise FormatError("a bool that is neither 0 nor 1", where=where)
    # A copy that can be written to, as the array that was stored could.
    return np.frombuffer(bytearray(data), dtype=dtype.numpy).reshape(shape)
