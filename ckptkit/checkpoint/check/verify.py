"""Is a step whole? Every byte of it is accounted for, and what is wrong comes back as findings,
not as exceptions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ckptkit.checkpoint.check.pack import Fault, PackBytes, PackFile
from ckptkit.checkpoint.locate import manifest_at
from ckptkit.checkpoint.places import Place, data_prefix, described, store_at
from ckptkit.checkpoint.read.packs import read_record
from ckptkit.checkpoint.workers import Pace, Progress, ask_all
from ckptkit.checkpoint.write.assemble import assemble
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
    folder = data_prefix(prefix, manifest.save.save_id)
    findings, wrong_size = _files(store, folder, manifest)
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
        key = f"{folder}/{pack.name}"
        where = described(store, key)
        file = PackFile(store, key, pack.size, each, progress)
        found: list[Finding] = []
        record: Record | None = None
        try:
            read = read_record(store, folder, number, manifest.save.save_id, tables, size=pack.size)
            record = read.record
            faults = file.faults(PackBytes.of_rank(read, where))
            if read.pack != pack:
                faults.append((read.entry.offset, "the record is not where the manifest says"))
        except (FormatError, NotFoundError) as error:
            found.append(_as_finding(error, where))
            faults = []
            with suppress(CkptkitError):  # it has been said that the pack cannot be read
                faults = file.chunk_faults(manifest, number)
        except StorageError as error:
            return [_as_finding(error, where)], record
        return [*found, *_told(where, faults)], record

    # The records of other ranks may refer to rank 0's.
    looked = [*map(look, ranks[:1]), *ask_all(store, look, ranks[1:], at_once)]
    findings += chain.from_iterable(found for found, _ in looked)
    records = [record for _, record in looked if record is not None]
    findings += _totals(manifest, described(store, prefix))
    if len(records) == manifest.save.world_size:
        for number in set(there).difference(ranks):
            key = f"{folder}/{manifest.packs[number].name}"
            try:
                file = PackFile(store, key, store.size(key), each, progress)
                faults = file.faults(PackBytes.of_groups(records))
            except CkptkitError as error:
                findings.append(_as_finding(error, described(store, key)))
            else:
                findings += _told(described(store, key), faults)
        findings += _compare(store, prefix, manifest, records)
    return findings


def _told(where: str, faults: Iterable[Fault]) -> list[Finding]:
    return [Finding("corrupt", f"{where} at byte {at}", what) for at, what in faults]


def _files(store: Store, folder: str, manifest: Manifest) -> tuple[list[Finding], set[str]]:
    """Packs that are missing, of another size, or too many; and the names of the first two."""
    findings, wrong = [], set()
    present = {entry.key.rpartition("/")[2]: entry.size for entry in store.list(folder)}
    for pack in manifest.packs:
        size = present.pop(pack.name, None)
        if size == pack.size:
            continue
        wrong.add(pack.name)
        kind, what = "missing", "a pack of the step is not there"
        if size is not None:
            kind, what = "corrupt", f"the pack has {size} bytes, written were {pack.size}"
        findings.append(Finding(kind, described(store, f"{folder}/{pack.name}"), what))
    hint = "nothing refers to it; delete it if you did not put it there"
    for name in sorted(present):
        where = described(store, f"{folder}/{name}")
        findings.append(Finding("extra", where, "not a pack of the step", hint))
    return findings, wrong


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
