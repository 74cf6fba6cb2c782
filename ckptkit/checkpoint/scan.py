"""Reading a pack from end to end and comparing every byte with what the record says it has to
be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.commit import groups_image
from ckptkit.checkpoint.pace import Pace
from ckptkit.checkpoint.tail import PackRecord
from ckptkit.checkpoint.threads import Progress, share_out
from ckptkit.format.arrays import (
    DOCUMENT,
    ArrayInfo,
    array_document,
    chunk_key,
    group_document,
    key_of,
)
from ckptkit.format.manifest import Manifest
from ckptkit.format.names import ancestors
from ckptkit.format.pack import Entry, data_offset, directory, local_header
from ckptkit.format.record import Record
from ckptkit.storage import Source, Store, default_pool

_WINDOW = 4 << 20

Fault = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Scanned:
    """A pack that is read from end to end, and by how many threads."""

    store: Store
    key: str
    size: int
    threads: int | None = None
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """An entry, and what is to be compared besides its CRC, as far as that is known."""

    entry: Entry
    header: int | None = None
    document: bytes | None = None

    @property
    def start(self) -> int:
        """Where reading it begins."""
        return self.entry.offset if self.header is None else self.header

    @property
    def stop(self) -> int:
        """Where its data ends."""
        return self.entry.offset + self.entry.length


def scan_pack(scanned: Scanned, found: PackRecord) -> list[Fault]:
    """(offset, what) for everything in a pack that is not as its record says."""
    misplaced: list[Fault] = []
    # Gone through twice, so that there is no object for each chunk.
    closing = directory(item.entry for item in placed(found, misplaced))
    if misplaced:
        return misplaced
    faults = _scan(scanned, placed(found, misplaced))
    position = found.entry.offset + found.entry.length
    if found.pack.size != position + len(closing):
        return [*faults, (position, "the directory has another length than it should")]
    actual = scanned.store.read(scanned.key, position, len(closing))
    if actual != closing:
        faults.append((position + first_difference(actual, closing), "the directory is damaged"))
    return sorted(faults)


def scan_chunks(scanned: Scanned, manifest: Manifest, pack: int) -> list[Fault]:
    """The chunks of a pack whose record cannot be read, by what the manifest says of them."""
    rows = np.flatnonzero(manifest.pack == pack)
    rows = rows[np.argsort(manifest.offset[rows])]
    expected = (Expected(_chunk(manifest, int(row))) for row in rows)
    return sorted(_scan(scanned, expected))


def scan_groups(
    store: Store, key: str, manifest: Manifest, records: Sequence[Record]
) -> list[Fault]:
    """The same for the pack of group documents, whose bytes are known."""
    expected = groups_bytes(manifest, records)
    if store.size(key) != len(expected):
        return [(0, "not the group documents of the step")]
    actual = store.read_whole(key, len(expected))
    if actual == expected:
        return []
    return [(first_difference(actual, expected), "not the group documents of the step")]


def groups_bytes(manifest: Manifest, records: Iterable[Record]) -> bytes:
    """All of the pack of group documents that no rank wrote."""
    written = {document.name for record in records for document in record.documents}
    groups = {group for array in manifest.arrays for group in ancestors(array.name)}
    image, closing = groups_image(sorted(g for g in groups if key_of(g) not in written))
    expected = bytearray(image.end)
    for segment in image.segments(1 << 30):
        image.fill(segment, memoryview(expected)[segment.start : segment.stop])
    return bytes(expected + closing)


def _chunk(manifest: Manifest, row: int) -> Entry:
    index = int(np.searchsorted(manifest.starts, row, side="right")) - 1
    array = manifest.arrays[index]
    name = chunk_key(array.name, array.grid.index(row - int(manifest.starts[index])))
    extent = int(manifest.offset[row]), int(manifest.length[row])
    return Entry(name, *extent, int(manifest.crc32[row]))


def placed(found: PackRecord, misplaced: list[Fault]) -> Iterator[Expected]:
    """All entries in pack order, up to one that does not begin where the one before it ends: that
    one is added to the faults.
    """
    position = 0
    for entry, document in _entries(found.record, found.entry):
        if entry.offset != data_offset(entry.name, entry.length, position):
            what = f"the record leaves a gap or an overlap before {entry.name}"
            misplaced.append((position, what))
            return
        yield Expected(entry, position, document)
        position = entry.offset + entry.length


def _entries(record: Record, own: Entry) -> Iterator[tuple[Entry, bytes | None]]:
    """All entries in pack order, with the content of those whose content is known."""
    for document in record.documents:
        name = document.name.removesuffix(f"/{DOCUMENT}")
        yield document, _document(record.table.by_name.get(name))
    for row in range(len(record.chunk)):
        array = record.arrays[int(record.array[row])]
        name = chunk_key(array.name, array.grid.index(int(record.chunk[row])))
        offset, length = int(record.offset[row]), int(record.length[row])
        yield Entry(name, offset, length, int(record.crc32[row])), None
    yield own, None


def _document(array: ArrayInfo | None) -> bytes:
    return group_document() if array is None else array_document(array)


def _scan(scanned: Scanned, expected: Iterable[Expected]) -> list[Fault]:
    pace = Pace.of(scanned.store)
    windows = _windows(expected, _WINDOW if pace.by_rows else pace.request_bytes)
    faults: list[Fault] = []

    with scanned.store.open(scanned.key, scanned.size) as source:

        def scan(window: Sequence[Expected]) -> None:
            start = window[0].start
            size = window[-1].stop - start
            with _read(source, start, size, copies=pace.by_rows) as memory:
                for item in window:
                    faults.extend(faults_of(item, memory, start))
            if scanned.progress:
                scanned.progress(size)

        share_out(windows, scan, scanned.threads or pace.requests)
    return faults


@contextmanager
def _read(source: Source, start: int, size: int, *, copies: bool) -> Iterator[memoryview]:
    if not copies:
        yield source.fetch(start, size)
        return
    with default_pool().take(size) as memory:
        source.read_into(start, memory)
        yield memory


def _windows(expected: Iterable[Expected], nbytes: int) -> Iterator[list[Expected]]:
    window: list[Expected] = []
    for item in expected:
        if window and item.stop - window[0].start > nbytes:
            yield window
            window = []
        window.append(item)
    if window:
        yield window


def faults_of(item: Expected, memory: memoryview, start: int) -> Iterator[Fault]:
    """What is wrong with an entry in memory that begins at byte `start` of the pack."""
    entry = item.entry
    at = entry.offset - start
    if item.header is not None:
        header = memory[item.header - start : at]
        if header != local_header(entry, item.header):
            yield item.header, f"the header of {entry.name} is damaged"
    data = memory[at : at + entry.length]
    actual = int(isal_zlib.crc32(data))
    if actual != entry.crc:
        yield (
            entry.offset,
            f"{entry.name} has the checksum {actual:08x}, written was {entry.crc:08x}",
        )
    elif item.document is not None and not _same_document(bytes(data), item.document):
        yield entry.offset, f"{entry.name} does not say what the manifest says"


def _same_document(actual: bytes, expected: bytes) -> bool:
    if actual == expected:
        return True
    try:
        found = json.loads(actual)
    except ValueError:
        return False
    return bool(found == json.loads(expected))


def first_difference(actual: bytes, expected: bytes | bytearray) -> int:
    for place, (a, b) in enumerate(zip(actual, expected, strict=False)):
        if a != b:
            return place
    return min(len(actual), len(expected))
