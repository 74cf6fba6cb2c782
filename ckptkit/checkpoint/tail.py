"""Finding a pack's record from its end: one request where the record is small, two otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from isal import isal_zlib

from ckptkit.checkpoint.places import described
from ckptkit.errors import CorruptionError, NotFoundError
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import PackInfo, pack_name
from ckptkit.format.pack import END_BYTES, Entry, find_record
from ckptkit.format.record import Record
from ckptkit.storage import Store

# The last central record (46 bytes, name, extra) and the end records, with room to spare.
_TAIL = END_BYTES + 256


@dataclass(frozen=True, slots=True, eq=False)
class PackRecord:
    """A pack's record, the pack as a manifest lists it, and the record's entry in it."""

    record: Record
    pack: PackInfo
    entry: Entry


def read_record(
    store: Store,
    folder: str,
    rank: int,
    save_id: str,
    tables: ArrayTables,
    *,
    size: int | None = None,
) -> PackRecord:
    """The record of a rank's pack, checked; CorruptionError where the pack is not the one of this
    rank and save: copied, or renamed. Rank 0's has to be read before the others.

    Who knows the size of the pack saves asking for it.
    """
    name = pack_name(rank)
    key = f"{folder}/{name}"
    where = described(store, key)
    try:
        size = store.size(key) if size is None else size
        length = min(size, _tail_bytes(store))
        tail = store.read(key, size - length, length)
    except NotFoundError as error:
        raise CorruptionError(
            "the pack is missing", where=where, hint="a file of the step was moved or deleted"
        ) from error
    entry = find_record(tail[-_TAIL:], size, where)
    begin = entry.offset - (size - length)
    data = tail[begin : begin + entry.length] if begin >= 0 else None
    data = _checked(entry, where, data or store.read(key, entry.offset, entry.length))
    record = Record.from_bytes(data, where, tables, (rank, save_id))
    return PackRecord(record, PackInfo(name, size, (entry.offset, entry.length)), entry)


def _tail_bytes(store: Store) -> int:
    """How much of the end is read at first: where requests are dear, what most records fit into."""
    abilities = store.abilities
    return max(_TAIL, abilities.gap_bytes) if abilities.waits_for_answers else _TAIL


def _checked(entry: Entry, where: str, data: bytes) -> bytes:
    actual = int(isal_zlib.crc32(data))
    if actual != entry.crc:
        raise CorruptionError(
            f"the record's checksum is {actual:08x}, written was {entry.crc:08x}", where=where
        )
    return data
