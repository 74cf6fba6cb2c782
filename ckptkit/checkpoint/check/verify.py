"""Is a step whole? Every byte of it is accounted for, and what is wrong comes back as findings,
not as exceptions. Where the packs are whole, `rebuild` makes a lost manifest of them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ckptkit.checkpoint.check.pack import Fault, PackBytes, PackFile
from ckptkit.checkpoint.places import (
    DATA,
    MANIFEST,
    Place,
    data_prefix,
    described,
    manifest_at,
    read_manifest,
    step_name,
    step_number,
    store_at,
    under,
)
from ckptkit.checkpoint.read.packs import read_record
from ckptkit.checkpoint.workers import Pace, Progress, ask_all
from ckptkit.checkpoint.write.assemble import assemble
from ckptkit.checkpoint.write.commit import gather, publish
from ckptkit.errors import (
    CkptkitError,
    FormatError,
    NotCommittedError,
    NotFoundError,
    PeerError,
    StepExistsError,
    StorageError,
    UsageError,
    VersionError,
)
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.manifest import Manifest
from ckptkit.format.objects import whole
from ckptkit.format.record import Record
from ckptkit.storage import Options, Store

# So many packs at a time, where they are read over a network.
_PACKS = 4
# So many saves are named where there are several.
_NAMED = 8


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
    for item in manifest.objects:
        try:
            whole(item)
        except FormatError as error:  # a sum that has no total: older versions wrote them
            findings.append(_as_finding(error, described(store, prefix)))
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


def rebuild(
    location: Place, *, save_id: str | None = None, storage_options: Options | None = None
) -> Manifest:
    """Make the manifest of a step from its packs and commit it; refused where a readable one
    exists.

    A damaged or empty one is replaced.

    With the packs of several complete saves in the step, `save_id` has to say which one is
    meant.
    """
    store, prefix = store_at(location, storage_options), ""
    number = step_number(store.location.name)
    if number is not None and store.location.scheme == "file" and not isinstance(location, Store):
        # From the run down: where the step is a link, what it leads to is not this run's.
        store, prefix = store_at(store.location.parent), store.location.name
    damaged = _is_damaged(store, prefix)
    manifest = _choose(store, prefix, save_id)
    if number is not None and number != manifest.save.step:
        raise FormatError(
            f"the packs are of step {manifest.save.step}, the folder is that of step {number}",
            where=described(store, prefix),
            hint=f"the folder was renamed: call it {step_name(manifest.save.step)} again",
        )
    publish(store, prefix, manifest, replace=damaged)
    return manifest


def _is_damaged(store: Store, prefix: str) -> bool:
    """Whether there is a manifest that is damaged or empty; StepExistsError where there is a
    good one.
    """
    if MANIFEST not in store.children(prefix):
        return False
    try:
        read_manifest(store, prefix)
    except VersionError:
        raise
    except (FormatError, NotCommittedError):
        return True
    where = described(store, prefix)
    raise StepExistsError(
        "the step is committed already, and its manifest can be read",
        where=where,
        hint=f"there is nothing to rebuild; `ckpt verify {where}` looks at every byte",
    )


def _choose(store: Store, prefix: str, save_id: str | None) -> Manifest:
    where = described(store, under(prefix, DATA))
    found = store.children(under(prefix, DATA))
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
            complete[candidate] = gather(store, prefix, candidate)
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
