from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckptkit.errors import FormatError, VersionError
from ckptkit.format import manifest as records
from ckptkit.format.manifest import Record
from ckptkit.format.names import name_from_file
from ckptkit.model.document import LIMIT
from tests.format import samples
from tests.format.samples import ABSENT, edited, extension, plain, sealed

WHERE = "run/step-0000001000/data/x/rank-00000.zip"
GOOD = plain(samples.record().to_bytes())
ARRAY = extension(3, ["int8", [2], b"ab"])
HUGE = msgpack.ExtType(2, b"\1" * 3000)


def read(document: dict[Any, Any]) -> Record:
    return Record.from_bytes(sealed(document), WHERE)


def refuse(document: dict[Any, Any], where: str = "", problem: str = ".") -> None:
    with pytest.raises(FormatError, match=problem) as error:
        read(document)
    assert error.value.where.startswith(WHERE), "a step has many packs: the message names this one"
    assert error.value.where.endswith(where)


def changed(name: str, row: int, value: int) -> dict[Any, Any]:
    kind = "<u4" if name in ("array", "crc32") else "<u8"
    values = np.frombuffer(GOOD["chunks"][name], kind).copy()
    values[row] = value
    return edited(GOOD, f"chunks.{name}", values.tobytes())


def test_a_record_comes_back_as_it_was_written() -> None:
    record = samples.record()
    data = record.to_bytes()
    found = Record.from_bytes(data, WHERE)
    for name in ("save", "rank", "objects"):
        assert getattr(found, name) == getattr(record, name), name
    assert [*found.documents.each()] == [*record.documents.each()]
    for name in ("arrays", "aliases"):
        assert getattr(found.table, name) == getattr(record.table, name), name
    for name in ("array", "chunk", "offset", "length", "crc32"):
        assert np.array_equal(getattr(found, name), getattr(record, name)), name
    assert found.to_bytes() == data


def test_a_record_of_nothing_comes_back() -> None:
    columns = {**dict.fromkeys(GOOD["chunks"], b""), "count": 0}
    nothing = {"arrays": [], "documents": [], "objects": [], "placements": [], "chunks": columns}
    assert read(GOOD | nothing).table.arrays == ()


def test_the_keys_stand_in_the_order_of_the_format() -> None:
    assert list(GOOD) == [
        *("format", "version", "save_id", "step", "time", "writer", "world_size", "strategy"),
        *("details", "rank", "placements", "arrays", "documents", "chunks", "objects"),
    ]
    assert list(GOOD["chunks"]) == ["count", "array", "chunk", "offset", "length", "crc32"]


def test_a_chunk_names_its_array_by_its_place_in_the_list_that_also_has_aliases() -> None:
    document = edited(GOOD, "arrays", [{"name": "m", "alias_of": "model/a"}, *GOOD["arrays"]])
    del document["arrays"][3]
    numbers = np.frombuffer(GOOD["chunks"]["array"], "<u4") + 1
    document = edited(document, "chunks.array", numbers.astype("<u4").tobytes())
    found = read(document)
    assert [found.table.arrays[i].name for i in found.array] == [
        "model/a",
        "model/a",
        "model/b",
        "model/b",
    ]
    assert found.to_bytes() == sealed(document)
    refuse(edited(document, "chunks.array", np.zeros(4, "<u4").tobytes()), problem="alias")


@pytest.mark.parametrize("key", [key for key in GOOD if key not in ("format", "version")])
def test_every_field_is_needed_and_none_may_be_of_another_type(key: str) -> None:
    refuse(edited(GOOD, key, ABSENT), key, "missing")
    for value in (None, True, b"x", [None], ARRAY, HUGE):
        refuse(edited(GOOD, key, value))
    refuse(GOOD | {"surprise": 0})


def test_a_record_of_a_newer_version_is_refused_by_its_number() -> None:
    with pytest.raises(VersionError, match="version 7"):
        read(GOOD | {"version": 7})


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("rank", 2, "from 0 to"),
        ("rank", -1, "from 0 to"),
        ("world_size", 1, "2 ranks"),
        ("documents.0", ["zarr.json", 64, 50], "entry"),
        ("documents.0", {"zarr.json": 64}, "entry"),
        ("documents.0", [None, 64, 50, 1], "entry"),
        ("documents.0", ["zarr.json", -1, 50, 1], ""),
        ("documents.0", ["zarr.json", 64, 2**63, 1], ""),
        ("documents.0", ["zarr.json", 64, 50, 2**32], ""),
        ("documents.0", ["zarr.json", 64, 50.0, 1], ""),
        ("documents.0", ["model/a/c/0", 64, 50, 1], "zarr.json"),
        ("documents.0", ["model/azarr.json", 64, 50, 1], "zarr.json"),
        ("documents.0", ["/zarr.json", 64, 50, 1], ""),
        ("documents.0", ["../zarr.json", 64, 50, 1], ""),
        ("documents.0", ["model/../zarr.json", 64, 50, 1], ""),
        ("documents.0", ["modél/zarr.json", 64, 50, 1], ""),
        ("documents.0", ["a" * 70_000 + "/zarr.json", 64, 50, 1], ""),
        ("documents.0", ["model/a/zarr.json", 64, 50, 1], ""),
        ("arrays.0.shape", [-1, 6], "from 0 to"),
        ("arrays.0.grid.chunk_shape", [2**62, 2**62], ""),
        ("arrays.2.alias_of", "model/x", "not there"),
        ("chunks.count", 5, "are not 5"),
        ("chunks.count", 2**40, "from 0 to"),
        ("chunks.chunk", b"", "are not 4"),
        ("objects.0.semantics", "mean", "replicated"),
        ("objects.0.name", "zz", "sorted"),
        ("objects.0", {"name": "lr", "semantics": "sum", "value": "text"}, ""),
        ("objects.0", {"name": "lr", "semantics": "sum", "value": [1]}, ""),
    ],
)
def test_a_hostile_field_is_refused(path: str, value: Any, problem: str) -> None:
    refuse(edited(GOOD, path, value), problem=problem or ".")


def test_messages_say_in_which_pack_and_where() -> None:
    refuse(edited(GOOD, "step", None), "step")
    refuse(edited(GOOD, "arrays.0.shape", [-1]), "arrays.0.shape.0")
    refuse(edited(GOOD, "objects.0.semantics", ""), "objects.0.semantics")
    refuse(edited(GOOD, "placements.0.0", {}), "placements.0.0")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("array", 3),
        ("array", 2**32 - 1),
        ("chunk", 4),
        ("chunk", 2**63),
        ("chunk", 2**64 - 1),
        ("length", 2**64 - 1),
        ("offset", 2**63),
        ("offset", 2**64 - 32),
    ],
)
def test_a_chunk_that_cannot_be_is_refused(name: str, value: int) -> None:
    refuse(changed(name, 1, value))


def test_a_chunk_listed_twice_in_one_pack_is_refused() -> None:
    refuse(changed("chunk", 1, 0))


NODES = st.sampled_from(
    ["a", "layers.0", "a%2Fb", "_a", ".a", "zarr.json", "", "a b", "%5F_a", "x" * 250, "é", "a\nb"]
)
NUMBERS = st.sampled_from([0, 7, (1 << 32) - 1, 1 << 32, LIMIT - 1, LIMIT, -1, True, 1.0, None])


@st.composite
def document_rows(draw: st.DrawFn) -> list[Any]:
    """Rows of documents, many of which are wrong."""
    rows: list[Any] = []
    for _ in range(draw(st.integers(0, 4))):
        nodes = draw(st.lists(NODES, max_size=3) | st.just(["a"] * 33))
        name = "/".join([*nodes, draw(st.sampled_from(["zarr.json", "zarr.json", "c/0"]))])
        row: Any = [name, draw(NUMBERS), draw(NUMBERS), draw(NUMBERS)]
        rows.append(draw(st.sampled_from([row, row, row, row[:3], tuple(row), [5, *row[1:]]])))
    return rows


@given(document_rows())
@example([["a/zarr.json", 0, 1, 2], ["zarr.json", 3, 4, 5]])
@example([["a\nb/zarr.json", 0, 0, 0]])
def test_documents_are_read_where_nothing_is_wrong_with_any(rows: list[Any]) -> None:
    def is_right(row: Any) -> bool:
        if type(row) is not list or len(row) != 4 or type(row[0]) is not str:
            return False
        inside, _, last = row[0].rpartition("/")
        if last != "zarr.json" or not all(type(number) is int for number in row[1:]):
            return False
        if row[0] != last:
            try:
                name_from_file(inside, "")
            except FormatError:
                return False
        return all(0 <= number < LIMIT for number in row[1:]) and row[3] < 1 << 32

    if all(map(is_right, rows)) and len({row[0] for row in rows}) == len(rows):
        assert [list(entry) for entry in records._documents(rows).each()] == rows
    else:
        with pytest.raises(FormatError, match="documents"):
            records._documents(rows)
