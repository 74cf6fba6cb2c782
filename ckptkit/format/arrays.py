"""The entries that describe arrays, the same in records and in the manifest (FORMAT section 6)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from operator import lt
from typing import Any, NamedTuple

import msgpack
import numpy as np

from ckptkit.errors import CkptkitError, FormatError, UnsupportedTypeError
from ckptkit.format.encoding import unpack, unpack_items
from ckptkit.format.names import are_plain, name_from_file
from ckptkit.model import DType, Grid, Placement, document, placement_from_doc, placement_to_doc
from ckptkit.model.document import Fields

# The fields of a document that say it, which are read as packed bytes: their entries one by one.
TABLE_FIELDS = ("placements", "arrays")
ROLES = ("param", "buffer", "optimizer", "other")
MAX_ARRAYS = 1 << 24
MAX_DIMS = 32
TOO_LARGE = "an array of 2**63 bytes or more, dims of size zero not counted"


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """What an array is, but for names. Layers are alike: the arrays of one kind share this object,
    so that what follows from it is found out once for all of them.
    """

    shape: tuple[int, ...]
    dtype: DType
    grid: Grid
    role: str
    placements: tuple[Placement, ...]

    @property
    def chunk_bytes(self) -> int:
        """The stored length of every chunk if the grid is regular, of the largest if not."""
        return self.grid.chunk_elements * self.dtype.itemsize


class ArrayInfo(NamedTuple):
    """One array of a step: everything but its bytes."""

    name: str
    kind: ArrayKind
    of: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.kind.shape

    @property
    def dtype(self) -> DType:
        return self.kind.dtype

    @property
    def grid(self) -> Grid:
        return self.kind.grid

    @property
    def role(self) -> str:
        return self.kind.role

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.kind.placements

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, padding not counted."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Alias:
    """A tied tensor: a second name for an array."""

    name: str
    alias_of: str


class ArrayColumns(NamedTuple):
    """Arrays sorted by name, as the columns that an `ArrayInfo` is a row of; and their aliases."""

    names: tuple[str, ...]
    kinds: tuple[ArrayKind, ...]
    ofs: tuple[str | None, ...]
    aliases: tuple[Alias, ...]


def arrays_to_docs(columns: ArrayColumns) -> tuple[bytes, bytes]:
    """The fields `placements` and `arrays` of a document, packed; entries are sorted by name."""
    packer, pack = msgpack.Packer(), cache(msgpack.packb)
    table: dict[tuple[Placement, ...], int] = {}
    packed: dict[int, bytes] = {}  # by the place of a kind in memory
    entries: dict[str, bytes] = {}
    for name, kind, of in zip(columns.names, columns.kinds, columns.ofs, strict=True):
        if (rest := packed.get(id(kind))) is None:
            row = table.setdefault(kind.placements, len(table))
            fields = {
                "shape": kind.shape,
                "dtype": kind.dtype.name,
                "grid": kind.grid.to_doc(),
                "role": kind.role,
                "placements": row,
            }
            rest = packed[id(kind)] = msgpack.packb(fields)[1:]
        entry = _NAME + packer.pack(name) + rest
        entries[name] = _WITHOUT_OF + entry if of is None else _WITH_OF + entry + _OF + pack(of)
    for alias in columns.aliases:
        names = packer.pack(alias.name), packer.pack(alias.alias_of)
        entries[alias.name] = _ALIAS + _NAME + names[0] + _ALIAS_OF + names[1]
    placements = msgpack.packb([[placement_to_doc(p) for p in row] for row in table])
    head = packer.pack_array_header(len(entries))
    return placements, b"".join([head, *(entries[name] for name in sorted(entries))])


def arrays_from_docs(packed: tuple[bytes, bytes], axes: int) -> ArrayColumns:
    """What the fields `placements` and `arrays` of a document say, both still packed."""
    table: list[tuple[Placement, ...]] = []
    for number, row in enumerate(unpack_items(packed[0], "placements", MAX_ARRAYS)):
        where = f"placements.{number}"
        if not isinstance(row, list) or len(row) != axes:
            raise FormatError(f"not a list of {axes} placements", where=where, value=row)
        table.append(tuple(placement_from_doc(p, where=f"{where}.{i}") for i, p in enumerate(row)))
    return _as_written(packed[1], table) or _one_by_one(packed[1], table)


_NAME, _OF, _ALIAS_OF = map(msgpack.packb, ("name", "of", "alias_of"))
# The heads of maps of 2, 5, 6 and 7 keys.
_ALIAS, _KIND_ONLY, _WITHOUT_OF, _WITH_OF = b"\x82", b"\x85", b"\x86", b"\x87"


def _as_written(data: bytes, table: list[tuple[Placement, ...]]) -> ArrayColumns | None:
    """The arrays of a list that is spelled as a save spells it, and has nothing against it: of an
    entry only the names are decoded, the rest is known by its bytes. None for any other list.

    A cut at a wrong place is found: a name has the length that it says, what follows it has been
    decoded, to its last byte, as the fields that it is, and a name ends the entry.
    """
    begin, *entries = data.split(_NAME, MAX_ARRAYS)
    if not entries or msgpack.Packer().pack_array_header(len(entries)) != begin[:-1]:
        return None
    names: list[bytes] = []
    others: list[bytes | None] = []
    kinds: list[ArrayKind | None] = []
    known: dict[bytes, ArrayKind] = {}
    head = begin[-1:]
    entries[-1] += b"\0"  # each ends with the head of the next one
    for entry in entries:
        name, rest = _first_text(entry)
        here, head, rest = head, rest[-1:], rest[:-1]
        of, kind = None, None
        if here == _ALIAS and rest.startswith(_ALIAS_OF):
            of = rest[len(_ALIAS_OF) :]
        elif here in (_WITHOUT_OF, _WITH_OF):
            if here == _WITH_OF:
                rest, _, of = rest.rpartition(_OF)
            if (kind := known.get(rest)) is None:
                try:
                    kind = known[rest] = _kind(Fields(unpack(_KIND_ONLY + rest, ""), ""), table)
                except CkptkitError:
                    return None
        else:
            return None
        names.append(name)
        others.append(of)
        kinds.append(kind)
    spelled = list(dict.fromkeys(of for of in others if of is not None))
    read = [_first_text(of) for of in spelled]
    texts, of_texts = _plain_texts(names), _plain_texts([text for text, _ in read])
    if texts is None or of_texts is None or any(behind for _, behind in read):
        return None
    if not all(map(lt, texts, texts[1:])):
        return None
    of_name: dict[bytes | None, str | None] = {None: None}
    of_name.update(zip(spelled, of_texts, strict=True))
    return _columns(texts, kinds, [of_name[of] for of in others])


def _columns(
    names: Sequence[str], kinds: Sequence[ArrayKind | None], others: Sequence[str | None]
) -> ArrayColumns:
    """The columns of a list of names; one without a kind is an alias of the other name."""
    rows = list(zip(names, kinds, others, strict=True))
    found = ArrayColumns(
        tuple([name for name, kind, _ in rows if kind is not None]),
        tuple([kind for kind in kinds if kind is not None]),
        tuple([of for _, kind, of in rows if kind is not None]),
        tuple([Alias(name, str(of)) for name, kind, of in rows if kind is None]),
    )
    check_names(found)
    return found


def _first_text(data: bytes) -> tuple[bytes, bytes]:
    """The text that some msgpack begins with, and what is behind it; no text where that is not one
    of less than 256 bytes.
    """
    head = data[0] if data else 0
    begin, size = 1, head - 0xA0
    if head == 0xD9 and len(data) > 1:
        begin, size = 2, data[1]
    if not 0 < size < (32 if begin == 1 else 256) or len(data) < begin + size:
        return b"", b""
    return data[begin : begin + size], data[begin + size :]


def _plain_texts(names: list[bytes]) -> list[str] | None:
    """Names as text, if all are plain ones."""
    try:
        texts = b"\n".join(names).decode("ascii").split("\n") if names else []
    except UnicodeDecodeError:
        return None
    return texts if len(texts) == len(names) and are_plain(texts) else None


def _one_by_one(data: bytes, table: list[tuple[Placement, ...]]) -> ArrayColumns:
    """The arrays and aliases of any list; FormatError says of which entry what is wrong."""
    names: list[str] = []
    others: list[str | None] = []
    kinds: list[ArrayKind | None] = []
    # Layers are alike: of 100,000 arrays some dozens differ in more than their names. What is alike
    # is read once, and known again by its bytes.
    known: dict[bytes | None, ArrayKind] = {}
    for number, doc in enumerate(unpack_items(data, "arrays", MAX_ARRAYS)):
        entry = Fields(doc, f"arrays.{number}")
        names.append(name_from_file(entry.any("name"), entry.at("name")))
        is_alias = entry.has("alias_of")
        of = "alias_of" if is_alias else "of"
        others.append(name_from_file(entry.any(of), entry.at(of)) if entry.has(of) else None)
        if is_alias:
            kinds.append(None)
            entry.finish()
            continue
        try:
            # Strictly: an extension's tuples, and its other types, have no place in an entry.
            spelled = msgpack.packb(entry.rest, strict_types=True)
        except (TypeError, ValueError, OverflowError, RecursionError):  # it cannot be right
            spelled = None
        kinds.append(kind := known.get(spelled) or _kind(entry, table))
        if spelled is not None:
            known[spelled] = kind
    if any(first >= second for first, second in pairwise(names)):
        raise FormatError("the arrays are not sorted by distinct names", where="arrays")
    return _columns(names, kinds, others)


def _kind(fields: Fields, table: list[tuple[Placement, ...]]) -> ArrayKind:
    spelled = fields.text("dtype")
    try:
        dtype = DType.of(spelled)
    except UnsupportedTypeError as error:
        raise FormatError(
            error.what, where=fields.at("dtype"), value=spelled, hint=error.hint
        ) from error
    if dtype.name != spelled:
        raise FormatError(
            "not a dtype as the format spells it", where=fields.at("dtype"), value=spelled
        )
    extents, where = fields.items("shape"), fields.at("shape")
    if len(extents) > MAX_DIMS:
        raise FormatError(f"more than {MAX_DIMS} dims", where=where, value=len(extents))
    shape = document.integers(extents, where)
    if not is_addressable(shape, dtype):
        raise FormatError(TOO_LARGE, where=where, value=shape)
    grid = Grid.from_doc(fields.any("grid"), shape, where=fields.at("grid"))
    if grid.chunk_elements * dtype.itemsize >= 1 << 63:
        raise FormatError("chunks of 2**63 bytes or more", where=fields.at("grid"))
    role = fields.text("role")
    if role not in ROLES:
        raise FormatError(f"not one of {', '.join(ROLES)}", where=fields.at("role"), value=role)
    row = fields.integer("placements", below=len(table))
    fields.finish()
    return ArrayKind(shape, dtype, grid, role, table[row])


def is_addressable(shape: tuple[int, ...], dtype: DType) -> bool:
    """Whether numpy can hold the shape: it counts no dim of size zero, and so can be empty arrays
    that it cannot.
    """
    return math.prod([extent or 1 for extent in shape]) * dtype.itemsize < 1 << 63


def check_names(columns: ArrayColumns) -> None:
    """Names are distinct, none lies below another, and aliases are of arrays that are there."""
    sorted_ones, aliases = columns.names, columns.aliases
    names = [*sorted_ones, *(alias.name for alias in aliases)]
    if len(names) > MAX_ARRAYS:
        raise FormatError(f"more than {MAX_ARRAYS} arrays", where="arrays", value=len(names))
    known = set(names)
    rises = all(map(lt, sorted_ones, sorted_ones[1:]))
    if len(known) < len(names) or not rises:
        raise FormatError("the arrays are not sorted by distinct names", where="arrays")
    groups: set[str] = set()
    for name in names:
        group = name.rpartition("/")[0]
        while group not in groups:  # the root is its own group
            if group in known:
                raise FormatError(
                    f"the array lies below the array {group!r}", where="arrays", value=name
                )
            groups.add(group)
            group = group.rpartition("/")[0]
    real = set(sorted_ones) if aliases else known
    for alias in aliases:
        if alias.alias_of not in real:
            raise FormatError(
                "an alias of an array that is not there", where=alias.name, value=alias.alias_of
            )


DOCUMENT = "zarr.json"
GROUP_DOCUMENT = b'{"zarr_format":3,"node_type":"group","attributes":{}}'


def key_of(name: str) -> str:
    """The key of an array's or group's document; the root group is the empty name."""
    return f"{name}/{DOCUMENT}" if name else DOCUMENT


def chunk_key(name: str, index: tuple[int, ...]) -> str:
    return "/".join([name, "c", *map(str, index)])


def presented_grid(array: ArrayInfo) -> Grid:
    """The grid that a view shows: its own if it is regular, else the longest pieces, which
    zarr-python 3.1 can read too; of an empty array one that has nothing to be walked along.
    """
    if not array.grid.chunk_count:
        return Grid.regular(array.shape, tuple(max(1, extent) for extent in array.shape))
    if array.grid.is_regular:
        return array.grid
    borders = map(array.grid.borders, range(len(array.shape)))
    return Grid.regular(array.shape, tuple(int(np.diff(along).max()) for along in borders))


def array_document(array: ArrayInfo, grid: Grid | None = None) -> bytes:
    """The document of an array, as stored or as presented with another grid."""
    return _array_document(array.shape, array.dtype, grid or array.grid, array.role)


@lru_cache(maxsize=1024)
def _array_document(shape: tuple[int, ...], dtype: DType, grid: Grid, role: str) -> bytes:
    if grid.is_regular:
        chunks = {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}}
    else:
        shapes = [np.diff(grid.borders(dim)).tolist() for dim in range(len(shape))]
        inline = {"kind": "inline", "chunk_shapes": shapes}
        chunks = {"name": "rectilinear", "configuration": inline}
    codec: dict[str, Any] = {"name": "bytes"}
    if dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    zero: Any = 0.0 if "float" in dtype.name else 0
    if dtype.name.startswith("float8"):
        zero = "0x00"  # in hexadecimal, which strict readers demand
    elif dtype.name.startswith("complex"):
        zero = [0.0, 0.0]
    elif dtype.name == "bool":
        zero = False
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": chunks,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": zero,
        "codecs": [codec],
        "attributes": {"ckptkit": {"role": role}},
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")
