"""msgpack as the format has it: the closed set of values that a document may hold besides tensors
(FORMAT section 8); and what records and manifests have in common: kind, version, a checksum at the
end, and tables of columns (FORMAT section 6).
"""

from __future__ import annotations

import datetime
import enum
import io
import os
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    FormatError,
    UnsupportedTypeError,
    VersionError,
)
from ckptkit.model.document import Fields
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
    if any((each.__module__, each.__name__) == ("torch", "Tensor") for each in kind.__mro__):
        hint = "a Checkpointer takes tensors in state={…}, a Writer by add; "
    raise UnsupportedTypeError(
        f"a {kind.__module__}.{kind.__qualname__} cannot be stored",
        where=path,
        hint=f"{hint}accepted are {_ACCEPTED}",
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
    try:
        return dumps(_in_order(value), path)
    except RecursionError:
        return dumps(value, path)  # which says why it cannot be


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
    def unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise FormatError("a key appears twice in one map", where=where)
        return result

    extension = partial(_extension, where=where, depth=depth + 1)
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


# Records and manifests.

VERSION = 1
MAX_DOCUMENT_BYTES = 1 << 32

CRC_MARK = 0xCE
CRC_BYTES = 5  # the mark and four bytes: a msgpack uint32 of fixed width

MAX_ROWS = (1 << 32) - 1  # of a table: one is one chunk
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


def seal(kind: str, fields: dict[str, Any], packed: Collection[str] = ()) -> bytes:
    """One msgpack map: format and version first, the CRC of everything before it last.

    The values of the fields named in `packed` are msgpack already.
    """
    document = {"format": kind, "version": VERSION, **fields}
    packer = msgpack.Packer()
    parts = [packer.pack_map_header(len(document) + 1)]
    for key, value in document.items():
        parts += packer.pack(key), value if key in packed else packer.pack(value)
    parts += packer.pack("crc32"), bytes([CRC_MARK])
    crc = 0
    for part in parts:
        crc = isal_zlib.crc32(part, crc)
    return b"".join([*parts, crc.to_bytes(4, "big")])


def unseal(kind: str, data: bytes, where: str, packed: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a document whose checksum, kind and version are right; those named in `packed`
    as the msgpack that they are.
    """
    stored = check_sum(kind, data[-CRC_BYTES:], isal_zlib.crc32(memoryview(data)[:-4]), where)
    check_head(kind, data, where)
    document: dict[str, Any] = {} if packed else unpack(data, where)
    for key, value in _walk(data, where) if packed else ():
        if key in document:
            raise FormatError("a key appears twice in one map", where=where, value=key)
        document[key] = bytes(value) if key in packed else unpack(value, where)
    last = list(document)[-1]
    if last != "crc32" or type(document[last]) is not int or document[last] != stored:
        raise FormatError("the last key is not the checksum", where=where, value=last)
    for key in ("format", "version", "crc32"):
        del document[key]
    return document


def packed_fields(data: bytes, where: str, wanted: Collection[str]) -> dict[str, memoryview]:
    """Some fields of a document as the msgpack that they are; it may be cut off behind them."""
    found: dict[str, memoryview] = {}
    for key, value in _walk(data, where):
        if key in wanted and key not in found:
            found[key] = value
        if len(found) == len(wanted):
            break
    return found


def check_sum(kind: str, tail: bytes, actual: int, where: str) -> int:
    """The checksum that a document ends with, if that is the one of all bytes before it."""
    is_sealed = len(tail) >= CRC_BYTES and tail[-CRC_BYTES] == CRC_MARK
    stored = int.from_bytes(tail[-4:], "big")
    if is_sealed and stored == actual:
        return stored
    problem = f"the checksum is {actual:08x}, written was {stored:08x}"
    raise CorruptionError(
        problem if is_sealed else f"does not end in a checksum: truncated, or no {kind}",
        where=where,
        hint="`ckpt rebuild STEP` makes a lost manifest again from the packs",
    )


def check_head(kind: str, data: bytes, where: str) -> None:
    """Kind and version, before anything that only a newer version may have is decoded."""
    head = msgpack.Unpacker(strict_map_key=False)
    head.feed(data[:256])
    try:
        entries = head.read_map_header()
        found = [head.unpack() for _ in range(min(2 * entries, 4))]
    except Exception as error:  # msgpack raises a dozen unrelated types on bad input
        raise FormatError(f"not a {kind}", where=where) from error
    if found[:1] != ["format"] or type(found[1]) is not str or found[1] != kind:
        raise FormatError(f"not a {kind}", where=where, value=found[1:2])
    version = found[3] if found[2:3] == ["version"] else None
    if type(version) is not int or version < 1:
        raise FormatError("no usable version number", where=where, value=version)
    if version > VERSION:
        raise VersionError(
            f"format version {version}, this ckptkit reads up to {VERSION}",
            where=where,
            hint="pip install --upgrade ckptkit",
        )


def _walk(data: bytes, where: str) -> Iterator[tuple[str, memoryview]]:
    """The keys of a map, and their values as they stand there."""
    walker = msgpack.Unpacker(
        io.BytesIO(data), strict_map_key=False, max_buffer_size=max(1, len(data))
    )
    view = memoryview(data)
    for _ in range(walker.read_map_header()):
        start = walker.tell()
        with _as_format_errors(where):
            walker.skip()
            middle = walker.tell()
            walker.skip()
        key = unpack(view[start:middle], where)
        if type(key) is not str:
            raise FormatError("a key that is not text", where=where, value=key)
        yield key, view[middle : walker.tell()]
    if walker.tell() != len(data):
        raise FormatError("bytes behind the document", where=where)


# Chunk tables: packed integer columns, never an object per chunk.


def columns_to_doc(columns: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """A document of little-endian columns of one length."""
    count = len(next(iter(columns.values())))
    packed = {
        name: column.astype(column.dtype.newbyteorder("<")).tobytes()
        for name, column in columns.items()
    }
    return {"count": count, **packed}


def columns_from_doc(value: object, names: Sequence[str]) -> dict[str, Any]:
    """The columns of chunks, as views of the bytes of a document, if their lengths are right."""
    fields = Fields(value, "chunks")
    count = fields.integer("count", below=MAX_ROWS + 1)
    columns = {}
    for name in names:
        dtype = np.dtype("<u8" if name in ("offset", "length", "chunk") else "<u4")
        data = fields.bytes(name)
        if len(data) != count * dtype.itemsize:
            raise FormatError(
                f"{len(data)} bytes are not {count} values of {dtype.itemsize}",
                where=fields.at(name),
            )
        columns[name] = np.frombuffer(data, dtype=dtype)
    fields.finish()
    return columns


def check_placed(pack: U32, offset: U64, length: U64, pack_sizes: Sequence[int]) -> None:
    """Every chunk lies inside its pack and apart from every other one."""
    if not len(pack):
        return
    if int(pack.max()) >= len(pack_sizes):
        raise FormatError(
            "a chunk in a pack that is not listed", where="chunks", value=int(pack.max())
        )
    sizes = np.array(pack_sizes, dtype=np.uint64)[pack]
    # The numbers are unsigned: `offset + length` may wrap, and so may `sizes - offset`.
    outside = (offset > sizes) | (length > sizes - np.minimum(offset, sizes))
    if outside.any():
        row = int(outside.argmax())
        raise FormatError(
            f"a chunk reaches past the end of its pack of {int(sizes[row])} bytes",
            where=f"chunks.{row}",
            value=(int(offset[row]), int(length[row])),
        )
    order = np.lexsort((offset, pack))
    same = pack[order][1:] == pack[order][:-1]
    clash = same & (offset[order][:-1] + length[order][:-1] > offset[order][1:])
    if clash.any():
        row = int(order[int(clash.argmax()) + 1])
        raise FormatError(
            "two chunks overlap in their pack", where=f"chunks.{row}", value=int(offset[row])
        )
