"""From the records of all ranks to one manifest: pure, and where the ranks' stories are compared
(FORMAT section 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import CorruptionError, FormatError, PeerError
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import Alias, ArrayInfo, key_of
from ckptkit.format.leaves import canonical
from ckptkit.format.manifest import Manifest, PackInfo, Record
from ckptkit.format.names import DATA_RANK, groups_of
from ckptkit.format.objects import ObjectInfo


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
