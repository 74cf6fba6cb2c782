"""Is a step whole? Every byte of it is accounted for, and what is wrong comes back as findings,
not as exceptions. The digest of what is in it (FORMAT section 11) is the same whatever its
strategy. Where the packs are whole, `rebuild` makes a lost manifest of them again.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from shlex import quote
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import xxhash

from ckptkit.checkpoint.places import (
    DATA,
    MANIFEST,
    READABLE_HINT,
    Place,
    StepFolder,
    described,
    read_manifest,
    step_name,
    step_number,
    store_at,
)
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.packs import Fault, PackBytes, faults_of, read_record
from ckptkit.checkpoint.read.stream import (
    STREAM_MEMORY,
    Band,
    Limits,
    Readable,
    stored_arrays,
    stream,
)
from ckptkit.checkpoint.workers import Pace, Progress, ask_all, uncollected
from ckptkit.checkpoint.write.commit import assemble, gather, missing_groups, publish
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
from ckptkit.foreign.readers import format_of
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.encoding import canonical
from ckptkit.format.manifest import Manifest, Record
from ckptkit.format.names import ALIKE, DIGEST_ALGORITHM
from ckptkit.format.objects import ObjectInfo, whole
from ckptkit.model.document import counted, parse_size
from ckptkit.storage import Options, Store

# So many packs at a time, where they are read over a network.
_PACKS = 4
# So many elements at a time are asked whether they are finite: what comes of it stays in the cache.
_FINITE_BLOCK = 1 << 16
# So many saves are named where there are several.
_NAMED = 8
_ARRAY, _OBJECT, _STEP = b"ckptkit-array-1\0", b"ckptkit-object-1\0", b"ckptkit-step-1\0"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a step."""

    kind: str
    """corrupt, missing, extra, mismatch, unreadable, or values: some are no finite numbers."""
    where: str
    what: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


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
        checkpoint = open_checkpoint(store)
    except FormatError as error:
        return [_as_finding(error, str(store.location))]
    with checkpoint:
        findings = [] if checkpoint.foreign else _compared(checkpoint, threads, progress)
        if values and not findings:
            limits = Limits.of(parse_size(memory), threads, sources=[checkpoint])
            try:
                findings = _not_finite(checkpoint, limits, progress)
            except (FormatError, StorageError) as error:
                findings = [_as_finding(error, checkpoint.location)]
    return findings


def _not_finite(checkpoint: Checkpoint, limits: Limits, progress: Progress | None) -> list[Finding]:
    """The arrays that hold NaNs or infinities."""
    stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(checkpoint.store))
    names = [
        a.name
        for a in checkpoint.manifest.arrays
        if "float" in a.dtype.name or "complex" in a.dtype.name
    ]
    counts = np.zeros((len(names), 2), np.int64)
    lock = threading.Lock()

    def count(band: Band, values: Sequence[npt.NDArray[Any]]) -> None:
        raw, dtype = values[0].reshape(-1), stored[names[band.item]].dtype
        found = np.zeros(2, np.int64)
        for begin in range(0, len(raw), _FINITE_BLOCK):
            block = raw[begin : begin + _FINITE_BLOCK].view(dtype.numpy)
            if dtype.name == "complex_float16":  # NumPy has none: to it this is a pair of halves
                block = block.view("<f2").astype(np.float32).view(np.complex64)
            if not np.isfinite(block).all():
                found += int(np.isnan(block).sum()), int(np.isinf(block).sum())
        with lock:
            counts[band.item] += found

    stream([[stored[name]] for name in names], count, limits, progress=progress)
    findings = []
    for name, (nans, infinities) in zip(names, counts.tolist(), strict=True):
        if nans or infinities:
            of = stored[name].size
            what = f"of {of} elements {nans} are NaN and {infinities} infinite"
            findings.append(Finding("values", f"{checkpoint.location}: {name}", what))
    return findings


def _compared(
    checkpoint: Checkpoint, threads: int | None, progress: Progress | None
) -> list[Finding]:
    """What is not as it was written."""
    folder, manifest, store = checkpoint.folder, checkpoint.manifest, checkpoint.store
    data = folder.data(checkpoint.save_id)
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
            read = read_record(folder, checkpoint.save_id, number, tables, size=pack.size)
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
                known_bytes = PackBytes.of_groups(missing_groups(records))
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


@dataclass(frozen=True, slots=True)
class Digest:
    """What a state is, whatever its strategy: equal digests, equal states."""

    step: str
    """The digest of all arrays and objects together."""
    arrays: dict[str, str]
    """By name; tied arrays are there under each of their names."""
    objects: dict[str, str]
    algorithm: ClassVar[str] = DIGEST_ALGORITHM
    """The hash that all of them are made with."""

    def __repr__(self) -> str:
        return f"Digest({self.step!r}, of {counted(len(self.arrays), 'array')})"

    def findings(self, checkpoint: Checkpoint) -> list[Finding]:
        """What is wrong if this is the digest of a step: it may have another one on record."""
        recorded = checkpoint.details.get("digest")
        if not isinstance(recorded, dict) or recorded.get("algorithm") != DIGEST_ALGORITHM:
            return []
        if recorded.get("step") == self.step:
            return []
        what = f"the state has the digest {self.step}, recorded is {recorded.get('step')!s:.40}"
        return [Finding("mismatch", checkpoint.location, what)]


@uncollected()
def digest(
    location: Place,
    *,
    memory: int | str = STREAM_MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: Options | None = None,
) -> Digest:
    """The digest of a step (of a run: its newest one), every chunk of which is checked."""
    store = store_at(location, storage_options)
    with open_checkpoint(store) as checkpoint:
        limits = Limits.of(parse_size(memory), threads, sources=[checkpoint])
        stored = stored_arrays(checkpoint, limits.chunk_bytes, limits.pace(store))
        return digest_of(stored, checkpoint.manifest.objects, limits, progress=progress)


def digest_of(
    arrays: Mapping[str, Readable],
    objects: Sequence[ObjectInfo],
    limits: Limits,
    *,
    progress: Progress | None = None,
) -> Digest:
    """The digest of arrays by name, where two names may have one array, and of objects as a
    manifest has them.
    """
    distinct = list({id(array): array for array in arrays.values()}.values())
    hashers = []
    for array in distinct:
        heading = _ARRAY + array.dtype.name.encode() + b"\0"
        numbers = (len(array.shape), *array.shape)
        hashers.append(xxhash.xxh3_128(heading + struct.pack(f"<{len(numbers)}Q", *numbers)))

    def add(band: Band, values: Sequence[npt.NDArray[Any]]) -> None:
        hashers[band.item].update(values[0].reshape(-1).view(np.uint8).data)

    stream([[array] for array in distinct], add, limits, ordered=True, progress=progress)
    texts = {id(array): hasher.hexdigest() for array, hasher in zip(distinct, hashers, strict=True)}
    of_arrays = {name: texts[id(arrays[name])] for name in sorted(arrays)}
    of_objects = {item.name: object_digest(item) for item in state_objects(objects, of_arrays)}
    of_step = xxhash.xxh3_128(_STEP)
    for kind, digests in ((b"a", of_arrays), (b"o", of_objects)):
        for name in sorted(digests):
            text = name.encode()
            of_step.update(kind + bytes.fromhex(digests[name]))
            of_step.update(struct.pack("<Q", len(text)) + text)
    return Digest(of_step.hexdigest(), of_arrays, of_objects)


def state_objects(objects: Sequence[ObjectInfo], arrays: Iterable[str]) -> list[ObjectInfo]:
    """The objects, sorted by name, that are part of the state, and not said of an array that is."""
    said = {f"{ALIKE}/{name}" for name in arrays}
    return sorted((o for o in objects if o.name not in said), key=lambda item: item.name)


def object_digest(item: ObjectInfo) -> str:
    """The digest of one object of a manifest."""
    hasher = xxhash.xxh3_128(_OBJECT + item.semantics.encode() + b"\0")
    hasher.update(canonical(whole(item), item.name))
    return hasher.hexdigest()


def rebuild(
    location: Place, *, save_id: str | None = None, storage_options: Options | None = None
) -> Manifest:
    """Make the manifest of a step from its packs and commit it. A damaged or empty one is replaced;
    where one can be read, that is refused.

    With the packs of several complete saves in the step, `save_id` has to say which one is meant.
    """
    store = store_at(location, storage_options)
    folder, number = StepFolder(store), step_number(store.location.name)
    if number is not None and store.location.scheme == "file" and not isinstance(location, Store):
        # From the run down: where the step is a link, what it leads to is not this run's.
        folder = StepFolder(store_at(store.location.parent), store.location.name)
    is_damaged = False
    if MANIFEST in folder.store.children(folder.name):
        try:
            read_manifest(folder)
        except VersionError:
            raise
        except (FormatError, NotCommittedError):
            is_damaged = True
        else:
            raise StepExistsError(
                "the step is committed already, and its manifest can be read",
                where=str(folder),
                hint="there is nothing to rebuild; "
                f"`ckpt verify {quote(str(folder))}` looks at every byte",
            )
    manifest = _choose(folder, save_id)
    if number is not None and number != manifest.save.step:
        raise FormatError(
            f"the packs are of step {manifest.save.step}, the folder is that of step {number}",
            where=str(folder),
            hint=f"the folder was renamed: call it {step_name(manifest.save.step)} again",
        )
    publish(folder, manifest, replace=is_damaged)
    return manifest


def _choose(folder: StepFolder, save_id: str | None) -> Manifest:
    where = folder.where(DATA)
    found = folder.store.children(folder.data())
    if not found and (known := format_of(folder.store)):
        raise UsageError(
            f"no step of ckptkit, but {known.what}: it has no manifest of ours to be made again",
            where=str(folder),
            hint=READABLE_HINT if known.reader else "load it with what wrote it",
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
