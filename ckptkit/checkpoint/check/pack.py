"""What every byte of a pack has to be, by its record, and what of it is not.

`verify` looks at packs with it, and a copy sends nothing on that it has not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.read.packs import PackRecord
from ckptkit.checkpoint.workers import Pace, Progress, share_out
from ckptkit.checkpoint.write.assemble import missing_groups
from ckptkit.checkpoint.write.pack import groups_pack
from ckptkit.errors import CorruptionError
from ckptkit.format.arrays import DOCUMENT, array_document, chunk_key, group_document
from ckptkit.format.manifest import Manifest
from ckptkit.format.pack import Entries, Entry, data_offset, directory, local_header
from ckptkit.format.record import Record
from ckptkit.storage import Store, default_pool

_WINDOW = 4 << 20

NOT_GROUPS = "not the group documents of the step"

Fault = tuple[int, str]
"""The byte of a pack where something is wrong, and what."""


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


@dataclass(frozen=True, slots=True, eq=False)
class PackWindow:
    """Some of a pack that is read at a time: whole entries, or some of what follows them."""

    start: int
    size: int
    entries: Sequence[Expected] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PackBytes:
    """What the bytes of a pack have to be: the entries of its record without a gap, up to `end`,
    then exactly `closing`. The pack of group documents has no record: it is `closing` alone.
    """

    found: PackRecord | None
    end: int
    closing: bytes

    @classmethod
    def of_rank(cls, found: PackRecord, where: str) -> PackBytes:
        """Those of a rank's pack; CorruptionError where its record cannot be right."""
        end = 0

        def placed() -> Iterator[Entry]:
            nonlocal end
            for entry, _ in _entries(found):
                if entry.offset != data_offset(entry.name, entry.length, end):
                    what = f"the record leaves a gap or an overlap before {entry.name}"
                    raise CorruptionError(what, where=f"{where} at byte {end}")
                end = entry.offset + entry.length
                yield entry

        closing = directory(Entries.of(placed()))
        return cls(found, end, closing)

    @classmethod
    def of_groups(cls, records: Sequence[Record]) -> PackBytes:
        """Those of the pack of group documents that no rank wrote: which belong in it follows from
        what the records say is elsewhere.
        """
        return cls(None, 0, groups_pack(missing_groups(records)))

    @property
    def size(self) -> int:
        """How many there have to be."""
        return self.end + len(self.closing)

    def windows(self, nbytes: int) -> Iterator[PackWindow]:
        """All of the pack in order, about so much at a time, and no entry in two of them.

        The entries are made anew each time: a pack may have millions of them.
        """
        if self.found is not None:
            yield from _windows(_expected(self.found), nbytes)
        for start in range(self.end, self.size, nbytes):
            yield PackWindow(start, min(nbytes, self.size - start))

    def faults(self, window: PackWindow, memory: memoryview) -> Iterator[Fault]:
        """What is wrong in the memory that a window was read into."""
        for item in window.entries:
            entry, at = item.entry, item.entry.offset - window.start
            if item.header is not None:
                header = memory[item.header - window.start : at]
                if header != local_header(entry, item.header):
                    yield item.header, f"the header of {entry.name} is damaged"
            data = memory[at : at + entry.length]
            actual = int(isal_zlib.crc32(data))
            if actual != entry.crc:
                what = f"{entry.name} has the checksum {actual:08x}, written was {entry.crc:08x}"
                yield entry.offset, what
            elif item.document is not None and data != item.document:
                # Another version may write the same in other words.
                said = None
                with suppress(ValueError):
                    said = json.loads(bytes(data))
                if said != json.loads(item.document):
                    yield entry.offset, f"{entry.name} does not say what the manifest says"
        begin = window.start - self.end
        if begin >= 0 and memory != (expected := self.closing[begin : begin + window.size]):
            pairs = enumerate(zip(bytes(memory), expected, strict=True))
            first = next(place for place, (a, b) in pairs if a != b)
            yield window.start + first, "the directory is damaged" if self.found else NOT_GROUPS


@dataclass(frozen=True, slots=True)
class PackFile:
    """A pack that is read from end to end, and by how many threads."""

    store: Store
    key: str
    size: int
    threads: int | None = None
    progress: Progress | None = None

    def faults(self, known: PackBytes) -> list[Fault]:
        """Everything in the pack that is not as it has to be."""
        if self.size == known.size:
            return self._scan(known.windows, known.faults)
        what = "the directory has another length than it should" if known.found else NOT_GROUPS
        entries = replace(known, closing=b"")
        return [*self._scan(entries.windows, entries.faults), (known.end, what)]

    def chunk_faults(self, manifest: Manifest, pack: int) -> list[Fault]:
        """What is wrong with its chunks alone, by what the manifest says of them: its record cannot
        be read.
        """
        rows = np.flatnonzero(manifest.pack == pack)
        rows = rows[np.argsort(manifest.offset[rows])]

        def windows(nbytes: int) -> Iterator[PackWindow]:
            return _windows(map(entry, rows.tolist()), nbytes)

        def entry(row: int) -> Expected:
            offset, length = int(manifest.offset[row]), int(manifest.length[row])
            crc = int(manifest.crc32[row])
            return Expected(Entry(manifest.chunk_key(row), offset, length, crc))

        # There is no knowing what follows them.
        return self._scan(windows, PackBytes(None, self.size, b"").faults)

    def _scan(
        self,
        windows: Callable[[int], Iterator[PackWindow]],
        faults: Callable[[PackWindow, memoryview], Iterable[Fault]],
    ) -> list[Fault]:
        pace = Pace.of(self.store)
        found: list[Fault] = []

        with self.store.open(self.key, self.size) as source:

            def scan(window: PackWindow) -> None:
                if not pace.waits_for_answers:
                    # Into memory that was used before, which is faster to fill.
                    with default_pool().take(window.size) as memory:
                        source.read_into(window.start, memory)
                        found.extend(faults(window, memory))
                else:
                    found.extend(faults(window, source.fetch(window.start, window.size)))
                if self.progress:
                    self.progress(window.size)

            each = pace.request_bytes if pace.waits_for_answers else _WINDOW
            share_out(windows(each), scan, self.threads or pace.requests)
        return sorted(found)


def _windows(expected: Iterable[Expected], nbytes: int) -> Iterator[PackWindow]:
    items: list[Expected] = []
    for item in expected:
        if items and item.stop - items[0].start > nbytes:
            yield PackWindow(items[0].start, items[-1].stop - items[0].start, items)
            items = []
        items.append(item)
    if items:
        yield PackWindow(items[0].start, items[-1].stop - items[0].start, items)


def _expected(found: PackRecord) -> Iterator[Expected]:
    position = 0
    for entry, document in _entries(found):
        yield Expected(entry, position, document)
        position = entry.offset + entry.length


def _entries(found: PackRecord) -> Iterator[tuple[Entry, bytes | None]]:
    """All entries in pack order, with the content of those whose content is known."""
    record = found.record
    for document in record.documents.each():
        array = record.table.by_name.get(document.name.removesuffix(f"/{DOCUMENT}"))
        yield document, group_document() if array is None else array_document(array)
    for row in range(len(record.chunk)):
        info = record.table.arrays[int(record.array[row])]
        name = chunk_key(info.name, info.grid.index(int(record.chunk[row])))
        offset, length = int(record.offset[row]), int(record.length[row])
        yield Entry(name, offset, length, int(record.crc32[row])), None
    yield found.entry, None
