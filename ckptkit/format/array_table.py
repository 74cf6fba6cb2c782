"""The arrays that a record lists, read once however many records list them or refer to them
(FORMAT section 6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ckptkit.errors import CorruptionError, FormatError, NotFoundError
from ckptkit.format.arrays import (
    MAX_ARRAYS,
    Alias,
    ArrayColumns,
    ArrayInfo,
    ArrayKind,
    arrays_from_docs,
    arrays_to_docs,
    check_names,
)
from ckptkit.format.encoding import MAX_ROWS, U32, U64, unpack, unpack_items
from ckptkit.format.pack import Entries
from ckptkit.model.document import Fields
from ckptkit.model.grid import I64

_DIGEST_BYTES = hashlib.sha256().digest_size
_MAP_HEADS = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_HINT = "all packs of a save are read with rank 0's: put the right rank-00000.zip in its place"


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """What a record says of arrays; `packed` is its fields `placements` and `arrays`, and `is_read`
    whether the columns were made of these, as every later reader will make them.
    """

    names: tuple[str, ...]
    """The names of the arrays, sorted."""
    kinds: tuple[ArrayKind, ...]
    """What each of them is."""
    ofs: tuple[str | None, ...]
    aliases: tuple[Alias, ...]
    packed: tuple[bytes, bytes]
    is_read: bool = False

    @classmethod
    def of(cls, arrays: Sequence[ArrayInfo], aliases: Sequence[Alias]) -> ArrayTable:
        """The table of arrays that are sorted by name."""
        names, kinds, ofs = zip(*arrays, strict=True) if arrays else ((), (), ())
        columns = ArrayColumns(names, kinds, ofs, tuple(aliases))
        check_names(columns)
        return cls(*columns, arrays_to_docs(columns))

    @classmethod
    def read(cls, packed: tuple[bytes, bytes], axes: int) -> ArrayTable:
        """The table that a document with so many axes has, once it is checked."""
        return cls(*arrays_from_docs(packed, axes), packed, is_read=True)

    @cached_property
    def digest(self) -> bytes:
        """What a reference to the table has to say."""
        return _digest(self.packed)

    @cached_property
    def arrays(self) -> tuple[ArrayInfo, ...]:
        """All of them as objects: 100,000 are made only where somebody asks for them."""
        return tuple(map(ArrayInfo, self.names, self.kinds, self.ofs))

    @cached_property
    def by_name(self) -> dict[str, ArrayInfo]:
        return dict(zip(self.names, self.arrays, strict=True))

    @cached_property
    def chunk_counts(self) -> U64:
        return np.array([kind.grid.chunk_count for kind in self.kinds], dtype=np.uint64)

    @cached_property
    def starts(self) -> I64:
        """The row of each array's chunk 0 in a table over all arrays, and the number of rows
        last.
        """
        # None counts for more than is refused, so that no sum of so many wraps.
        ends = np.cumsum(np.minimum(self.chunk_counts, MAX_ROWS + 1).astype(np.int64))
        beyond = ends > MAX_ROWS
        if beyond.any():
            number = int(beyond.argmax())
            raise FormatError(
                f"more than {MAX_ROWS} chunks", where=self.names[number], value=int(ends[number])
            )
        return np.concatenate([np.zeros(1, np.int64), ends])

    def chunk_at(self, row: int) -> tuple[ArrayInfo, int]:
        """The array, and the number of its chunk, that a row of a table over all arrays is of."""
        number = int(np.searchsorted(self.starts, row, side="right")) - 1
        info = ArrayInfo(self.names[number], self.kinds[number], self.ofs[number])
        return info, row - int(self.starts[number])

    def stored_bytes(self) -> U64:
        """The stored length of every chunk of all arrays, in the order of rows."""
        distinct = {id(kind): kind for kind in self.kinds}
        sizes = {place: kind.chunk_bytes for place, kind in distinct.items()}
        each = np.array([sizes[id(kind)] for kind in self.kinds], np.uint64)
        lengths = np.repeat(each, np.diff(self.starts))
        if all(kind.grid.is_regular for kind in distinct.values()):
            return lengths
        for kind, first, last in zip(self.kinds, self.starts, self.starts[1:], strict=False):
            if not kind.grid.is_regular:
                lengths[first:last] = kind.grid.stored_elements() * kind.dtype.itemsize
        return lengths

    @cached_property
    def places(self) -> U32:
        """Where each array stands in the list that has the aliases too."""
        if not self.aliases:
            return np.arange(len(self.names), dtype=np.uint32)
        every = sorted([*self.names, *(alias.name for alias in self.aliases)])
        place = {name: number for number, name in enumerate(every)}
        return np.array([place[name] for name in self.names], dtype=np.uint32)

    @cached_property
    def _numbers(self) -> U32:
        """At each place the number of the array, or how many arrays there are for an alias."""
        count = len(self.names)
        numbers = np.full(count + len(self.aliases), count, dtype=np.uint32)
        numbers[self.places] = np.arange(count, dtype=np.uint32)
        return numbers

    def numbers(self, places: U32) -> U32:
        """The arrays at some places."""
        if len(places) and int(places.max()) >= len(self._numbers):
            raise FormatError("a chunk of an array that is not listed", where="chunks.array")
        found = self._numbers[places]
        if len(found) and int(found.max()) == len(self.names):
            raise FormatError("a chunk of an alias", where="chunks.array")
        return found


@dataclass(eq=False)
class ArrayTables:
    """The tables of one save's records: equal ones are one object, so that what has to be done for
    each table is not done for each rank.

    Usable from several threads once rank 0's record has been read.
    """

    first: ArrayTable | None = None
    """The table of rank 0's record, once it is read."""
    documents: dict[bytes, Entries] = field(default_factory=dict)
    """What records say of Zarr documents, packed, that was read before."""
    _known: dict[tuple[bytes, int], ArrayTable] = field(default_factory=dict)

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
