"""Is a step whole? Every byte of it is accounted for, and what is wrong comes back as findings,
not as exceptions. Where the packs are whole, `rebuild` makes a lost manifest of them again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.check.findings import Finding
from ckptkit.checkpoint.places import (
    DATA,
    MANIFEST,
    READABLE_HINT,
    Place,
    StepFolder,
    described,
    manifest_at,
    read_manifest,
    step_name,
    step_number,
    store_at,
)
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_foreign
from ckptkit.checkpoint.read.packs import PackRecord, read_record
from ckptkit.checkpoint.read.stream import STREAM_MEMORY, Limits
from ckptkit.checkpoint.workers import Pace, Progress, ask_all, share_out
from ckptkit.checkpoint.write.commit import assemble, gather, missing_groups, publish
from ckptkit.checkpoint.write.pack import groups_pack
from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    FormatError,
    NotCommittedError,
    NotFoundError,
    PeerError,
    StepExistsError,
    StorageError,
    UsageError,
    VersionError,
)
from ckptkit.foreign.readers.formats import format_of
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.arrays import DOCUMENT, array_document, chunk_key, group_document
from ckptkit.format.manifest import Manifest, Record
from ckptkit.format.objects import whole
from ckptkit.format.pack import Entries, Entry, data_offset, directory, local_headers
from ckptkit.model.document import parse_size
from ckptkit.storage import Options, Store, default_pool

# So many packs at a time, where they are read over a network.
_PACKS = 4
_WINDOW = 4 << 20
_NOT_GROUPS = "not the group documents of the step"
# So many saves are named where there are several.
_NAMED = 8


def verify(
    location: Place,
    *,
    values: bool = False,
    memory: int | str = STREAM_MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Options | None = None,
) -> list[Finding]:
    """Everything that is wrong with a step (of a run: its newest one); an empty list says that
    every byte is as it was written.

    Of a foreign checkpoint, which has no checksums, it says that each element of each array is in a
    file, and no more. With `values` all floating-point numbers are looked at too, in bounded
    `memory`: NaNs and infinities are found then. What is no checkpoint at all is a NotFoundError.
    """
    store = store_at(location, storage_options)
    try:
        folder, manifest = manifest_at(store)
    except FormatError as error:
        return [_as_finding(error, str(store.location))]
    except NotFoundError as error:
        try:
            checkpoint = open_foreign(store, error)
        except FormatError as broken:
            return [_as_finding(broken, str(store.location))]
        findings: list[Finding] = []
    else:
        findings = _compared(folder, manifest, threads, progress)
        checkpoint = Checkpoint(folder, manifest)
    with checkpoint:
        if values and not findings:
            # What most commands, and all that copy steps, have no need of.
            from ckptkit.checkpoint.check.state import not_finite  # noqa: PLC0415

            limits = Limits.of(parse_size(memory), threads, sources=[checkpoint])
            try:
                findings = not_finite(checkpoint, limits, progress)
            except (FormatError, StorageError) as error:
                findings = [_as_finding(error, checkpoint.location)]
    return findings


def _compared(
    folder: StepFolder, manifest: Manifest, threads: int | None, progress: Progress | None
) -> list[Finding]:
    """What is not as it was written."""
    store, data = folder.store, folder.data(manifest.save.save_id)
    findings, wrong_size = _files(store, data, manifest)
    there = [n for n, pack in enumerate(manifest.packs) if pack.name not in wrong_size]
    ranks = [number for number in there if manifest.packs[number].record is not None]
    at_once = max(1, min(_PACKS, len(ranks))) if store.abilities.waits_for_answers else 1
    each = max(1, (threads or Pace.of(store).requests) // at_once)
    tables = ArrayTables()
    # Where rank 0 knew all arrays its table is the manifest's, and can be had without its record.
    known = ArrayTable.of(manifest.arrays, manifest.aliases)
    tables.add(known, len(manifest.save.strategy.mesh.axes))

    def look(number: int) -> tuple[list[Finding], Record | None]:
        """What is wrong with a rank's pack, and its record where that can be read."""
        pack = manifest.packs[number]
        key = f"{data}/{pack.name}"
        where = described(store, key)
        faults_by = partial(faults_of, store, key, pack.size, threads=each, progress=progress)
        found: list[Finding] = []
        record: Record | None = None
        try:
            read = read_record(folder, manifest.save.save_id, number, tables, size=pack.size)
            record = read.record
            faults = faults_by(PackBytes.of_rank(read, where))
            if read.pack != pack:
                faults.append((read.entry.offset, "the record is not where the manifest says"))
        except (FormatError, NotFoundError) as error:
            found.append(_as_finding(error, where))
            faults = []
            with suppress(CkptkitError):  # it has been said that the pack cannot be read
                faults = faults_by(PackBytes.of_chunks(manifest, number))
        except StorageError as error:
            return [_as_finding(error, where)], record
        return [*found, *_told(where, faults)], record

    # The records of other ranks may refer to rank 0's.
    looked = [*map(look, ranks[:1]), *ask_all(store, look, ranks[1:], at_once)]
    findings += chain.from_iterable(found for found, _ in looked)
    records = [record for _, record in looked if record is not None]
    for item in manifest.objects:
        try:
            whole(item)
        except FormatError as error:  # a sum that has no total: older versions wrote them
            findings.append(_as_finding(error, str(folder)))
    if len(records) == manifest.save.world_size:
        for number in set(there).difference(ranks):
            key = f"{data}/{manifest.packs[number].name}"
            try:
                known_bytes = PackBytes.of_groups(records)
                faults = faults_of(store, key, store.size(key), known_bytes, each, progress)
            except CkptkitError as error:
                findings.append(_as_finding(error, described(store, key)))
            else:
                findings += _told(described(store, key), faults)
        findings += _compare(str(folder), manifest, records)
    return findings


def _told(where: str, faults: Iterable[Fault]) -> list[Finding]:
    return [Finding("corrupt", f"{where} at byte {at}", what) for at, what in faults]


def _files(store: Store, data: str, manifest: Manifest) -> tuple[list[Finding], set[str]]:
    """Packs that are missing, of another size, or too many; and the names of the first two."""
    findings, wrong = [], set()
    present = {entry.key.rpartition("/")[2]: entry.size for entry in store.list(data)}
    for pack in manifest.packs:
        size = present.pop(pack.name, None)
        if size == pack.size:
            continue
        wrong.add(pack.name)
        kind, what = "missing", "a pack of the step is not there"
        if size is not None:
            kind, what = "corrupt", f"the pack has {size} bytes, written were {pack.size}"
        findings.append(Finding(kind, described(store, f"{data}/{pack.name}"), what))
    hint = "nothing refers to it; delete it if you did not put it there"
    for name in sorted(present):
        where = described(store, f"{data}/{name}")
        findings.append(Finding("extra", where, "not a pack of the step", hint))
    return findings, wrong


def _compare(where: str, manifest: Manifest, records: list[Record]) -> Iterator[Finding]:
    """The manifest against the one that the records give."""
    try:
        expected = assemble(records, manifest.packs)
    except CkptkitError as error:
        yield _as_finding(error, where)
        return
    if expected.to_bytes() == manifest.to_bytes():
        return
    if expected.arrays != manifest.arrays:
        yield Finding("mismatch", where, "the manifest's arrays are not those of the packs")
    columns = ("pack", "offset", "length", "crc32")
    if any(not np.array_equal(getattr(expected, c), getattr(manifest, c)) for c in columns):
        yield Finding("mismatch", where, "the manifest's chunks are not those of the packs")
    if expected.arrays == manifest.arrays:
        yield Finding("mismatch", where, "the manifest says other things than the packs do")


def _as_finding(error: CkptkitError, where: str) -> Finding:
    kind = "corrupt" if isinstance(error, FormatError) else "unreadable"
    return Finding(kind, error.where or where, error.what, error.hint)


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
        yield document, group_document() if array is None else array_document(array)
    for row in range(len(record.chunk)):
        info = record.table.arrays[int(record.array[row])]
        name = chunk_key(info.name, info.grid.index(int(record.chunk[row])))
        offset, length = int(record.offset[row]), int(record.length[row])
        yield Entry(name, offset, length, int(record.crc32[row])), None
    yield found.entry, None


def rebuild(
    location: Place, *, save_id: str | None = None, storage_options: Options | None = None
) -> Manifest:
    """Make the manifest of a step from its packs and commit it; refused where a readable one
    exists.

    A damaged or empty one is replaced.

    With the packs of several complete saves in the step, `save_id` has to say which one is
    meant.
    """
    store = store_at(location, storage_options)
    folder, number = StepFolder(store), step_number(store.location.name)
    if number is not None and store.location.scheme == "file" and not isinstance(location, Store):
        # From the run down: where the step is a link, what it leads to is not this run's.
        folder = StepFolder(store_at(store.location.parent), store.location.name)
    damaged = _is_damaged(folder)
    manifest = _choose(folder, save_id)
    if number is not None and number != manifest.save.step:
        raise FormatError(
            f"the packs are of step {manifest.save.step}, the folder is that of step {number}",
            where=str(folder),
            hint=f"the folder was renamed: call it {step_name(manifest.save.step)} again",
        )
    publish(folder, manifest, replace=damaged)
    return manifest


def _is_damaged(folder: StepFolder) -> bool:
    """Whether there is a manifest that is damaged or empty; StepExistsError where there is a
    good one.
    """
    if MANIFEST not in folder.store.children(folder.name):
        return False
    try:
        read_manifest(folder)
    except VersionError:
        raise
    except (FormatError, NotCommittedError):
        return True
    raise StepExistsError(
        "the step is committed already, and its manifest can be read",
        where=str(folder),
        hint=f"there is nothing to rebuild; `ckpt verify {folder}` looks at every byte",
    )


def _choose(folder: StepFolder, save_id: str | None) -> Manifest:
    where = folder.where(DATA)
    found = folder.store.children(folder.data())
    if not found and (known := format_of(folder.store)):
        raise UsageError(
            f"no step of ckptkit, but {known.what}: it has no manifest of ours to be made again",
            where=str(folder),
            hint=READABLE_HINT if known.read else "load it with what wrote it",
        )
    if not found:
        raise NotFoundError(
            "no packs to rebuild from",
            where=where,
            hint="pass the folder of a step; `ckpt ls RUN` lists those of a run",
        )
    if save_id is not None and save_id not in found:
        raise NotFoundError(
            "no such save",
            where=where,
            value=save_id,
            hint=f"there is {', '.join(found[-_NAMED:])}",
        )
    complete: dict[str, Manifest] = {}
    problems = []
    for candidate in [save_id] if save_id else found:
        try:
            complete[candidate] = gather(folder, candidate)
        except (FormatError, PeerError, NotFoundError) as error:
            problems.append(": ".join(filter(None, (candidate, error.where, error.what))))
    if not complete:
        raise FormatError(
            f"no save in it is complete: {'; '.join(problems)}",
            where=where,
            hint="the step was never finished, or a pack is damaged; use an older step",
        )
    if len(complete) > 1:
        raise UsageError(
            f"{len(complete)} complete saves: {', '.join(complete)}",
            where=where,
            hint="say which one with save_id (`ckpt rebuild STEP --save-id …`)",
        )
    return next(iter(complete.values()))
