"""The arrays that a record lists, read once however many records list them or refer to them
(FORMAT section 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgpack
import numpy as np

from ckptkit.errors import CorruptionError, FormatError, NotFoundError
from ckptkit.format.arrays import (
    MAX_ARRAYS,
    Alias,
    ArrayInfo,
    arrays_from_docs,
    arrays_to_docs,
    check_names,
)
from ckptkit.format.columns import U32, U64
from ckptkit.format.leaves import unpack, unpack_items
from ckptkit.model.document import Fields

_DIGEST_BYTES = hashlib.sha256().digest_size
_MAP_HEADS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_HINT = "all packs of a save are read with rank 0's: put the right rank-00000.zip in its place"


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """What a record says of arrays; `packed` is its fields `placements` and `arrays`, and `is_read`
    whether they were made of these, as every later reader will make them.
    """

    arrays: tuple[ArrayInfo, ...]
    aliases: tuple[Alias, ...]
    packed: tuple[bytes, bytes]
    is_read: bool = False

    @classmethod
    def of(cls, arrays: Sequence[ArrayInfo], aliases: Sequence[Alias]) -> ArrayTable:
        """The table of arrays that are sorted by name."""
        check_names(arrays, aliases)
        placements, entries = arrays_to_docs(arrays, aliases)
        packed = msgpack.packb(placements), msgpack.packb(entries)
        return cls(tuple(arrays), tuple(aliases), packed)

    @classmethod
    def read(cls, packed: tuple[bytes, bytes], axes: int) -> ArrayTable:
        """The table that a document with so many axes has, once it is checked."""
        return cls(*arrays_from_docs(packed, axes), packed, is_read=True)

    @cached_property
    def digest(self) -> bytes:
        """What a reference to the table has to say."""
        return _digest(self.packed)

    @cached_property
    def by_name(self) -> dict[str, ArrayInfo]:
        return {array.name: array for array in self.arrays}

    @cached_property
    def chunk_counts(self) -> U64:
        return np.array([array.grid.chunk_count for array in self.arrays], dtype=np.uint64)

    @cached_property
    def places(self) -> U32:
        """Where each array stands in the list that has the aliases too."""
        names = sorted([a.name for a in self.arrays] + [a.name for a in self.aliases])
        place = {name: number for number, name in enumerate(names)}
        return np.array([place[array.name] for array in self.arrays], dtype=np.uint32)

    @cached_property
    def _numbers(self) -> U32:
        """At each place the number of the array, or how many arrays there are for an alias."""
        numbers = np.full(len(self.arrays) + len(self.aliases), len(self.arrays), dtype=np.uint32)
        numbers[self.places] = np.arange(len(self.arrays), dtype=np.uint32)
        return numbers

    def numbers(self, places: U32) -> U32:
        """The arrays at some places."""
        if len(places) and int(places.max()) >= len(self._numbers):
            raise FormatError("a chunk of an array that is not listed", where="chunks.array")
        found = self._numbers[places]
        if len(found) and int(found.max()) == len(self.arrays):
            raise FormatError("a chunk of an alias", where="chunks.array")
        return found

    def reference(self) -> tuple[bytes, bytes]:
        """The two fields where the table is that of rank 0's record."""
        return msgpack.packb([]), msgpack.packb({"rank": 0, "sha256": self.digest})


class ArrayTables:
    """The tables of one save's records: equal ones are one object, so that what has to be done for
    each table is not done for each rank.

    Usable from several threads once rank 0's record has been read.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], ArrayTable] = {}
        self.first: ArrayTable | None = None
        """That of rank 0's record, once it is read."""

    def add(self, table: ArrayTable, axes: int) -> None:
        """Make a table known that was read before: it is not read again, and stands in for rank 0's
        where that cannot be read.
        """
        self._known.setdefault((table.digest, axes), table)

    def take(self, fields: Fields, rank: int, axes: int) -> tuple[ArrayTable, bool]:
        """Take `placements` and `arrays`, still packed, out of a record with so many axes: its
        table, and whether that is a reference to rank 0's.
        """
        packed = fields.bytes("placements"), fields.bytes("arrays")
        # The first byte tells a reference from a list, of which there is nothing to decode yet.
        if packed[1][0] in _MAP_HEADS:
            return self._referred(packed, rank, axes), True
        key = (_digest(packed), axes)
        if key not in self._known:
            table = ArrayTable.read(packed, axes)
            # Not an assignment: another thread may have read an equal one meanwhile, which is used.
            self._known.setdefault(key, table)
        if rank == 0:
            self.first = self._known[key]
        return self._known[key], False

    def _referred(self, packed: tuple[bytes, bytes], rank: int, axes: int) -> ArrayTable:
        if any(True for _ in unpack_items(packed[0], "placements", MAX_ARRAYS)):
            raise FormatError("placements of arrays that another record lists", where="placements")
        reference = Fields(unpack(packed[1], "arrays"), "arrays")
        reference.integer("rank", below=1)
        digest = reference.bytes("sha256")
        reference.finish()
        if len(digest) != _DIGEST_BYTES:
            raise FormatError("not a SHA-256", where="arrays.sha256", value=digest)
        if rank == 0:
            raise FormatError("rank 0's record refers to itself", where="arrays", hint=_HINT)
        table = self._known.get((digest, axes))
        if self.first is None and table is None:
            raise NotFoundError(
                "the record refers to the arrays of rank 0's record, which cannot be read",
                where="arrays",
                hint=_HINT,
            )
        if table is None or self.first not in (None, table):
            raise CorruptionError(
                "the record refers to other arrays than those of rank 0's record",
                where="arrays.sha256",
                value=digest.hex(),
                hint=_HINT,
            )
        return table


def _digest(packed: tuple[bytes, bytes]) -> bytes:
    return hashlib.sha256(b"".join(packed)).digest()
