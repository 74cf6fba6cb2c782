"""The commit: data, manifest, done. And what may be said at each point where the power can fail.

1. Every rank writes its pack under a save id that was never used before, so nothing that exists
   is touched. A crash here leaves packs that no manifest names; readers do not see them and
   `prune` removes them.
2. All ranks meet, and say how long their packs are. From here on all packs are complete and
   durable: a store's sink returns from `finish` only then.
3. Rank 0 reads the records out of the packs, from the store and not from memory, and compares
   them. A crash or a disagreement here is as in 1.
4. Rank 0 creates the manifest: exclusively, or atomically over the old one when overwriting.
   Before that instant the step is what it was; after it the new one. If the answer to the create
   is lost (an error after success), the manifest is read back: if it carries our save id the
   commit happened.
5. When overwriting, the old data is freed. A crash before or in it leaves packs that no manifest
   names, as in 1.

A manifest names packs by its own save id, so whichever manifest is there names one save whole:
never a mixture. Where the store honours conditions (`Abilities.exclusive_create`), of two jobs that
save the same step exactly one returns, and the other removes what it wrote, and nothing else. Where
it ignores them, the store reads back what it put: then one that comes later is refused too, but of
two that put their manifests in the same instant both may believe that they won. The last writer has
replaced the other's step then; the data of that is an orphan which `prune` finds. The same is true
everywhere of two jobs that overwrite one step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import MANIFEST, StepFolder, manifest_bytes, manifest_size
from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.packs import PackRecord, groups_pack, read_record
from ckptkit.checkpoint.workers import asked_in_threads, at_once
from ckptkit.checkpoint.write.damage import is_replaceable
from ckptkit.errors import (
    AlreadyExistsError,
    CkptkitError,
    CorruptionError,
    FormatError,
    PeerError,
    StepExistsError,
)
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.arrays import Alias, ArrayInfo, key_of
from ckptkit.format.encoding import MAX_DOCUMENT_BYTES, canonical
from ckptkit.format.manifest import GROUPS_PACK, Manifest, PackInfo, Record, pack_name
from ckptkit.format.names import DATA_RANK, groups_of
from ckptkit.format.objects import ObjectInfo


def refuse_committed(folder: StepFolder) -> None:
    """Raise StepExistsError where the step is committed, or AlreadyExistsError where that was only
    begun.
    """
    if MANIFEST in folder.store.children(folder.name) and not is_replaceable(folder):
        # Empty is that of a commit that was cut off, or is just about to fill it.
        if manifest_size(folder) == 0:
            raise AlreadyExistsError(
                "a save of this step was killed while it committed: its manifest is empty",
                where=str(folder),
                hint="once no save is under way, `ckpt prune RUN --grace 0` removes what it left, "
                "and `ckpt rebuild STEP` commits it; overwrite=True replaces it",
            )
        raise _exists(folder)


def gather(
    folder: StepFolder,
    save_id: str,
    tables: ArrayTables | None = None,
    told: Sequence[int] | None = None,
) -> Manifest:
    """Read all records of a save, add the group documents that are missing, and make the
    manifest. Of the arrays, `tables` that are known are not read again. The sizes of the packs, by
    rank, are listed where nobody has `told` them: one that is wrong shows no record.
    """
    store, data = folder.store, folder.data(save_id)
    tables = tables or ArrayTables()
    if told is None:
        sizes = {entry.key.rpartition("/")[2]: entry.size for entry in store.list(data)}
    else:
        sizes = {pack_name(rank): size for rank, size in enumerate(told)}

    def read(rank: int) -> PackRecord:
        size = sizes.get(pack_name(rank))
        return read_record(folder, save_id, rank, tables, size=size)

    first = read(0)
    # At most one more than there are packs, which is then missing: the world size is only a number
    # in a file.
    count = min(first.record.save.world_size, len(sizes) + 1)
    readers = at_once(store.abilities)
    found = [first, *asked_in_threads(read, range(1, count), readers)]
    records, packs = [item.record for item in found], [item.pack for item in found]
    groups = missing_groups(records)
    if groups:
        # Over what a commit that did not finish may have left: nothing names that.
        pack = groups_pack(groups)
        store.put(f"{data}/{GROUPS_PACK}", pack)
        packs.append(PackInfo(GROUPS_PACK, len(pack), None))
    return assemble(records, packs)


def commit(folder: StepFolder, manifest: Manifest, *, overwrite: bool = False) -> None:
    """Make the step exist; see the module's docstring for why each point is safe."""
    overwrite = overwrite or is_replaceable(folder)
    old = committed_save_id(folder) if overwrite else None
    publish(folder, manifest, replace=overwrite)
    if old is not None and old != manifest.save.save_id:
        # The step is committed; what cannot be freed now is an orphan that `prune` finds.
        discard(folder, old)


def tell_commit(ranks: Ranks, folder: StepFolder, save_id: str) -> None:
    """Rank 0, which has committed, tells the others, and waits for none of them."""
    try:
        ranks.share(lambda: "committed")
    except (PeerError, OSError):
        # Rank 0 may have committed before it was lost, or before it could say so.
        if committed_save_id(folder) != save_id:
            raise


def publish(folder: StepFolder, manifest: Manifest, *, replace: bool) -> None:
    """Put the manifest, and nothing else; StepExistsError says that another save's is there."""
    store, key, where = folder.store, folder.key(MANIFEST), folder.where(MANIFEST)
    data = manifest.to_bytes()
    # Read as every later reader will: what cannot be opened must never count as committed.
    # A table of arrays that was read so before, out of a record or a manifest, is not read again.
    Manifest.from_bytes(data, where, manifest.table)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise FormatError(
            f"the manifest would have more than {MAX_DOCUMENT_BYTES} bytes",
            where=where,
            value=len(data),
            hint="write larger chunks: Writer(chunk_bytes=…)",
        )
    try:
        store.put(key, data, exclusive=not replace)
    except CkptkitError as error:
        there = committed_save_id(folder)
        if there == manifest.save.save_id:
            # The answer was lost, or the step is there but perhaps not durable: once more, which
            # changes nothing that can be seen. Elsewhere what is there is durable, and another save
            # may be about to replace it.
            if store.abilities.claims_names:
                store.put(key, data)
            return
        if there is not None and isinstance(error, AlreadyExistsError):
            raise _exists(folder) from error
        raise


def committed_save_id(folder: StepFolder) -> str | None:
    """The save id of the step's manifest as it is in the store now; None where there is none."""
    try:
        data = manifest_bytes(folder)
        if data is None:
            return None
        return Manifest.from_bytes(data, folder.where(MANIFEST)).save.save_id
    except FormatError:
        return None


def discard(folder: StepFolder, save_id: str, pack: str = "") -> None:
    """Remove the packs (or one) of a save that will never be committed, as far as that is possible
    now; never those that the manifest names.
    """
    store, data = folder.store, folder.data(save_id)
    with suppress(CkptkitError):
        if committed_save_id(folder) == save_id:
            return
        store.delete([f"{data}/{pack}"] if pack else [e.key for e in store.list(data)])


def _exists(folder: StepFolder) -> StepExistsError:
    return StepExistsError(
        "the step is committed already",
        where=str(folder),
        hint="save another step, delete this one first, or pass overwrite=True",
    )


# From the records of all ranks to one manifest: pure, and where the ranks' stories are compared
# (FORMAT section 6).


def assemble(records: Sequence[Record], packs: Sequence[PackInfo]) -> Manifest:
    """The manifest of complete records in rank order; disagreement, overlap and holes raise
    PeerError.
    """
    first = records[0]
    _check_same_save(records)
    tables = _tables(records)
    table = first.table if len(tables) == 1 else _merged(tables)
    _check_documents(records, table)
    rows = _rows(records, tables, table)
    objects: dict[str, dict[int, ObjectInfo]] = {}
    for record in records:
        for item in record.objects:
            objects.setdefault(item.name, {})[record.rank] = item
    columns = {}
    for name in ("offset", "length", "crc32"):
        columns[name] = _scatter(rows, [getattr(record, name) for record in records])
    counts = [len(record.chunk) for record in records]
    pack = np.repeat(np.arange(len(records), dtype=np.uint32), counts)
    return Manifest(
        save=first.save,
        packs=tuple(packs),
        table=table,
        pack=_scatter(rows, [pack]),
        objects=tuple(_merge_object(objects[name], len(records)) for name in sorted(objects)),
        **columns,
    )


def missing_groups(records: Sequence[Record]) -> list[str]:
    """The groups whose documents are in no pack, sorted."""
    keys = set[str]().union(*(record.documents.names for record in records))
    names = (name for table in _tables(records) for name in table.names)
    return sorted(group for group in groups_of(names) if key_of(group) not in keys)


def _tables(records: Sequence[Record]) -> dict[ArrayTable, int]:
    """The tables of all records, each once, with the lowest rank that has it."""
    ranks: dict[ArrayTable, int] = {}
    for record in records:
        ranks.setdefault(record.table, record.rank)
    return ranks


def _check_same_save(records: Sequence[Record]) -> None:
    first = records[0]
    details = canonical(first.save.details)
    for record in records:
        for field in ("save_id", "step", "world_size", "strategy", "details"):
            mine, theirs = getattr(first.save, field), getattr(record.save, field)
            # As bytes where arrays may be inside, which do not compare to one answer.
            same = details == canonical(theirs) if field == "details" else mine == theirs
            if not same:
                raise PeerError(
                    f"rank {first.rank} and rank {record.rank} disagree on {field}: "
                    f"{_shown(mine)} and {_shown(theirs)}"
                )


def _merged(tables: Mapping[ArrayTable, int]) -> ArrayTable:
    """One table of all that the ranks list, which do not contradict each other."""
    arrays: dict[str, tuple[ArrayInfo, int]] = {}
    aliases: dict[str, Alias] = {}
    for table, rank in tables.items():
        for array in table.arrays:
            other, known_by = arrays.setdefault(array.name, (array, rank))
            if other is not array and other != array:
                fields = ("shape", "dtype", "role", "of", "placements", "grid")
                pairs = ((each, getattr(other, each), getattr(array, each)) for each in fields)
                field, theirs, mine = next(pair for pair in pairs if pair[1] != pair[2])
                raise PeerError(
                    f"rank {known_by} and rank {rank} disagree on the {field}: "
                    f"{_shown(theirs)} and {_shown(mine)}",
                    where=array.name,
                    hint="every rank has to add the array with the same global shape, dtype and "
                    "placements",
                )
        for alias in table.aliases:
            known = aliases.setdefault(alias.name, alias)
            if known != alias:
                raise PeerError(
                    "the ranks disagree on what it is an alias of: "
                    f"{known.alias_of} and {alias.alias_of}",
                    where=alias.name,
                )
    for name in sorted(arrays.keys() & aliases.keys()):
        raise PeerError(
            f"on some ranks this is a second name of {aliases[name].alias_of}, on others an array",
            where=name,
            hint="tie the same parameters on all ranks",
        )
    try:
        return ArrayTable.of(
            [arrays[name][0] for name in sorted(arrays)],
            [aliases[name] for name in sorted(aliases)],
        )
    except FormatError as error:
        raise PeerError(
            f"the names of all ranks do not fit together: {error}",
            hint="an array has no arrays below it, and a name is an array or an alias on all ranks",
        ) from error


def _check_documents(records: Sequence[Record], table: ArrayTable) -> None:
    seen: set[str] = set()
    for record in records:
        if twice := seen.intersection(record.documents.names):
            raise PeerError("the document is in two packs", where=min(twice))
        seen.update(record.documents.names)
    missing = (name for name in table.names if key_of(name) not in seen)
    if name := next(missing, ""):
        raise PeerError(
            "no rank wrote the array's document",
            where=name,
            hint="every rank that holds a part of the array has to add it",
        )


def _rows(
    records: Sequence[Record], tables: Iterable[ArrayTable], table: ArrayTable
) -> npt.NDArray[np.int64]:
    """For each chunk of each record in order: its row in the table over all arrays, each row
    once.
    """
    place = {name: index for index, name in enumerate(table.names)}
    numbers = {
        each: np.array([place[name] for name in each.names], dtype=np.int64) for each in tables
    }
    starts, counts = table.starts, table.chunk_counts
    parts = [np.zeros(0, dtype=np.int64)]
    for record in records:
        array = numbers[record.table][record.array]
        outside = record.chunk >= counts[array]
        if outside.any():
            row = int(outside.argmax())
            raise CorruptionError(
                f"rank {record.rank} lists a chunk that its grid does not have",
                where=table.names[int(array[row])],
                value=int(record.chunk[row]),
            )
        parts.append(starts[array] + record.chunk.astype(np.int64))
    rows = np.concatenate(parts)
    # Sorted, and never a table of the size the grids claim: that size is only a number in a file.
    ordered = np.sort(rows)
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise PeerError(
            "two ranks wrote the same chunk: what they hold overlaps",
            **_chunk_at(int(ordered[twice[0]]), table),
        )
    if len(ordered) != int(table.starts[-1]):
        gaps = np.flatnonzero(ordered != np.arange(len(ordered)))
        hole = int(gaps[0]) if len(gaps) else len(ordered)
        raise PeerError(
            "no rank wrote a chunk: what the ranks hold leaves a hole",
            **_chunk_at(hole, table),
        )
    return rows


def _chunk_at(row: int, table: ArrayTable) -> dict[str, Any]:
    array, chunk = table.chunk_at(row)
    box = array.grid.box(array.grid.index(chunk))
    return {
        "where": array.name,
        "value": box,
        "hint": "every rank has to add every array it holds a part of, with the same placements",
    }


def _scatter(rows: npt.NDArray[np.int64], parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    joined = np.concatenate(parts)
    column = np.empty_like(joined)
    column[rows] = joined
    return column


def _merge_object(by_rank: dict[int, ObjectInfo], world_size: int) -> ObjectInfo:
    first_rank, first = next(iter(by_rank.items()))
    for rank, item in by_rank.items():
        # The order of keys is what a rank's code happened to do first: the lowest rank's is kept.
        same_value = item.semantics != "replicated" or (
            item is first or canonical(item.value) == canonical(first.value)
        )
        if item.semantics != first.semantics or not same_value:
            raise PeerError(
                f"rank {first_rank} and rank {rank} disagree: "
                f"{_shown(first.value)} and {_shown(item.value)}",
                where=first.name,
                hint="wrap what differs from rank to rank in PerRank(…), Sum(…) or Split(…)",
            )
    if first.semantics == "replicated":
        return first
    if first.ranks is not None:
        if len(by_rank) > 1:
            raise PeerError("two ranks say what the ranks of another job had", where=first.name)
        return first
    absent = [rank for rank in range(world_size) if rank not in by_rank]
    if absent:
        raise PeerError(
            f"rank {absent[0]} did not add this {first.semantics} value", where=first.name
        )
    values = [by_rank[rank].value for rank in range(world_size)]
    marked = [isinstance(value, dict) and DATA_RANK in value for value in values]
    if first.semantics == "per_rank" and any(marked) != all(marked):
        raise PeerError(
            f"rank {marked.index(True)} has a value of its share of the data, and rank "
            f"{marked.index(False)} one of its own",
            where=first.name,
            hint="PerDataRank(…) on all ranks, or PerRank(…) on all",
        )
    if first.semantics == "sum" and len({np.shape(value) for value in values}) > 1:
        raise PeerError("the ranks add values of different shapes", where=first.name)
    if first.semantics == "split" and len({type(value) for value in values}) > 1:
        raise PeerError("the ranks split items of different kinds", where=first.name)
    return ObjectInfo(first.name, first.semantics, values)


def _shown(value: object) -> str:
    try:
        text = str(value) if not isinstance(value, tuple) else ", ".join(map(str, value))
    except ValueError:  # an integer of thousands of digits
        return f"a value of {type(value).__name__} that is too large to show"
    return text if len(text) <= 100 else f"{text[:99]}…"
