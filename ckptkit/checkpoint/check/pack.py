"""What every byte of a pack has to be, by its record, and what of it is not.

`verify` looks at packs with it, and a copy sends nothing on that it has not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.read.packs import PackRecord
from ckptkit.checkpoint.workers import Pace, Progress, share_out
from ckptkit.checkpoint.write.commit import missing_groups
from ckptkit.checkpoint.write.pack import groups_pack
from ckptkit.errors import CorruptionError
from ckptkit.format.arrays import DOCUMENT, array_document, chunk_key, group_document
from ckptkit.format.manifest import Manifest, Record
from ckptkit.format.pack import Entries, Entry, data_offset, directory, local_headers
from ckptkit.storage import Store, default_pool

_WINDOW = 4 << 20

NOT_GROUPS = "not the group documents of the step"

Fault = tuple[int, str]
"""The byte of a pack where something is wrong, and what."""


_Entries: TypeAlias = Iterable[tuple[Entry, bytes | None]]
"""Entries in pack order, with the content of those whose content is known."""


class PackWindow(NamedTuple):
    """Some of a pack that is read at a time: whole entries, or some of what follows them."""

    start: int
    size: int
    entries: Sequence[tuple[Entry, bytes | None]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PackBytes:
    """What the bytes of a pack have to be: its entries without a gap, up to `end`, then exactly
    `closing`. The pack of group documents has no record: it is `closing` alone.
    """

    entries: Callable[[], _Entries]
    """Makes the entries anew each time: a pack may have millions of them."""
    end: int
    closing: bytes
    has_headers: bool = True
    """Whether headers can be told from the entries: they have no gaps between them."""

    @classmethod
    def of_rank(cls, found: PackRecord, where: str) -> PackBytes:
        """The bytes of a rank's pack; CorruptionError where its record cannot be right."""
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
        return cls(partial(_entries, found), end, closing)

    @classmethod
    def of_groups(cls, records: Sequence[Record]) -> PackBytes:
        """Those of the pack of group documents that no rank wrote: which belong in it follows from
        what the records say is elsewhere.
        """
        return cls(tuple, 0, groups_pack(missing_groups(records)))

    @classmethod
    def of_chunks(cls, manifest: Manifest, pack: int) -> PackBytes:
        """Those of its chunks alone, by what the manifest says of them: its record cannot be read,
        and so there is no knowing what is between them, or follows them.
        """
        rows = np.flatnonzero(manifest.pack == pack)
        rows = rows[np.argsort(manifest.offset[rows])]

        def entries() -> _Entries:
            for row in rows.tolist():
                numbers = (manifest.offset[row], manifest.length[row], manifest.crc32[row])
                yield Entry(manifest.chunk_key(row), *map(int, numbers)), None

        return cls(entries, manifest.packs[pack].size, b"", has_headers=False)

    @property
    def size(self) -> int:
        """How many there have to be."""
        return self.end + len(self.closing)

    def windows(self, nbytes: int) -> Iterator[PackWindow]:
        """All of the pack in order, about so much at a time, and no entry in two of them."""
        start = stop = 0
        items: list[tuple[Entry, bytes | None]] = []
        for entry, document in self.entries():
            if items and entry.offset + entry.length - start > nbytes:
                yield PackWindow(start, stop - start, items)
                items = []
            if not items:
                start = stop if self.has_headers else entry.offset
            items.append((entry, document))
            stop = entry.offset + entry.length
        if items:
            yield PackWindow(start, stop - start, items)
        for start in range(self.end, self.size, nbytes):
            yield PackWindow(start, min(nbytes, self.size - start))

    def faults(self, window: PackWindow, memory: memoryview) -> Iterator[Fault]:
        """What is wrong in the memory that a window was read into."""
        position = 0
        headers = []
        if self.has_headers and window.entries:
            headers = local_headers(Entries.of(entry for entry, _ in window.entries), window.start)
        for number, (entry, document) in enumerate(window.entries):
            begin = entry.offset - window.start
            if headers and memory[position:begin] != headers[number]:
                yield window.start + position, f"the header of {entry.name} is damaged"
            position = begin + entry.length
            data = memory[begin:position]
            actual = int(isal_zlib.crc32(data))
            if actual != entry.crc:
                what = f"{entry.name} has the checksum {actual:08x}, written was {entry.crc:08x}"
                yield entry.offset, what
            elif document is not None and data != document:
                # Another version may write the same in other words.
                said = None
                with suppress(ValueError):
                    said = json.loads(bytes(data))
                if said != json.loads(document):
                    yield entry.offset, f"{entry.name} does not say what the manifest says"
        begin = window.start - self.end
        if begin >= 0 and memory != (expected := self.closing[begin : begin + window.size]):
            pairs = enumerate(zip(bytes(memory), expected, strict=True))
            first = next(place for place, (a, b) in pairs if a != b)
            yield window.start + first, "the directory is damaged" if self.end else NOT_GROUPS


def faults_of(
    store: Store,
    key: str,
    size: int,
    known: PackBytes,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Fault]:
    """Everything in a pack of this size that is not as it has to be, read from end to end by some
    threads.
    """
    pace = Pace.of(store)
    found: list[Fault] = []
    if size != known.size:
        what = "the directory has another length than it should" if known.end else NOT_GROUPS
        found.append((known.end, what))
        known = replace(known, closing=b"")

    with store.open(key, size) as source:

        def scan(window: PackWindow) -> None:
            if not pace.by_request:
                # Into memory that was used before, which is faster to fill.
                with default_pool().take(window.size) as memory:
                    source.read_into(window.start, memory)
                    found.extend(known.faults(window, memory))
            else:
                found.extend(known.faults(window, source.fetch(window.start, window.size)))
            if progress:
                progress(window.size)

        each = pace.request_bytes if pace.by_request else _WINDOW
        share_out(known.windows(each), scan, threads or pace.requests)
    return sorted(found)


def _entries(found: PackRecord) -> _Entries:
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
