"""Arrays of Zarr 2 and 3, as Orbax has tensorstore write them: which bytes are which elements.

A chunk is compressed by zstd, or not at all. In Zarr 3 it is a shard: inner chunks, and an index of
where in it each of them lies.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import google_crc32c
import numpy as np

from ckptkit.errors import CkptkitError, CorruptionError, FormatError, UnsupportedTypeError
from ckptkit.foreign.decoded import DECODED, Encoded, Place, decoded, read_places
from ckptkit.foreign.extents import Extent, c_order
from ckptkit.foreign.folder import Folder, parsed
from ckptkit.model import Box, DType, document

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
    encoded: list[Encoded] = field(default_factory=list)
    files: dict[str, None] = field(default_factory=dict)
    _starts: list[int] = field(default_factory=list)
    _end: int = 0

    def read(
        self, values: Mapping[str, Place], names: Sequence[str], *, lacks_zeros: bool
    ) -> dict[str, tuple[tuple[int, ...], DType, tuple[Extent, ...]]]:
        """The shape, type and extents of each of these. `values` is what keys have; with
        `lacks_zeros` a chunk that is all zeros may have none.
        """
        keys = [self._metadata(values, name) for name in names]
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
            inside = [place] if not zarr.is_shard or place is None else indices[key]
            for at, part in zip(_inner(zarr, origin), inside, strict=True):
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
            chunk = self.encoded[bisect_right(self._starts, extent.offset) - 1]
        if chunk.place is None:
            return dtype.numpy.type(0).item()
        (data,) = read_places(self.folder, [chunk.place])
        where = f"{self.folder.where(chunk.place.file)}: {chunk.name}"
        return decoded(data, chunk, where).view(dtype.numpy)[0].item()

    def _metadata(self, values: Mapping[str, Place], name: str) -> str:
        key = next((k for end in (_ZARR_3, _ZARR_2) if (k := f"{name}/{end}") in values), None)
        if key is None:
            raise FormatError(
                "an array is missing",
                where=f"{self.folder.store.location}: {name}",
                hint="the save was not finished, or it was not copied along; copy it again",
            )
        return key

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
        self._starts.append(self._end)
        self.encoded.append(Encoded(key, nbytes, place, zarr.is_compressed))
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
