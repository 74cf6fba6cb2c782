"""The manifest: the commit record of a step (FORMAT section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import TABLE_FIELDS, Alias, ArrayInfo, chunk_key
from ckptkit.format.envelope import (
    U32,
    U64,
    check_head,
    check_placed,
    columns_from_doc,
    columns_to_doc,
    packed_fields,
    seal,
    unseal,
)
from ckptkit.format.leaves import unpack, unpack_items
from ckptkit.format.objects import (
    ObjectInfo,
    check_values,
    objects_from_docs,
    objects_to_docs,
)
from ckptkit.format.record import SaveInfo
from ckptkit.model import document
from ckptkit.model.document import LIMIT, Fields, located
from ckptkit.model.grid import I64

GROUPS_PACK = "groups.zip"

MANIFEST_KIND = "ckptkit-manifest"
_COLUMNS = ("pack", "offset", "length", "crc32")
_HEAD = ("save_id", "step", "time", "writer", "world_size", "strategy")


def pack_name(rank: int) -> str:
    """The file name of a rank's pack."""
    return f"rank-{rank:05d}.zip"


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
        _check_packs(self.packs, self.save.world_size)
        if len(self.pack) != int(self.starts[-1]):
            raise FormatError(
                f"{len(self.pack)} chunks are listed, the grids have {int(self.starts[-1])}",
                where="chunks.count",
            )
        check_placed(self.pack, self.offset, self.length, [p.size for p in self.packs], "chunks")
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
            "chunks": columns_to_doc({name: getattr(self, name) for name in _COLUMNS}),
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
            columns = columns_from_doc(fields.any("chunks"), "chunks", _COLUMNS)
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


def _check_packs(packs: tuple[PackInfo, ...], world_size: int) -> None:
    ranks = [p for p in packs if p.record is not None]
    rest = [p.name for p in packs[len(ranks) :]]
    for rank, pack in enumerate(packs[: len(ranks)]):
        if pack.name != pack_name(rank) or pack.record is None:
            raise FormatError(f"not {pack_name(rank)}", where=f"packs.{rank}", value=pack.name)
    _check_count(len(packs), world_size)
    if len(ranks) != world_size or rest not in ([], [GROUPS_PACK]):
        raise FormatError(
            f"{len(packs)} packs do not fit {world_size} ranks", where="packs", value=rest
        )


def _check_count(packs: int, world_size: int) -> None:
    if packs not in (world_size, world_size + 1):
        raise FormatError(f"{packs} packs do not fit {world_size} ranks", where="packs")
