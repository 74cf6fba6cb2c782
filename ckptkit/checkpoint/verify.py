"""Is a step whole? Every byte of it is accounted for, and what is wrong comes back as findings,
not as exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ckptkit.checkpoint.assemble import assemble
from ckptkit.checkpoint.locate import manifest_at
from ckptkit.checkpoint.pace import Pace, ask_all
from ckptkit.checkpoint.places import Place, data_prefix, described, store_at
from ckptkit.checkpoint.scan import Fault, Scanned, scan_chunks, scan_groups, scan_pack
from ckptkit.checkpoint.tail import PackRecord, read_record
from ckptkit.checkpoint.threads import Progress
from ckptkit.errors import CkptkitError, FormatError, NotFoundError, StorageError
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.manifest import Manifest
from ckptkit.format.objects import whole
from ckptkit.format.record import Record
from ckptkit.storage import Options, Store

# So many packs at a time, where they are read over a network.
_PACKS = 4


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
    location: Place,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Options | None = None,
) -> list[Finding]:
    """Everything that is wrong with a step (of a run: its newest one); an empty list says that
    every byte is as it was written.

    What is no committed step at all is a NotFoundError.
    """
    store = store_at(location, storage_options)
    try:
        prefix, manifest = manifest_at(store)
    except FormatError as error:
        return [_as_finding(error, str(store.location))]
    return list(_findings(store, prefix, manifest, threads, progress))


def _findings(
    store: Store, prefix: str, manifest: Manifest, threads: int | None, progress: Progress | None
) -> Iterator[Finding]:
    folder = data_prefix(prefix, manifest.save.save_id)
    wrong_size = set()
    for finding, name in _files(store, folder, manifest):
        wrong_size.add(name)
        yield finding
    there = [n for n, pack in enumerate(manifest.packs) if pack.name not in wrong_size]
    ranks = [number for number in there if manifest.packs[number].record is not None]
    at_once = 1 if store.abilities.is_file_system else max(1, min(_PACKS, len(ranks)))
    each = max(1, (threads or Pace.of(store).requests) // at_once)
    look = _Look(store, folder, manifest, each, progress)
    # The records of other ranks may refer to rank 0's.
    looked = chain(map(look.at, ranks[:1]), ask_all(store, look.at, ranks[1:], at_once))
    records: list[Record] = []
    for findings, record in looked:
        yield from findings
        records += [] if record is None else [record]
    yield from _totals(manifest, described(store, prefix))
    if len(records) == manifest.save.world_size:
        for number in set(there).difference(ranks):
            yield from look.at_groups(number, records)
        yield from _compare(store, prefix, manifest, records)


class _Look:
    """Looks at the packs of a step, one by one."""

    def __init__(
        self,
        store: Store,
        folder: str,
        manifest: Manifest,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._store = store
        self._folder = folder
        self._manifest = manifest
        self._threads = threads
        self._progress = progress
        self._tables = ArrayTables()
        # Where rank 0 knew all arrays its table is the manifest's, and can be had without its
        # record.
        known = ArrayTable.of(manifest.arrays, manifest.aliases)
        self._tables.add(known, len(manifest.save.strategy.mesh.axes))

    def at(self, number: int) -> tuple[list[Finding], Record | None]:
        """What is wrong with a rank's pack, and its record where that can be read."""
        findings: list[Finding] = []
        record: Record | None = None
        try:
            found = self._record(number)
            record = found.record
            faults = scan_pack(self._scanned(number), found)
            if found.pack != self._manifest.packs[number]:
                faults.append((found.entry.offset, "the record is not where the manifest says"))
        except (FormatError, NotFoundError) as error:
            findings.append(_as_finding(error, self._where(number)))
            faults = self._chunk_faults(number)
        except StorageError as error:
            return [_as_finding(error, self._where(number))], record
        return [*findings, *self._told(number, faults)], record

    def at_groups(self, number: int, records: list[Record]) -> list[Finding]:
        """What is wrong with the pack of documents that no rank wrote: which belong in it follows
        from what the records say is elsewhere.
        """
        key = f"{self._folder}/{self._manifest.packs[number].name}"
        try:
            return self._told(number, scan_groups(self._store, key, self._manifest, records))
        except CkptkitError as error:
            return [_as_finding(error, self._where(number))]

    def _record(self, number: int) -> PackRecord:
        save_id, size = self._manifest.save.save_id, self._manifest.packs[number].size
        return read_record(self._store, self._folder, number, save_id, self._tables, size=size)

    def _chunk_faults(self, number: int) -> list[Fault]:
        try:
            return scan_chunks(self._scanned(number), self._manifest, number)
        except CkptkitError:
            return []  # it has been said that the pack cannot be read as it was written

    def _scanned(self, number: int) -> Scanned:
        pack = self._manifest.packs[number]
        key = f"{self._folder}/{pack.name}"
        return Scanned(self._store, key, pack.size, self._threads, self._progress)

    def _told(self, number: int, faults: list[Fault]) -> list[Finding]:
        where = self._where(number)
        return [Finding("corrupt", f"{where} at byte {at}", what) for at, what in faults]

    def _where(self, number: int) -> str:
        return described(self._store, f"{self._folder}/{self._manifest.packs[number].name}")


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


def _totals(manifest: Manifest, where: str) -> Iterator[Finding]:
    """Sums that have no total: older versions wrote them."""
    for item in manifest.objects:
        try:
            whole(item)
        except FormatError as error:
            yield _as_finding(error, where)


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
