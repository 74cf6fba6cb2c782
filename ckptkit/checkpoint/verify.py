"""Is a step whole? Every byte of it is accounted for, and what is wrong comes back as findings,
not as exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckptkit.checkpoint.assemble import assemble
from ckptkit.checkpoint.locate import manifest_at
from ckptkit.checkpoint.places import Place, data_prefix, described, store_at
from ckptkit.checkpoint.scan import Fault, scan_chunks, scan_groups, scan_pack
from ckptkit.checkpoint.tail import read_record
from ckptkit.checkpoint.threads import Progress
from ckptkit.errors import CkptkitError, FormatError, NotFoundError, StorageError
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.manifest import Manifest
from ckptkit.format.record import Record
from ckptkit.storage import Store


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a step."""

    kind: str
    """corrupt, missing, extra, mismatch or unreadable."""
    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


def verify(
    location: Place, *, threads: int | None = None, progress: Progress | None = None
) -> list[Finding]:
    """Everything that is wrong with a step (of a run: its newest one); an empty list says that
    every byte is as it was written.

    What is no committed step at all is a NotFoundError.
    """
    store = store_at(location)
    try:
        prefix, manifest = manifest_at(store)
    except FormatError as error:
        return [_as_finding(error, str(store.location))]
    return list(_findings(store, prefix, manifest, threads, progress))


def _findings(
    store: Store, prefix: str, manifest: Manifest, threads: int | None, progress: Progress | None
) -> Iterator[Finding]:
    folder = data_prefix(prefix, manifest.save.save_id)
    tables = ArrayTables()
    # Where rank 0 knew all arrays its table is the manifest's, and can be had without its record.
    known = ArrayTable.of(manifest.arrays, manifest.aliases)
    tables.add(known, len(manifest.save.strategy.mesh.axes))
    wrong_size = set()
    for finding, name in _files(store, folder, manifest):
        wrong_size.add(name)
        yield finding
    records: list[Record] = []
    for number, pack in enumerate(manifest.packs):
        if pack.name in wrong_size:
            continue
        key = f"{folder}/{pack.name}"
        where = described(store, key)
        try:
            faults = _scan(store, folder, manifest, number, records, tables, threads, progress)
        except (FormatError, NotFoundError) as error:
            yield _as_finding(error, where)
            faults = _scan_without_record(store, key, manifest, number, threads)
        except StorageError as error:
            yield _as_finding(error, where)
            continue
        for at, what in faults:
            yield Finding("corrupt", f"{where} at byte {at}", what)
    if len(records) == manifest.save.world_size:
        yield from _compare(store, prefix, manifest, records)


def _scan(
    store: Store,
    folder: str,
    manifest: Manifest,
    number: int,
    records: list[Record],
    tables: ArrayTables,
    threads: int | None,
    progress: Progress | None,
) -> list[Fault]:
    """The faults of one pack; its record, where it has one, is added to the records."""
    pack = manifest.packs[number]
    key = f"{folder}/{pack.name}"
    if pack.record is None:
        # Which documents belong in it follows from what the records say is elsewhere.
        complete = len(records) == manifest.save.world_size
        return scan_groups(store, key, manifest, records) if complete else []
    found = read_record(store, folder, number, manifest.save.save_id, tables)
    records.append(found.record)
    faults = scan_pack(store, key, found, threads=threads, progress=progress)
    if found.pack != pack:
        faults.append((found.entry.offset, "the record is not where the manifest says"))
    return faults


def _scan_without_record(
    store: Store, key: str, manifest: Manifest, number: int, threads: int | None
) -> list[Fault]:
    try:
        return scan_chunks(store, key, manifest, number, threads=threads)
    except CkptkitError:
        return []  # it has been said that the pack cannot be read as it was written


def _files(store: Store, folder: str, manifest: Manifest) -> Iterator[tuple[Finding, str]]:
    """Packs that are missing, of another size, or too many, with their names."""
    present = {entry.key.rpartition("/")[2]: entry.size for entry in store.list(folder)}
    for pack in manifest.packs:
        where = described(store, f"{folder}/{pack.name}")
        size = present.pop(pack.name, None)
        if size is None:
            yield Finding("missing", where, "a pack of the step is not there"), pack.name
        elif size != pack.size:
            what = f"the pack has {size} bytes, written were {pack.size}"
            yield Finding("corrupt", where, what), pack.name
    for name in sorted(present):
        hint = "nothing refers to it; delete it if you did not put it there"
        where = described(store, f"{folder}/{name}")
        yield Finding("extra", where, "not a pack of the step", hint), name


def _compare(
    store: Store, prefix: str, manifest: Manifest, records: list[Record]
) -> Iterator[Finding]:
    """The manifest against the one that the records give."""
    where = described(store, prefix)
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
