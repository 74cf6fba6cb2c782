"""Where each byte of a pack will be, before there are any: its entries, what each is called, and
from where in a rank's memory a chunk comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import (
    GROUP_DOCUMENT,
    ArrayInfo,
    ArrayKind,
    array_document,
    chunk_key,
    key_of,
)
from ckptkit.format.manifest import documents_to_doc
from ckptkit.format.names import groups_of
from ckptkit.format.pack import (
    Directory,
    Entries,
    Entry,
    data_offsets,
    directory,
    local_headers,
)
from ckptkit.model import Box, Grid, Part
from ckptkit.model.grid import I64
from ckptkit.plan.chunks import Owned, writes_document

# Places of chunks: as many as a few layers have.
_KEPT = 4096


class PackedArray(NamedTuple):
    """One array, and the chunks of it that a pack has."""

    info: ArrayInfo
    chunks: I64


class PackPlan:
    """Where each byte of a pack will be. Documents come first, then the chunks array by array, then
    the record of them. Nearly all of it are columns.

    - One row an entry, which is a document or a chunk: `names`, `lengths`, `offsets` and `ends` of
      its data, and `crcs`, which for chunks are yet to be found.
    - One row a chunk: `array` is its place among those of the pack, `array_in_table` that in the
      table, `chunk` its number in the grid, and `begins` where it lies in memory.

    What one save of a job has found out here, the next one uses again where it holds the same.
    """

    def __init__(
        self,
        table: ArrayTable,
        documents: Sequence[tuple[str, bytes]],
        arrays: Sequence[PackedArray],
        parts: Sequence[Part] = (),
        made_for: tuple[Any, ...] = (),
    ) -> None:
        """`parts` are what a saving rank holds of the arrays; `made_for` is all that it follows
        from, where it may be used again.
        """
        self.table = table
        self.documents = documents
        self.arrays = arrays
        self.made_for = made_for
        self.parts = parts
        self.begins: list[int] = []
        """For each chunk where it begins in what the rank holds of its array, in bytes, if it lies
        there as it is stored; else -1."""
        known: dict[tuple[int, int, int], list[int]] = {}
        for (info, chunks), part in zip(arrays, parts, strict=bool(parts)):
            alike = id(info.kind), id(chunks), id(part)
            if alike not in known:
                known[alike] = _begins(info, chunks, part)
            self.begins += known[alike]
        counts = [len(array.chunks) for array in arrays]
        nothing = np.zeros(0, dtype=np.int64)
        self.array = np.repeat(np.arange(len(arrays), dtype=np.uint32), counts)
        self.chunk: I64 = np.concatenate([nothing, *(array.chunks for array in arrays)])
        # Kept, because each name is needed three times: here, in its header and in the directory.
        self.names = [name for name, _ in documents]
        lengths = [len(data) for _, data in documents]
        # Layers are alike: of 100,000 arrays a few dozen differ in how their chunks end.
        ends: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for info, chunks in arrays:
            kind = id(info.kind), id(chunks)
            if kind not in ends:
                ends[kind] = list(_ends(info.kind, chunks))
            for end, nbytes in ends[kind]:
                self.names.append(info.name + end)
                lengths.append(nbytes)
        self.lengths: I64 = np.array(lengths, dtype=np.int64)
        name_lengths = np.fromiter(map(len, self.names), np.int64, len(self.names))
        self.offsets: I64 = data_offsets(name_lengths, self.lengths)
        self.ends = self.offsets + self.lengths
        self.end = int(self.ends[-1]) if len(self.ends) else 0
        self.name_bytes = int(name_lengths.sum())
        # Known before they are written, because the length of the record depends on them.
        self.crcs: npt.NDArray[np.uint32] = np.zeros(len(lengths), dtype=np.uint32)
        self.crcs[: len(documents)] = [isal_zlib.crc32(data) for _, data in documents]
        self.packed_documents = documents_to_doc(self.entries(0, len(documents), self.crcs))
        # Arrays are sorted by name in the record, and in the order they were added in the pack.
        place = {name: index for index, name in enumerate(table.names)}
        in_table = np.array([place[array.info.name] for array in arrays], dtype=np.uint32)
        self.array_in_table = in_table[self.array]
        self.scattered: dict[int, int] = {}
        """Arrays most of whose chunks have to be gathered row by row, and whose part fits into the
        bytes of its chunks: number of the array to offset of its first chunk."""
        rows = self.array[: len(self.begins)][np.array(self.begins, dtype=np.int64) < 0]
        numbers, many = np.unique(rows, return_counts=True)
        for number, count in zip(numbers.tolist(), many.tolist(), strict=True):
            first, after = np.searchsorted(self.array, [number, number + 1]).tolist()
            start = int(self.offsets[len(documents) + first])
            stop = int(self.ends[len(documents) + after - 1])
            size = math.prod(parts[number].shape) * arrays[number].info.dtype.itemsize
            if size <= stop - start and 2 * count > after - first:
                self.scattered[number] = start
        self._headers: list[bytes] = []
        self._directory: Directory | None = None

    def keep_headers(self) -> None:
        """Make the headers and the directory once for this save and all later ones: they differ in
        nothing but checksums.
        """
        if self._directory is None:
            entries = self.entries(0, len(self.names), self.crcs)
            self._headers = local_headers(entries, 0)
            self._directory = Directory(entries)

    def headers(self, first: int, last: int) -> list[bytes]:
        """The local headers of some entries, whose checksums are yet to be put there."""
        if self._directory is not None:
            return self._headers[first:last]
        start = int(self.ends[first - 1]) if first else 0
        return local_headers(self.entries(first, last, self.crcs), start)

    def directory(self, crcs: npt.NDArray[np.uint32], record: Entry) -> bytes:
        """The directory of a pack whose entries have these checksums, with the record last."""
        if self._directory is not None:
            return self._directory.with_checksums(crcs, record, self.end)
        names, lengths = [*self.names, record.name], np.append(self.lengths, record.length)
        offsets = np.append(self.offsets, record.offset)
        all_crcs = np.append(crcs, np.uint32(record.crc))
        return directory(Entries(names, offsets, lengths, all_crcs))

    def entries(self, first: int, last: int, crcs: npt.NDArray[np.uint32]) -> Entries:
        """Some entries of a pack whose entries have these checksums."""
        return Entries(self.names, self.offsets, self.lengths, crcs).part(first, last)


def documents_of(
    known: Sequence[tuple[Owned, ArrayInfo]], writes: Sequence[I64], rank: int
) -> list[tuple[str, bytes]]:
    """The Zarr documents in the pack of a rank that writes these chunks of the arrays."""
    documents: list[tuple[str, bytes]] = []
    if rank == 0:
        groups = groups_of(held.name for held, _ in known) | {""}
        document = GROUP_DOCUMENT
        documents = [(key_of(name), document) for name in sorted(groups)]
    # Layers are alike: of 100,000 arrays a few dozen differ in what their documents say.
    said: dict[tuple[int, ...], bytes | None] = {}
    for (held, info), chunks in zip(known, writes, strict=True):
        # All of them are there until the end, so that a place in memory stands for one of them.
        kind = id(info.kind), id(held.layout), id(chunks)
        if kind not in said:
            is_mine = writes_document(held, chunks, rank)
            said[kind] = array_document(info) if is_mine else None
        if (own := said[kind]) is not None:
            documents.append((key_of(info.name), own))
    return documents


def _ends(kind: ArrayKind, chunks: I64) -> Iterator[tuple[str, int]]:
    """How the keys of some chunks end, and in how many bytes they are stored."""
    grid, nbytes = kind.grid, kind.chunk_bytes
    for chunk in chunks.tolist():
        index = grid.index(chunk)
        if not grid.is_regular:
            nbytes = math.prod(grid.stored_shape(index)) * kind.dtype.itemsize
        yield chunk_key("", index), nbytes


def _begins(info: ArrayInfo, chunks: I64, part: Part) -> list[int]:
    found = []
    for chunk in chunks.tolist():
        box, stored_shape = _box_of(info.grid, chunk)
        at = place_in(part, box)
        is_run = at is not None and box.shape == stored_shape and 0 not in box.shape
        begin, is_whole, stride = 0, True, info.dtype.itemsize
        dims = zip(at[:-1], part.shape, strict=True) if at is not None else ()
        for place, extent in reversed(list(dims)):
            length = place.stop - place.start
            is_run = is_run and (is_whole or length == 1)
            is_whole = is_whole and length == extent
            begin += place.start * stride
            stride *= extent
        found.append(begin if is_run else -1)
    return found


def chunk_view(info: ArrayInfo, chunk: int, memory: memoryview) -> tuple[Box, npt.NDArray[Any]]:
    """The box of a chunk, and its place in the memory that the chunk is stored as; what the box
    leaves of that is zero.
    """
    box, stored_shape = _box_of(info.grid, chunk)
    stored = np.frombuffer(memory, dtype=info.dtype.bits).reshape(stored_shape)
    if box.shape != stored_shape:
        stored.fill(0)
        stored = stored[tuple(slice(0, extent) for extent in box.shape)]
    return box, stored


# Cached, because layers are alike: what one has found out holds for all.
@lru_cache(_KEPT)
def _box_of(grid: Grid, chunk: int) -> tuple[Box, tuple[int, ...]]:
    index = grid.index(chunk)
    return grid.box(index), grid.stored_shape(index)


@lru_cache(_KEPT)
def place_in(part: Part, box: Box) -> tuple[Any, ...] | None:
    """The index of a box in the memory of a part, a view also where there are no dims; None where
    the part does not hold it.
    """
    for held, place in zip(part.boxes, part.places, strict=True):
        if held.contains(box):
            inner = zip(box.within(held), place.offset, strict=True)
            return (*(slice(s.start + first, s.stop + first) for s, first in inner), ...)
    return None
