"""What Orbax has tensorstore write: arrays of Zarr 2 and 3, whose files may be values of an OCDBT
database. Which bytes of which file are which elements?

A chunk is compressed by zstd, or not at all. In Zarr 3 it is a shard: inner chunks, and an index of
where in it each of them lies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, repeat
from typing import Any

import google_crc32c
import numpy as np

from ckptkit.errors import CkptkitError, CorruptionError, FormatError, UnsupportedTypeError
from ckptkit.foreign.contents import decoded, inflated
from ckptkit.foreign.extents import DECODED, Encoded, Extent, c_order
from ckptkit.foreign.folder import MOST_BYTES, Folder, Place, parsed, read_places
from ckptkit.model import Box, DType, document

MANIFEST = "manifest.ocdbt"
_OF_MANIFEST, _OF_NODE = b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde"
_HEADER_BYTES = 12
_UUID_BYTES = 16
_MOST_PATH = 65535
_MOST_NODE = 256 << 20
_ZARR_2, _ZARR_3 = ".zarray", "zarr.json"
_MOST_CHUNKS = 1 << 22
_ENTRY_BYTES = 16
_CRC_BYTES = 4
_NOWHERE = (1 << 64) - 1
_ZEROS = ("None", "0", "0.0", "False", "[0.0, 0.0]")
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_PLAIN_BYTES = {"name": "bytes"}  # of elements of one byte
_HINT = "restore it with Orbax, and save it again as Orbax does by itself"


@dataclass(frozen=True, slots=True)
class _Zarr:
    """What the metadata of an array says."""

    shape: tuple[int, ...]
    dtype: DType
    chunk: tuple[int, ...]
    """The shape of what a key has."""
    inner: tuple[int, ...]
    """The shape of what is compressed by itself: the same, if it is no shard."""
    is_shard: bool
    index_first: bool
    is_compressed: bool
    first: str
    """What keys of chunks begin with, if they have any dims or none."""
    separator: str
    fill: str


@dataclass(slots=True, eq=False)
class Arrays:
    """The arrays of a checkpoint, as far as they were read."""

    folder: Folder
    files: dict[str, None] = field(default_factory=dict)
    encoded: dict[int, Encoded] = field(default_factory=dict)
    """By where each begins in the file of what is decoded."""
    _end: int = 0

    def read(
        self, values: Mapping[str, Place], names: Sequence[str], *, lacks_zeros: bool
    ) -> dict[str, tuple[tuple[int, ...], DType, tuple[Extent, ...]]]:
        """The shape, type and extents of each of these. `values` is what keys have; with
        `lacks_zeros` a chunk that is all zeros may have none.
        """
        keys = []
        for name in names:
            spelled = (f"{name}/{_ZARR_3}", f"{name}/{_ZARR_2}")
            key = next((key for key in spelled if key in values), None)
            if key is None:
                raise FormatError(
                    "an array is missing",
                    where=f"{self.folder.store.location}: {name}",
                    hint="the save was not finished, or it was not copied along; copy it again",
                )
            keys.append(key)
        said = read_places(self.folder, [values[key] for key in keys])
        known = [
            _zarr(data, f"{self.folder.store.location}: {key}")
            for data, key in zip(said, keys, strict=True)
        ]
        outer = [
            (name, zarr, origin, key, values.get(key))
            for name, zarr in zip(names, known, strict=True)
            for origin, key in _chunks(name, zarr)
        ]
        indices = self._indices([(zarr, key, place) for _, zarr, _, key, place in outer])
        extents: dict[str, list[Extent]] = {name: [] for name in names}
        for name, zarr, origin, key, place in outer:
            if place is None and not (lacks_zeros and zarr.fill in _ZEROS):
                raise FormatError(
                    "a chunk is missing",
                    where=f"{self.folder.store.location}: {key}",
                    hint="the save was not finished, or the file was not copied along; where Orbax "
                    "left it out because all of it is zeros, restore it and save it again",
                )
            # What is no shard, or all of it zeros, has no index.
            inside = indices.get(key, repeat(place))
            for at, part in zip(_inner(zarr, origin), inside, strict=False):
                if part is None and zarr.fill not in _ZEROS:
                    raise FormatError("a chunk is missing", where=key)
                extents[name] += self._extent(zarr, at, key, part)
        return {
            name: (zarr.shape, zarr.dtype, tuple(extents[name]))
            for name, zarr in zip(names, known, strict=True)
        }

    def scalar(self, dtype: DType, extent: Extent) -> Any:
        """The value of an array of one element."""
        place = Place(extent.file, extent.offset, dtype.itemsize)
        chunk = Encoded("", dtype.itemsize, place, is_compressed=False)
        if extent.file == DECODED:
            chunk = self.encoded[extent.offset]
        if chunk.place is None:
            return dtype.numpy.type(0).item()
        (data,) = read_places(self.folder, [chunk.place])
        where = f"{self.folder.where(chunk.place.file)}: {chunk.name}"
        return decoded(data, chunk, where).view(dtype.numpy)[0].item()

    def _indices(
        self, shards: Sequence[tuple[_Zarr, str, Place | None]]
    ) -> dict[str, list[Place | None]]:
        """Where in each shard its inner chunks are."""
        asked: dict[str, tuple[Place, Place]] = {}
        for zarr, key, place in shards:
            if zarr.is_shard and place is not None:
                count = math.prod(zarr.chunk) // max(1, math.prod(zarr.inner))
                size = count * _ENTRY_BYTES + _CRC_BYTES
                if size > place.length:
                    raise _cut(self.folder, place, key)
                start = 0 if zarr.index_first else place.length - size
                asked[key] = place, _part(place, start, size)
        read = read_places(self.folder, [index for _, index in asked.values()])
        found: dict[str, list[Place | None]] = {}
        for (key, (place, _)), data in zip(asked.items(), read, strict=True):
            rows, crc = data[:-_CRC_BYTES], int.from_bytes(data[-_CRC_BYTES:], "little")
            if google_crc32c.value(rows) != crc:
                raise CorruptionError(
                    "the index of a shard has another checksum",
                    where=f"{self.folder.where(place.file)}: {key}",
                    hint="the file was damaged; copy it again",
                )
            found[key] = []
            for start, length in np.frombuffer(rows, "<u8").reshape(-1, 2).tolist():
                is_there = (start, length) != (_NOWHERE, _NOWHERE)
                if is_there and start + length > place.length:
                    raise _cut(self.folder, place, key)
                found[key].append(_part(place, start, length) if is_there else None)
        return found

    def _extent(
        self, zarr: _Zarr, at: tuple[int, ...], key: str, place: Place | None
    ) -> Iterator[Extent]:
        """What of an array one chunk is; nothing where the chunk lies behind its end."""
        shape = tuple(
            min(n, size - o) for n, size, o in zip(zarr.inner, zarr.shape, at, strict=True)
        )
        if any(n <= 0 for n in shape):
            return
        # A chunk at the end of a dim is as large as all others.
        strides = None if shape == zarr.inner else c_order(zarr.inner)
        nbytes = math.prod(zarr.inner) * zarr.dtype.itemsize
        if place is not None:
            self.files[place.file] = None
            if place.inside is None and (
                place.offset + place.length > self.folder.size(place.file)
            ):
                raise _cut(self.folder, place, key)
            if not zarr.is_compressed and place.length != nbytes:
                raise _cut(self.folder, place, key)
            if not zarr.is_compressed and place.inside is None:
                yield Extent(Box(at, shape), place.file, place.offset, strides)
                return
        self.encoded[self._end] = Encoded(key, nbytes, place, zarr.is_compressed)
        yield Extent(Box(at, shape), DECODED, self._end, strides)
        self._end += nbytes


def _part(place: Place, start: int, length: int) -> Place:
    if place.inside is not None:
        return replace(place, length=length, inside=place.inside[start : start + length])
    return Place(place.file, place.offset + start, length)


def _cut(folder: Folder, place: Place, key: str) -> FormatError:
    return FormatError(
        "a chunk is not as long as it has to be, or not all of it is in its file",
        where=f"{folder.where(place.file)}: {key}",
        value=(place.offset, place.length),
        hint="the file was cut short; copy it again",
    )


def _chunks(name: str, zarr: _Zarr) -> Iterator[tuple[tuple[int, ...], str]]:
    """Where each chunk begins, and its key."""
    counts = [-(-n // size) for n, size in zip(zarr.shape, zarr.chunk, strict=True)]
    for index in product(*map(range, counts)):
        nodes = [*([zarr.first] if zarr.first else []), *map(str, index)] or ["0"]
        origin = tuple(i * size for i, size in zip(index, zarr.chunk, strict=True))
        yield origin, f"{name}/{zarr.separator.join(nodes)}"


def _inner(zarr: _Zarr, origin: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    counts = (n // size for n, size in zip(zarr.chunk, zarr.inner, strict=True))
    for index in product(*map(range, counts)):
        yield tuple(o + i * size for o, i, size in zip(origin, index, zarr.inner, strict=True))


def _zarr(data: bytes, where: str) -> _Zarr:
    said = parsed(data, where)
    if not isinstance(said, dict):
        raise FormatError("not the metadata of an array", where=where)
    try:
        found = _version_2(said, where) if where.endswith(_ZARR_2) else _version_3(said, where)
    except UnsupportedTypeError as error:
        error.where = where
        raise
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise FormatError("not the metadata of an array", where=where, value=str(error)) from error
    sizes = (found.shape, found.chunk, found.inner)
    if len({*map(len, sizes)}) > 1:
        raise FormatError("its chunks have other dims than the array", where=where)
    pairs = zip(found.chunk, found.inner, strict=True)
    if any(outer % inner for outer, inner in pairs):
        raise FormatError("a shard is no whole number of chunks", where=where)
    counts = (-(-n // size) for n, size in zip(found.shape, found.chunk, strict=True))
    inside = math.prod(found.chunk) // math.prod(found.inner)
    if (count := math.prod(counts) * inside) > _MOST_CHUNKS:
        raise FormatError("it is cut into too many chunks", where=where, value=count)
    return found


def _version_2(said: Mapping[str, Any], where: str) -> _Zarr:
    compressor, name = said["compressor"], said["dtype"]
    if said["filters"] or said["order"] != "C" or (compressor or {"id": "zstd"})["id"] != "zstd":
        raise _unread(where, [compressor, said["filters"], said["order"]])
    # A name of numpy, or where it has none, that of the type.
    dtype = DType.of(np.dtype(name)) if name[:1] in "<>|" else DType.of(name)
    chunk = document.integers(said["chunks"], where, least=1)
    return _Zarr(
        *(document.integers(said["shape"], where), dtype, chunk, chunk),
        *(False, False, compressor is not None),
        *("", said.get("dimension_separator", "."), str(said["fill_value"])),
    )


def _version_3(said: Mapping[str, Any], where: str) -> _Zarr:
    grid, encoding, codecs = said["chunk_grid"], said["chunk_key_encoding"], said["codecs"]
    if grid["name"] != "regular" or encoding["name"] not in ("default", "v2"):
        raise _unread(where, [grid["name"], encoding["name"]])
    is_ours = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if is_ours else ".")
    chunk = inner = document.integers(grid["configuration"]["chunk_shape"], where, least=1)
    is_shard, index_first = codecs[0]["name"] == "sharding_indexed", False
    if is_shard:
        shard = codecs[0]["configuration"]
        index = [codec["name"] for codec in shard["index_codecs"]]
        if len(codecs) > 1 or index != ["bytes", "crc32c"]:
            raise _unread(where, codecs)
        inner = document.integers(shard["chunk_shape"], where, least=1)
        codecs, index_first = shard["codecs"], shard.get("index_location", "end") == "start"
    names = [codec["name"] for codec in codecs]
    if codecs[0] not in (_BYTES, _PLAIN_BYTES) or names[1:] not in ([], ["zstd"]):
        raise _unread(where, codecs)
    return _Zarr(
        *(document.integers(said["shape"], where), DType.of(said["data_type"]), chunk, inner),
        *(is_shard, index_first, len(names) > 1),
        *("c" if is_ours else "", separator, str(said["fill_value"])),
    )


def _unread(where: str, value: object) -> CkptkitError:
    return FormatError(
        "chunks of a kind that is not read here", where=where, value=value, hint=_HINT
    )


# An OCDBT database: its manifest names the root of a B-tree; leaves have the values, or say where
# they are. Each process of a job wrote a database of its own, and a manifest that was written last
# has all of them below it. All of it is read once: of a value no more than its place.


@dataclass(frozen=True, slots=True)
class _Node:
    """Where a node is, how high above the leaves, what all its keys begin with, and its files."""

    place: Place
    height: int
    prefix: bytes
    base: str


def read_database(folder: Folder, top: str) -> dict[str, Place]:
    """What each key has. `top` is the folder of the database, with its slash, or empty."""
    key = f"{top}{MANIFEST}"
    said = _Fields(folder.read(key), _OF_MANIFEST, folder.where(key))
    level = _roots(said, top)
    found: dict[str, Place] = {}
    spent = 0
    while level:
        below: list[_Node] = []
        places = [node.place for node in level]
        for node, data in zip(level, read_places(folder, places), strict=True):
            where = f"{folder.where(node.place.file)} at byte {node.place.offset}"
            said = _Fields(data, _OF_NODE, where)
            # A hostile tree may have each node as a child of many others.
            spent += len(said.data) + len(node.prefix)
            if spent > MOST_BYTES:
                raise FormatError(f"a tree of more than {MOST_BYTES} bytes", where=where)
            if said.raw(1)[0] != node.height:
                raise said.wrong("a node that is not as high as its parent says")
            files = said.files(node.base)
            if node.height:
                below += _children(said, files, node, top)
            else:
                spent += _values(said, files, node, top, found)
        level = below
    return found


def _roots(said: _Fields, top: str) -> list[_Node]:
    """The root of the newest version; none of a database without keys."""
    said.raw(_UUID_BYTES)
    if said.number():
        raise said.wrong("a database whose manifest is in several files")
    said.numbers(2)  # the most bytes of a value inside of a node, and of a node
    said.raw(1)  # how wide the tree of versions is
    if said.number():
        said.raw(4)  # the level of zstd
    files = said.files("")
    count = said.number()
    said.numbers(count)  # generations
    heights = said.raw(count)
    numbers, offsets, lengths, keys = (said.numbers(count) for _ in range(4))
    if not count or not keys[-1]:
        return []
    file, base = said.file(files, numbers[-1])
    return [_Node(Place(f"{top}{file}", offsets[-1], lengths[-1]), heights[-1], b"", base)]


def _children(said: _Fields, files: list[tuple[str, str]], node: _Node, top: str) -> list[_Node]:
    count = said.number()
    keys, common = said.keys(count, has_common=True)
    rows = zip(keys, common, *(said.numbers(count) for _ in range(3)), strict=True)
    found = []
    for key, shared, number, offset, length in rows:
        file, base = said.file(files, number)
        where = Place(f"{top}{file}", offset, length)
        found.append(_Node(where, node.height - 1, node.prefix + key[:shared], base))
    return found


def _values(
    said: _Fields, files: list[tuple[str, str]], node: _Node, top: str, found: dict[str, Place]
) -> int:
    """Put what a leaf has to what was found; the bytes of its keys."""
    count = said.number()
    keys, _ = said.keys(count)
    lengths, kinds = said.numbers(count), said.numbers(count)
    if not {*kinds} <= {0, 1}:
        raise said.wrong("a value that is neither inside nor outside of its node")
    apart = sum(kinds)
    outside = zip(said.numbers(apart), said.numbers(apart), strict=True)
    spent = 0
    for key, length, is_outside in zip(keys, lengths, kinds, strict=True):
        if is_outside:
            number, offset = next(outside)
            file, _ = said.file(files, number)
            place = Place(f"{top}{file}", offset, length)
        else:
            place = Place(node.place.file, node.place.offset, length, said.raw(length))
        name = node.prefix + key
        spent += len(name)
        try:
            found[name.decode()] = place
        except UnicodeDecodeError as error:
            raise said.wrong("a key that is no text") from error
    return spent


class _Fields:
    """What is in a manifest or a node, taken one after the other."""

    def __init__(self, data: bytes, magic: bytes, where: str) -> None:
        self.where = where
        self.data = data
        crc = int.from_bytes(data[-_CRC_BYTES:], "little")
        if data[:4] != magic or int.from_bytes(data[4:_HEADER_BYTES], "little") != len(data):
            raise self.wrong("no database of tensorstore, or one that was cut short")
        if google_crc32c.value(data[:-_CRC_BYTES]) != crc:
            raise CorruptionError(
                "the checksum is not that of what is there",
                where=where,
                value=f"{crc:08x}",
                hint="the file was damaged; copy it again",
            )
        self.data, self._at = data[_HEADER_BYTES:-_CRC_BYTES], 0
        if self.number() or (method := self.number()) > 1:
            raise self.wrong("a version, or a compression, that is not read here")
        if method:
            frame = self.data[self._at :]
            self.data, self._at = inflated(frame, where, most=_MOST_NODE).tobytes(), 0

    def wrong(self, what: str) -> FormatError:
        return FormatError(what, where=self.where)

    def raw(self, count: int) -> bytes:
        if count > len(self.data) - self._at:
            raise self.wrong("it ends in the middle of a field")
        self._at += count
        return self.data[self._at - count : self._at]

    def number(self) -> int:
        return self.numbers(1)[0]

    def numbers(self, count: int) -> list[int]:
        """So many: of each byte seven bits, the lowest first, and one that says whether more
        follow.
        """
        if count > len(self.data) - self._at:
            raise self.wrong("it ends in the middle of a field")
        found, data, at = [], self.data, self._at
        try:
            for _ in range(count):
                value = shift = 0
                while (byte := data[at]) & 0x80:
                    value |= (byte & 0x7F) << shift
                    shift += 7
                    at += 1
                    if shift > 63:
                        raise self.wrong("a number of more than 64 bits")
                found.append(value | byte << shift)
                at += 1
        except IndexError as error:
            raise self.wrong("it ends in the middle of a field") from error
        self._at = at
        return found

    def keys(self, count: int, *, has_common: bool = False) -> tuple[list[bytes], list[int]]:
        """Keys, each of which says how much of the one before it begins with; and how much of each
        all below it begin with.
        """
        shared = [0, *self.numbers(max(0, count - 1))][:count]
        more = self.numbers(count)
        common = self.numbers(count) if has_common else []
        found: list[bytes] = []
        last, total = b"", 0
        for begin, length in zip(shared, more, strict=True):
            total += begin + length
            if begin > len(last) or begin + length > _MOST_PATH or total > MOST_BYTES:
                raise self.wrong("a name that is longer than names are")
            last = last[:begin] + self.raw(length)
            found.append(last)
        return found, common

    def files(self, base: str) -> list[tuple[str, str]]:
        """The files of a node, and what those of its children begin with."""
        paths, common = self.keys(self.number(), has_common=True)
        try:
            return [
                (base + path.decode(), base + path[:length].decode())
                for path, length in zip(paths, common, strict=True)
            ]
        except UnicodeDecodeError as error:
            raise self.wrong("a name of a file that is no text") from error

    def file(self, files: list[tuple[str, str]], number: int) -> tuple[str, str]:
        if number >= len(files):
            raise self.wrong("a file that is not in its table")
        return files[number]
