"""The packs of a step: opened when first read, their records, and what each of their bytes has to
be.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.places import StepFolder, described, read_manifest
from ckptkit.checkpoint.workers import Pace, Progress, share_out
from ckptkit.errors import CkptkitError, CorruptionError, FormatError, NotFoundError
from ckptkit.foreign.contents import DecodedSource, ForeignManifest, GatheredSource, kept_bytes
from ckptkit.foreign.extents import DECODED
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.arrays import DOCUMENT, GROUP_DOCUMENT, array_document, chunk_key, key_of
from ckptkit.format.manifest import Manifest, PackInfo, Record, pack_name
from ckptkit.format.pack import (
    END_BYTES,
    Entries,
    Entry,
    data_offset,
    data_offsets,
    directory,
    find_record,
    local_headers,
)
from ckptkit.storage import Source, Store, default_pool

# Processes may often open 1,024 files, and one that is lent from the page cache, or read past it,
# counts twice; what is beyond this is opened for each read.
_KEPT_OPEN = 300
# The last central record (46 bytes, name, extra) and the end records, with room to spare.
_TAIL = END_BYTES + 256
_WINDOW = 4 << 20
_NOT_GROUPS = "not the group documents of the step"

Fault: TypeAlias = tuple[int, str]
"""The byte of a pack where something is wrong, and what."""
_Entries: TypeAlias = Iterable[tuple[Entry, bytes | None]]
"""Entries in pack order, with the content of those whose content is known."""


class OpenPacks:
    """Open packs by number; safe to use from any thread, except `close`."""

    def __init__(self, folder: StepFolder, manifest: Manifest) -> None:
        self.manifest = manifest
        self.pace = Pace.of(folder.store)
        # The most that is in memory of what was read, besides what is asked for.
        self.kept_bytes = 0
        self._files = len(manifest.packs)
        # Where opening asks for a pack, an open one is that which was looked at, whatever becomes
        # of its name.
        self._open_asks = folder.store.abilities.open_survives_delete
        self._folder = folder
        self._open: dict[int, Source] = {}
        self._lock = threading.Lock()

    def where(self, pack: int) -> str:
        """A pack's place, for messages."""
        return described(self._folder.store, self.key(pack))

    def corrupt(self, key: str, found: int, written: int, pack: int, at: int) -> CorruptionError:
        """What to raise for a chunk that is not what was written."""
        return CorruptionError(
            f"chunk {key} has the checksum {found:08x}, written was {written:08x}",
            where=f"{self.where(pack)} at byte {at}",
            hint="`ckpt verify` lists all damage of a step; `ckpt ls RUN` shows the other steps",
        )

    @contextmanager
    def use(self, pack: int) -> Iterator[Source]:
        """An open pack, for as long as the block lasts at least, which does nothing but read it."""
        # First without the lock: nearly every read finds its pack open, and many threads read.
        kept = self._open.get(pack)
        if kept is None:
            with self._lock:
                if pack not in self._open and len(self._open) < _KEPT_OPEN:
                    self._open[pack] = self._opened(pack)
                kept = self._open.get(pack)
        if kept is not None and self._open_asks:
            yield kept
            return
        with self._opened(pack) if kept is None else nullcontext(kept) as source:
            if self._open_asks or self.is_put_together(pack):
                yield source
                return
            # Nobody has asked the store about it: a read that fails finds out why.
            try:
                yield source
            except NotFoundError as error:
                raise self._unlike(pack, None) from error
            except CorruptionError as error:
                size = written = self.manifest.packs[pack].size
                with suppress(CkptkitError):
                    size = self._folder.store.size(self.key(pack))
                if size == written:
                    raise
                raise self._unlike(pack, size) from error

    def close(self) -> None:
        """Close all."""
        with self._lock:
            closing, self._open = self._open, {}
        for source in closing.values():
            source.close()

    def is_put_together(self, pack: int) -> bool:
        """Whether some bytes of a chunk take as long to read as all of it."""
        return pack >= self._files

    def _opened(self, pack: int) -> Source:
        written = self.manifest.packs[pack].size
        try:
            source = self._folder.store.open(self.key(pack), written)
        except NotFoundError as error:
            raise self._unlike(pack, None) from error
        if source.size != written:
            source.close()
            raise self._unlike(pack, source.size)
        return source

    def _unlike(self, pack: int, size: int | None) -> CkptkitError:
        """What to raise for a pack of another size than was written; None for one that is missing.

        A step is given up before its packs go, so its manifest says whether a missing one was.
        """
        how, what = "", "a pack of the step is missing"
        if size is not None:
            what = f"the pack has {size} bytes, written were {self.manifest.packs[pack].size}"
        else:
            try:
                now = read_manifest(self._folder).save.save_id
                how = "" if now == self.manifest.save.save_id else "overwritten"
            except NotFoundError:
                how = "deleted"
            except FormatError:
                pass
        if how:
            return NotFoundError(
                f"the step was {how} while it was read",
                where=str(self._folder),
                hint="open it again, or the run for its newest step",
            )
        return CorruptionError(
            what,
            where=self.where(pack),
            hint="`ckpt verify` lists all damage; `ckpt ls RUN` shows the other steps",
        )

    def key(self, pack: int) -> str:
        """Where the store has a pack."""
        return self._folder.pack(self.manifest.save.save_id, self.manifest.packs[pack].name)


class ForeignFiles(OpenPacks):
    """The files of a foreign checkpoint, which its manifest calls packs, and what is put together
    from them.
    """

    def __init__(self, folder: StepFolder, manifest: ForeignManifest) -> None:
        super().__init__(folder, manifest)
        self._foreign = manifest
        self._files = len(manifest.foreign.files)
        self._numbers = {pack.name: number for number, pack in enumerate(manifest.packs)}
        self.kept_bytes = kept_bytes(manifest.foreign.encoded)

    def key(self, pack: int) -> str:
        return self.manifest.packs[pack].name

    def _opened(self, pack: int) -> Source:
        if not self.is_put_together(pack):
            return super()._opened(pack)

        def use(key: str) -> AbstractContextManager[Source]:
            return self.use(self._numbers[key])

        if self.key(pack) == DECODED:
            encoded = self._foreign.foreign.encoded
            return DecodedSource(encoded, use, lambda key: described(self._folder.store, key))
        return GatheredSource(self._foreign, use)

    def _unlike(self, pack: int, size: int | None) -> CkptkitError:
        has = "is gone" if size is None else f"has {size} bytes now"
        return NotFoundError(
            f"a file of the checkpoint {has}, it had {self.manifest.packs[pack].size}",
            where=self.where(pack),
            hint="it was changed while it was read; open it again",
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackRecord:
    """A pack's record, the pack as a manifest lists it, and the record's entry in it."""

    record: Record
    pack: PackInfo
    entry: Entry


def read_record(
    folder: StepFolder,
    save_id: str,
    rank: int,
    tables: ArrayTables,
    *,
    size: int | None = None,
) -> PackRecord:
    """The record of a rank's pack, checked; CorruptionError where the pack is not the one of this
    rank and save: copied, or renamed. Rank 0's has to be read before the others.

    Who knows the size of the pack saves asking for it.
    """
    store, name = folder.store, pack_name(rank)
    key = folder.pack(save_id, name)
    where = described(store, key)
    first = _TAIL
    if store.abilities.waits_for_answers:
        # Requests are dear: most records fit into so much, and need no second one.
        first = max(_TAIL, store.abilities.gap_bytes)
    try:
        size = store.size(key) if size is None else size
        length = min(size, first)
        tail = store.read(key, size - length, length)
    except NotFoundError as error:
        raise CorruptionError(
            "the pack is missing",
            where=where,
            hint="a file of the step was moved or deleted, or not all ranks save to this place",
        ) from error
    entry = find_record(tail[-_TAIL:], size, where)
    begin = entry.offset - (size - length)
    data = tail[begin : begin + entry.length] if begin >= 0 else b""
    data = data or store.read(key, entry.offset, entry.length)
    actual = int(isal_zlib.crc32(data))
    if actual != entry.crc:
        raise CorruptionError(
            f"the record's checksum is {actual:08x}, written was {entry.crc:08x}", where=where
        )
    record = Record.from_bytes(data, where, tables, (rank, save_id))
    return PackRecord(record, PackInfo(name, size, (entry.offset, entry.length)), entry)


# What every byte of a pack has to be.


class PackWindow(NamedTuple):
    """Some of a pack that is read at a time: whole entries, or some of what follows them."""

    start: int
    size: int
    entries: Sequence[tuple[Entry, bytes | None]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class PackBytes:
    """What every byte of a pack has to be: its entries without a gap, up to `end`, then exactly
    `closing`. The pack of group documents has no record: it is `closing` alone.

    A copy of a step sends nothing on that it has not looked at with this.
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
    def of_groups(cls, groups: Iterable[str]) -> PackBytes:
        """The bytes of the pack with the documents of these groups, which no rank wrote."""
        return cls(tuple, 0, groups_pack(groups))

    @classmethod
    def of_chunks(cls, manifest: Manifest, pack: int) -> PackBytes:
        """The bytes of a pack's chunks alone, as the manifest has them: its record cannot be read,
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
                with suppress(ValueError, RecursionError):
                    said = json.loads(bytes(data))
                if said != json.loads(document):
                    yield entry.offset, f"{entry.name} does not say what the manifest says"
        begin = window.start - self.end
        if begin >= 0 and memory != (expected := self.closing[begin : begin + window.size]):
            pairs = enumerate(zip(bytes(memory), expected, strict=True))
            first = next(place for place, (a, b) in pairs if a != b)
            yield window.start + first, "the directory is damaged" if self.end else _NOT_GROUPS


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
        what = "the directory has another length than it should" if known.end else _NOT_GROUPS
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
        yield document, GROUP_DOCUMENT if array is None else array_document(array)
    for row in range(len(record.chunk)):
        info = record.table.arrays[int(record.array[row])]
        name = chunk_key(info.name, info.grid.index(int(record.chunk[row])))
        offset, length = int(record.offset[row]), int(record.length[row])
        yield Entry(name, offset, length, int(record.crc32[row])), None
    yield found.entry, None


def groups_pack(groups: Iterable[str]) -> bytes:
    """The pack of group documents alone, which has no record."""
    names, document = list(map(key_of, groups)), GROUP_DOCUMENT
    lengths = np.full(len(names), len(document))
    offsets = data_offsets(np.array(list(map(len, names)), dtype=np.int64), lengths)
    crcs = np.full(len(names), isal_zlib.crc32(document), dtype=np.uint32)
    entries = Entries(names, offsets, lengths, crcs)
    data = b"".join(header + document for header in local_headers(entries, 0))
    return data + directory(entries)
