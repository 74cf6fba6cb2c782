"""Finding a pack's record from its end: one request where the record is small, two otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from isal import isal_zlib

from ckptkit.checkpoint.places import described
from ckptkit.errors import CorruptionError, NotFoundError
from ckptkit.format.manifest import PackInfo
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


def read_record(store: Store, key: str) -> PackRecord:
    """The record of a pack, checked."""
    where = described(store, key)
    try:
        size = store.size(key)
    except NotFoundError as error:
        raise CorruptionError(
            "the pack is missing", where=where, hint="a file of the step was moved or deleted"
        ) from error
    length = min(size, _TAIL)
    entry = find_record(store.read(key, size - length, length), size, where)
    record = Record.from_bytes(_checked(store, key, entry, where), where)
    pack = PackInfo(key.rpartition("/")[2], size, (entry.offset, entry.length))
    return PackRecord(record, pack, entry)


def check_belongs(store: Store, key: str, record: Record, rank: int, save_id: str) -> None:
    """CorruptionError where a pack is not the one of this rank and save: copied, or renamed."""
    if record.rank != rank or record.save.save_id != save_id:
        raise CorruptionError(
            f"the pack says it is rank {record.rank} of save {record.save.save_id}",
            where=described(store, key),
            hint="it was copied or renamed; put the right file there",
        )


def _checked(store: Store, key: str, entry: Entry, where: str) -> bytes:
    data = store.read(key, entry.offset, entry.length)
    actual = int(isal_zlib.crc32(data))
    if actual != entry.crc:
        raise CorruptionError(
            f"the record's checksum is {actual:08x}, written was {entry.crc:08x}", where=where
        )
    return data
