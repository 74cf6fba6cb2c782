"""What records and manifests have in common: kind, version, a checksum at the end, and tables of
columns (FORMAT section 6).
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.errors import CorruptionError, FormatError, VersionError
from ckptkit.format.leaves import unpack
from ckptkit.model.document import Fields

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
    if last != "crc32" or document[last] is True or document[last] != stored:
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
        start, middle, end = walker.tell(), _skip(walker, where), _skip(walker, where)
        key = unpack(view[start:middle], where)
        if type(key) is not str:
            raise FormatError("a key that is not text", where=where, value=key)
        yield key, view[middle:end]
    if walker.tell() != len(data):
        raise FormatError("bytes behind the document", where=where)


def _skip(walker: msgpack.Unpacker, where: str) -> int:
    """Where the next value ends."""
    try:
        walker.skip()
    except Exception as error:  # as in `unpack`
        raise FormatError(f"not valid msgpack: {error}", where=where) from error
    return int(walker.tell())


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
