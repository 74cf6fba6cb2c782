"""What a save says of itself: the record in each pack, by its writer, and the manifest, the commit
record of a step, which is made of all of these (FORMAT section 6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import numpy as np

from ckptkit.errors import CorruptionError, FormatError
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.arrays import DOCUMENT, TABLE_FIELDS, Alias, ArrayInfo, chunk_key
from ckptkit.format.encoding import (
    U32,
    U64,
    check_head,
    check_leaf,
    check_placed,
    columns_from_doc,
    columns_to_doc,
    encode,
    packed_fields,
    seal,
    unpack,
    unpack_items,
    unseal,
)
from ckptkit.format.names import are_plain, name_from_file
from ckptkit.format.objects import (
    ObjectInfo,
    check_values,
    objects_from_docs,
    objects_to_docs,
)
from ckptkit.format.pack import Entries
from ckptkit.model import Strategy, document
from ckptkit.model.document import LIMIT, Fields, located
from ckptkit.model.grid import I64

MAX_RANKS = 1 << 24
SAVE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z-]{7,63}")

_RECORD_KIND = "ckptkit-rank"
_RECORD_COLUMNS = ("array", "chunk", "offset", "length", "crc32")
GROUPS_PACK = "groups.zip"

MANIFEST_KIND = "ckptkit-manifest"
_MANIFEST_COLUMNS = ("pack", "offset", "length", "crc32")
_HEAD = ("save_id", "step", "time", "writer", "world_size", "strategy")


@dataclass(frozen=True, slots=True)
class SaveInfo:
    """What every rank of one save says alike, the time apart."""

    save_id: str
    step: int
    time: float
    writer: str
    world_size: int
    strategy: Strategy
    details: dict[str, Any]

    def to_fields(self) -> dict[str, Any]:
        said = {name: getattr(self, name) for name in _HEAD}
        details = encode(self.details, "details")
        return {**said, "strategy": self.strategy.to_doc(), "details": details}

    @classmethod
    def from_fields(cls, fields: Fields) -> SaveInfo:
        save_id = fields.text("save_id")
        if not SAVE_ID.fullmatch(save_id):
            raise FormatError("not a save id", where=fields.at("save_id"), value=save_id)
        step, time, writer = fields.integer("step"), fields.number("time"), fields.text("writer")
        world_size = fields.integer("world_size", below=MAX_RANKS + 1)
        strategy = Strategy.from_doc(fields.any("strategy"), where=fields.at("strategy"))
        if strategy.world_size != world_size:
            raise FormatError(
                f"{strategy} has {strategy.world_size} ranks, the world size is {world_size}",
                where=fields.at("strategy"),
            )
        details = check_leaf(fields.any("details"), fields.at("details"))
        if not isinstance(details, dict):
            raise FormatError("not a map", where=fields.at("details"), value=details)
        return cls(save_id, step, time, writer, world_size, strategy, details)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What one pack holds; the columns are one row a chunk, in pack order, and `array` numbers the
    arrays of the table.

    Where `refers`, the document does not list the table: it is that of rank 0's record.
    """

    save: SaveInfo
    rank: int
    table: ArrayTable
    documents: Entries
    array: U32
    chunk: U64
    offset: U64
    length: U64
    crc32: U32
    objects: tuple[ObjectInfo, ...]
    refers: bool = False

    def to_bytes(self) -> bytes:
        return record_bytes(
            self.save,
            self.rank,
            self.table,
            documents_to_doc(self.documents),
            {name: getattr(self, name) for name in _RECORD_COLUMNS},
            msgpack.packb(objects_to_docs(self.objects)),
            refers=self.refers,
        )

    @classmethod
    def from_bytes(
        cls,
        data: bytes,
        where: str,
        tables: ArrayTables | None = None,
        origin: tuple[int, str] | None = None,
    ) -> Record:
        """Read and check a record; errors name the field.

        `tables` are those of the save, rank 0's read before any other record; what they know of
        is not read again. `origin` is the rank and the save id that the record has to be of.
        """
        fields = Fields(unseal(_RECORD_KIND, data, where, (*TABLE_FIELDS, "documents")), "")
        with located(where):
            save = SaveInfo.from_fields(fields)
            rank = fields.integer("rank", below=save.world_size)
            if origin not in (None, (rank, save.save_id)):
                raise CorruptionError(
                    f"the pack says it is rank {rank} of save {save.save_id}",
                    hint="it was copied or renamed; put the right file there",
                )
            axes = len(save.strategy.mesh.axes)
            tables = tables or ArrayTables()
            table, refers = tables.take(fields, rank, axes)
            packed = fields.bytes("documents")
            documents = tables.documents.get(packed)
            if documents is None:
                rows = Fields({"documents": unpack(packed, "documents")}, "")
                documents = _documents(rows.items("documents"))
            columns = columns_from_doc(fields.any("chunks"), _RECORD_COLUMNS)
            objects = objects_from_docs(fields)
            fields.finish()
            for number, item in enumerate(objects):
                check_values(item.semantics, [item.value], f"objects.{number}.value")
            columns["array"] = table.numbers(columns["array"])
            _check_chunks(columns, table)
            return cls(save, rank, table, documents, objects=objects, refers=refers, **columns)


def documents_to_doc(documents: Entries) -> bytes:
    """What a record says of documents, packed: it is the same for all packs of a plan."""
    return bytes(msgpack.packb(list(documents.each())))


def record_bytes(
    save: SaveInfo,
    rank: int,
    table: ArrayTable,
    documents: bytes,
    columns: Mapping[str, Any],
    objects: bytes,
    *,
    refers: bool,
) -> bytes:
    """A record of documents and objects that are packed; the columns are as `Record` has them."""
    listed = table.packed
    if refers:
        listed = msgpack.packb([]), msgpack.packb({"rank": 0, "sha256": table.digest})
    fields = {
        **save.to_fields(),
        "rank": rank,
        **dict(zip(TABLE_FIELDS, listed, strict=True)),
        "documents": documents,
        "chunks": columns_to_doc({**columns, "array": table.places[columns["array"]]}),
        "objects": objects,
    }
    return seal(_RECORD_KIND, fields, (*TABLE_FIELDS, "documents", "objects"))


def _documents(rows: list[Any]) -> Entries:
    """The entries of rows, looked at column by column: a save of many arrays has as many rows."""
    for number, row in enumerate(rows):
        if type(row) is not list or len(row) != 4 or type(row[0]) is not str:
            raise FormatError("not a document's entry", where=f"documents.{number}", value=row)
    if not rows:
        return Entries.of(())
    names, *numbers = zip(*rows, strict=True)
    end = f"/{DOCUMENT}"
    arrays = [name.removesuffix(end) for name in names if name != DOCUMENT]
    if not (are_plain(arrays) and all(name.endswith(DOCUMENT) for name in names)):
        for number, name in enumerate(names):
            where = f"documents.{number}"
            if name != DOCUMENT and not name.endswith(end):
                raise FormatError("not a zarr.json", where=where, value=name)
            if name != DOCUMENT:
                name_from_file(name.removesuffix(end), where)
    if len(set(names)) < len(names):
        first: dict[str, int] = {}
        for number, name in enumerate(names):
            if first.setdefault(name, number) != number:
                where = f"documents.{number}"
                raise FormatError("a document listed twice", where=where, value=name)
    mosts = (LIMIT - 1, LIMIT - 1, (1 << 32) - 1)
    fits = all(
        all(type(value) is int for value in column) and min(column) >= 0 and max(column) <= most
        for column, most in zip(numbers, mosts, strict=True)
    )
    for number, row in enumerate(() if fits else rows):
        where = f"documents.{number}"
        if document.integers(row[1:], where, most=LIMIT - 1)[2] >= 1 << 32:
            raise FormatError("not a CRC-32", where=where, value=row[3])
    offsets, lengths, crcs = (np.array(column, dtype=np.int64) for column in numbers)
    return Entries(names, offsets, lengths, crcs.astype(np.uint32))


def _check_chunks(columns: dict[str, Any], table: ArrayTable) -> None:
    """Chunks of their grids, each once, at places that exist."""
    array, chunk = columns["array"], columns["chunk"]
    outside = chunk >= table.chunk_counts[array]
    if outside.any():
        row = int(outside.argmax())
        raise FormatError(
            "a chunk that its grid does not have",
            where=f"chunks.chunk.{row}",
            value=int(chunk[row]),
        )
    # Sorted, as a set of pairs would be some objects for each chunk.
    order = np.lexsort((chunk, array))
    twice = (array[order][1:] == array[order][:-1]) & (chunk[order][1:] == chunk[order][:-1])
    if twice.any():
        row = int(order[int(twice.argmax()) + 1])
        raise FormatError(
            "a chunk listed twice", where=f"chunks.chunk.{row}", value=int(chunk[row])
        )
    # How large the pack is nobody knows yet; but no sum of the two may wrap.
    half = np.uint64(1 << 62)
    far = (columns["offset"] >= half) | (columns["length"] >= half)
    if far.any():
        raise FormatError("no place in a pack", where=f"chunks.offset.{int(far.argmax())}")


def pack_name(rank: int) -> str:
    return f"rank-{rank:05d}.zip"


def is_pack(name: str) -> bool:
    """Whether a file in the folder of a save is called as our packs are."""
    return name == GROUPS_PACK or re.fullmatch(r"rank-[0-9]{5,}\.zip", name) is not None


@dataclass(frozen=True, slots=True)
class PackInfo:
    """One pack of a step; `record` is (offset, length) of its record."""

    name: str
    size: int
    record: tuple[int, int] | None


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A committed step; the columns have one row a chunk, arrays in order, chunks in order."""

    is_checked: ClassVar[bool] = True
    """Whether `crc32` says what the chunks are."""
    sizes: ClassVar[Mapping[str, Any]] = {}
    """What is known of the model's sizes, such as its attention heads, as a config has them."""

    save: SaveInfo
    packs: tuple[PackInfo, ...]
    table: ArrayTable
    pack: U32
    offset: U64
    length: U64
    crc32: U32
    objects: tuple[ObjectInfo, ...]

    def __post_init__(self) -> None:
        world_size = self.save.world_size
        ranks = [p for p in self.packs if p.record is not None]
        rest = [p.name for p in self.packs[len(ranks) :]]
        for rank, pack in enumerate(self.packs[: len(ranks)]):
            if pack.name != pack_name(rank) or pack.record is None:
                raise FormatError(f"not {pack_name(rank)}", where=f"packs.{rank}", value=pack.name)
        _check_count(len(self.packs), world_size)
        if len(ranks) != world_size or rest not in ([], [GROUPS_PACK]):
            raise FormatError(
                f"{len(self.packs)} packs do not fit {world_size} ranks", where="packs", value=rest
            )
        if len(self.pack) != int(self.starts[-1]):
            raise FormatError(
                f"{len(self.pack)} chunks are listed, the grids have {int(self.starts[-1])}",
                where="chunks.count",
            )
        check_placed(self.pack, self.offset, self.length, [p.size for p in self.packs])
        wrong = np.flatnonzero(self.length != self.table.stored_bytes())
        if len(wrong):
            row = int(wrong[0])
            array, _ = self.table.chunk_at(row)
            raise FormatError(
                f"a chunk of {array.name} has a length that its grid does not give",
                where=f"chunks.length.{row}",
                value=int(self.length[row]),
            )

    @property
    def arrays(self) -> tuple[ArrayInfo, ...]:
        """All arrays, sorted by name."""
        return self.table.arrays

    @property
    def starts(self) -> I64:
        """The row of each array's chunk 0, and the number of rows last."""
        return self.table.starts

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The second names of tied tensors."""
        return self.table.aliases

    def chunk_key(self, row: int) -> str:
        """The Zarr key of the chunk of a row."""
        array, chunk = self.table.chunk_at(row)
        return chunk_key(array.name, array.grid.index(chunk))

    def to_bytes(self) -> bytes:
        fields = {
            **self.save.to_fields(),
            "packs": [
                {"name": p.name, "size": p.size, "record": list(p.record) if p.record else None}
                for p in self.packs
            ],
            **dict(zip(TABLE_FIELDS, self.table.packed, strict=True)),
            "chunks": columns_to_doc({name: getattr(self, name) for name in _MANIFEST_COLUMNS}),
            "objects": objects_to_docs(self.objects),
        }
        return seal(MANIFEST_KIND, fields, TABLE_FIELDS)

    @classmethod
    def from_bytes(cls, data: bytes, where: str, known: ArrayTable | None = None) -> Manifest:
        """Read and check a manifest; errors name the field. Where it lists the arrays of a `known`
        table of the same strategy that was read, these are not read again.
        """
        fields = Fields(unseal(MANIFEST_KIND, data, where, TABLE_FIELDS), "")
        with located(where):
            save = SaveInfo.from_fields(fields)
            packs = tuple(_pack(doc, f"packs.{i}") for i, doc in enumerate(fields.items("packs")))
            packed = fields.bytes("placements"), fields.bytes("arrays")
            table = known
            if table is None or not table.is_read or table.packed != packed:
                table = ArrayTable.read(packed, len(save.strategy.mesh.axes))
            columns = columns_from_doc(fields.any("chunks"), _MANIFEST_COLUMNS)
            objects = objects_from_docs(fields)
            for number, item in enumerate(objects):
                if item.semantics == "replicated" or item.ranks is not None:
                    continue
                at = f"objects.{number}.value"
                if not isinstance(item.value, list) or len(item.value) != save.world_size:
                    raise FormatError(f"not a list of {save.world_size} values", where=at)
                check_values(item.semantics, item.value, at)
            fields.finish()
            return cls(save, packs, table, objects=objects, **columns)

    @staticmethod
    def head(data: bytes, where: str) -> tuple[SaveInfo, int]:
        """What a listing shows of a manifest, or of the beginning of one: the save without its
        details, and the bytes of all packs.

        Nothing else is decoded, so that a listing takes no longer where there are many arrays.
        """
        check_head(MANIFEST_KIND, data, where)
        found = packed_fields(data, where, (*_HEAD, "packs"))
        with located(where):
            known = {key: unpack(found[key], key) for key in _HEAD if key in found}
            save = SaveInfo.from_fields(Fields({**known, "details": {}}, ""))
            docs = unpack_items(found.get("packs", b"\xc0"), "packs", save.world_size + 1)
            sizes = [_pack(doc, f"packs.{i}").size for i, doc in enumerate(docs)]
            _check_count(len(sizes), save.world_size)
            return save, sum(sizes)


def _pack(doc: Any, where: str) -> PackInfo:
    fields = Fields(doc, where)
    name, size = fields.text("name"), fields.integer("size")
    record = fields.any("record")
    fields.finish()
    if record is None:
        return PackInfo(name, size, None)
    if not isinstance(record, list) or len(record) != 2:
        raise FormatError("not an offset and a length", where=f"{where}.record", value=record)
    offset, length = document.integers(record, f"{where}.record", most=LIMIT - 1)
    if offset + length > size:
        raise FormatError("a record outside of its pack", where=where, value=(offset, length))
    return PackInfo(name, size, (offset, length))


def _check_count(packs: int, world_size: int) -> None:
    if packs not in (world_size, world_size + 1):
        raise FormatError(f"{packs} packs do not fit {world_size} ranks", where="packs")
