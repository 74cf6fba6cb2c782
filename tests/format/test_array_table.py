"""The arrays that a record lists or refers to."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgpack
import numpy as np
import pytest

from ckptkit.errors import CkptkitError, CorruptionError, FormatError, NotFoundError
from ckptkit.format import array_table
from ckptkit.format.array_table import ArrayTable, ArrayTables
from ckptkit.format.arrays import (
    Alias,
    _as_written,
    _one_by_one,
    arrays_from_docs,
)
from ckptkit.format.manifest import Record
from ckptkit.model import placement_from_doc
from tests.format import samples
from tests.format.samples import ABSENT, edited, extension, plain, sealed

WHERE = "run/step-0000001000/data/x/rank-00001.zip"
LISTED = plain(samples.record().to_bytes())
SECOND = LISTED | {"rank": 1}
REFERENCE = {"rank": 0, "sha256": samples.record().table.digest}
REFERRING = SECOND | {"placements": [], "arrays": REFERENCE}
TWO_AXES = {
    "axes": [{"name": "d", "kind": "ddp", "size": 1}, {"name": "f", "kind": "fsdp", "size": 2}],
    "rank_order": "row-major",
}


def first() -> ArrayTables:
    """What is known when rank 0's record has been read."""
    tables = ArrayTables()
    Record.from_bytes(sealed(LISTED), "rank 0's", tables)
    return tables


def read(document: dict[Any, Any], tables: ArrayTables | None = None) -> Record:
    return Record.from_bytes(sealed(document), WHERE, tables or first())


def test_a_record_that_refers_has_the_arrays_of_rank_0s() -> None:
    tables = first()
    rank0 = Record.from_bytes(sealed(LISTED), WHERE, tables)
    found = read(REFERRING, tables)
    assert found.table is rank0.table
    assert found.table.arrays == samples.ARRAYS
    assert np.array_equal(found.array, rank0.array)
    assert found.to_bytes() == sealed(REFERRING)


def test_the_digest_is_of_the_two_fields_as_they_stand_in_the_file() -> None:
    packed = msgpack.packb(LISTED["placements"]) + msgpack.packb(LISTED["arrays"])
    assert REFERENCE["sha256"] == hashlib.sha256(packed).digest()
    # A list of four in the longest spelling there is: another digest for the same arrays.
    head = b"\xa6arrays"
    longer = head + b"\xdd\0\0\0\4"
    data = sealed(LISTED)[:-4].replace(head + b"\x94", longer)
    tables = ArrayTables()
    Record.from_bytes(samples.with_crc(data), "rank 0's", tables)
    with pytest.raises(CorruptionError):
        read(REFERRING, tables)
    other = hashlib.sha256(packed.replace(b"\x94\x86\xa4name", b"\xdd\0\0\0\4\x86\xa4name"))
    assert read(edited(REFERRING, "arrays.sha256", other.digest()), tables).refers


def test_equal_lists_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = first()
    monkeypatch.setattr(array_table, "arrays_from_docs", None)
    assert read(SECOND, tables).table is read(REFERRING, tables).table
    with pytest.raises(TypeError):
        read(edited(SECOND, "arrays.0.role", "buffer"), tables)


def test_a_list_is_not_taken_for_one_that_was_checked_for_other_axes() -> None:
    other = LISTED | {"rank": 1, "strategy": TWO_AXES}
    with pytest.raises(FormatError, match="2 placements"):
        read(other)
    with pytest.raises(CorruptionError):
        read(REFERRING | {"strategy": TWO_AXES})


@pytest.mark.parametrize(
    ("path", "value", "kind", "where"),
    [
        ("arrays.sha256", bytes(32), CorruptionError, "arrays.sha256"),
        ("arrays.sha256", b"", FormatError, "arrays.sha256"),
        ("arrays.sha256", "0" * 32, FormatError, "arrays.sha256"),
        ("arrays.sha256", ABSENT, FormatError, "arrays.sha256"),
        ("arrays.rank", 1, FormatError, "arrays.rank"),
        ("arrays.rank", False, FormatError, "arrays.rank"),
        ("arrays.names", [], FormatError, "arrays"),
        ("arrays", {}, FormatError, "arrays.rank"),
        ("arrays", {extension(3, ["int8", [1], b"a"]): 0}, FormatError, "arrays"),
        ("placements", LISTED["placements"], FormatError, "placements"),
        ("placements", None, FormatError, "placements"),
        ("placements", extension(3, ["int8", [0], b""]), FormatError, "placements"),
        ("rank", 0, FormatError, "arrays"),
        ("chunks.array", np.array([0, 0, 1, 4], "<u4").tobytes(), FormatError, "chunks.array"),
        ("chunks.array", np.array([0, 0, 1, 2], "<u4").tobytes(), FormatError, "chunks.array"),
    ],
)
def test_a_reference_that_says_something_else_is_refused(
    path: str, value: Any, kind: type[CkptkitError], where: str
) -> None:
    with pytest.raises(CkptkitError) as error:
        read(edited(REFERRING, path, value))
    assert type(error.value) is kind
    assert error.value.where == f"{WHERE}: {where}"


def test_the_arrays_of_another_rank_0_are_refused() -> None:
    tables = ArrayTables()
    Record.from_bytes(sealed(edited(LISTED, "arrays.0.role", "buffer")), "rank 0's", tables)
    tables.add(samples.record().table, 1)
    with pytest.raises(CorruptionError, match="other arrays") as error:
        read(REFERRING, tables)
    assert "rank-00000.zip" in error.value.hint


def test_without_rank_0s_record_a_reference_is_a_digest() -> None:
    with pytest.raises(NotFoundError, match="cannot be read") as error:
        read(REFERRING, ArrayTables())
    assert WHERE in error.value.where
    assert "rank-00000.zip" in error.value.hint
    tables = ArrayTables()
    tables.add(ArrayTable.of(samples.ARRAYS, samples.ALIASES), 1)
    assert read(REFERRING, tables).table.arrays == samples.ARRAYS


def test_a_record_of_another_rank_or_save_is_refused_before_its_arrays_are_looked_at() -> None:
    save_id = LISTED["save_id"]
    for origin in ((0, save_id), (1, "another-save")):
        with pytest.raises(CorruptionError, match="says it is rank 1") as error:
            Record.from_bytes(sealed(REFERRING), WHERE, ArrayTables(), origin)
        assert error.value.where == WHERE
    assert Record.from_bytes(sealed(REFERRING), WHERE, first(), (1, save_id)).rank == 1


def nested(levels: int, inside: bytes) -> bytes:
    return b"\x91" * levels + inside


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("shape", msgpack.ExtType(1, msgpack.packb([4])), id="a tuple, not a list"),
        pytest.param("shape", [4.0], id="a float, not an integer"),
        pytest.param("placements", False, id="a bool, not an integer"),
        pytest.param("role", b"other", id="bytes, not text"),
        pytest.param("more", 1, id="a field more"),
    ],
)
def test_an_entry_that_looks_like_the_one_before_is_refused_all_the_same(
    field: str, value: Any
) -> None:
    entry = {
        "name": "a",
        "shape": [4],
        "dtype": "int32",
        "grid": {"kind": "regular", "chunk_shape": [4]},
        "role": "other",
        "placements": 0,
    }
    alike = entry | {"name": "b"}
    placements = msgpack.packb([[]])
    found = arrays_from_docs((placements, msgpack.packb([entry, alike])), 0)
    assert found.names == ("a", "b")
    assert found.kinds[0] is found.kinds[1]
    wrong = msgpack.packb([entry, alike | {field: value}])
    with pytest.raises(FormatError, match=r"arrays\.1"):
        arrays_from_docs((placements, wrong), 0)


def test_an_entry_too_deep_to_be_packed_again_is_refused_as_any_other() -> None:
    # Within the depth of one value, and again inside of an extension.
    inner = nested(1000, b"\xc0")
    deep = nested(900, msgpack.packb(msgpack.ExtType(1, b"\x91" + inner)))
    entry = b"\x82" + msgpack.packb("name") + msgpack.packb("a") + msgpack.packb("x") + deep
    with pytest.raises(FormatError):
        arrays_from_docs((msgpack.packb([[]]), b"\x91" + entry), 0)


@pytest.mark.parametrize("change", [1, 2, 0x80, 0xFF], ids=hex)
def test_a_list_read_by_its_bytes_is_what_it_is_read_as_entry_by_entry(change: int) -> None:
    table = ArrayTable.of(samples.ARRAYS, [Alias("model/tied", samples.ARRAYS[0].name)])
    packed, whole = table.packed
    columns = (table.names, table.kinds, table.ofs, table.aliases)
    assert arrays_from_docs((packed, whole), 1) == columns

    def outcome(data: bytes, read: Any) -> Any:
        try:
            return read(data)
        except CkptkitError as error:
            return str(error)

    rows = [tuple(map(placement_from_doc, row)) for row in msgpack.unpackb(packed)]
    assert _as_written(whole, rows) is not None
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= change
        for data in (bytes(changed), whole[:at], whole[:at] + whole[at + 1 :]):
            found = outcome(data, lambda data: arrays_from_docs((packed, data), 1))
            assert found == outcome(data, lambda data: _one_by_one(data, rows)), at


def test_what_a_table_says_of_chunks_is_what_its_arrays_say() -> None:
    table = ArrayTable.of(samples.ARRAYS, samples.ALIASES)
    rows = [(array, chunk) for array in table.arrays for chunk in range(array.grid.chunk_count)]
    assert table.arrays == samples.ARRAYS
    assert int(table.starts[-1]) == len(rows) == len(samples.LENGTHS)
    assert [table.chunk_at(row) for row in range(len(rows))] == rows
    stored = [array.grid.stored_shape(array.grid.index(chunk)) for array, chunk in rows]
    lengths = [math.prod(s) * a.dtype.itemsize for (a, _), s in zip(rows, stored, strict=True)]
    assert table.stored_bytes().tolist() == lengths
