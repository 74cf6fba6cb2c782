"""The cases of schemas/conformance, which other implementations use too, run against this one."""

from __future__ import annotations

import copy
import datetime
import json
import math
import zlib
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from ckptkit import errors
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.encoding import check_leaf, dumps, unpack
from ckptkit.format.manifest import Manifest, Record
from ckptkit.format.names import join, name_from_file, split
from tests.format.encoding import packed

FOLDER = Path(__file__).parents[2] / "schemas" / "conformance"


def cases(folder: str, *documents: str) -> list[Any]:
    found = []
    for path in sorted((FOLDER / folder).glob("*.json")):
        case = json.loads(path.read_text())
        if case["document"] in documents:
            common = {k: v for k, v in case.items() if k not in ("cases", "describe")}
            for number, each in enumerate(case.get("cases", [case])):
                name = path.stem if "cases" not in case else f"{path.stem}-{number}"
                found.append(pytest.param(common | each, id=name))
    return found


def sealed(content: dict[str, Any]) -> bytes:
    body = packed({**content, "crc32": 0})[:-1] + b"\xce"
    return body + zlib.crc32(body).to_bytes(4, "big")


def valid(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "valid" / f"{name}.json").read_text())
    return found


def read(case: dict[str, Any], data: bytes) -> Any:
    """The document, for a record with what rank 0's record lists."""
    if case["document"] == "manifest":
        return Manifest.from_bytes(data, "file")
    tables = ArrayTables()
    rank0 = case.get("rank0", valid(case["base"]).get("rank0") if "base" in case else None)
    if rank0 is not None:
        Record.from_bytes(bytes.fromhex(valid(rank0)["bytes"]["$hex"]), "rank 0's", tables)
    return Record.from_bytes(data, "file", tables)


def text(value: Any) -> str:
    found: str = msgpack.unpackb(packed(value))
    return found


@pytest.mark.parametrize("case", cases("valid", "manifest", "record"))
def test_a_valid_document_is_read_and_written_to_the_byte(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"]["$hex"])
    assert sealed(case["content"]) == data
    document = read(case, data)
    assert document.to_bytes() == data
    assert document.save.step == case["content"]["step"]
    listed = valid(case["rank0"]) if "rank0" in case else case
    entries = {entry["name"]: entry for entry in listed["content"]["arrays"]}
    aliases = {name: entry["alias_of"] for name, entry in entries.items() if "alias_of" in entry}
    assert {alias.name: alias.alias_of for alias in document.table.aliases} == aliases
    for array in document.table.arrays:
        entry = entries.pop(array.name)
        assert (list(array.shape), array.dtype.name) == (entry["shape"], entry["dtype"])
        assert array.grid.to_doc() == entry["grid"]
    assert set(entries) == set(aliases)
    for name, column in case["content"]["chunks"].items():
        if name != "count":
            assert getattr(document, name).dtype.kind == "u"
            assert len(getattr(document, name)) == case["content"]["chunks"]["count"]
            assert "$hex" in column or name == "array" or same_column(document, name, column)


def same_column(document: Any, name: str, column: dict[str, list[int]]) -> bool:
    return bool(getattr(document, name).tolist() == next(iter(column.values())))


@pytest.mark.parametrize("case", cases("valid", "leaf"))
def test_a_valid_leaf_means_what_it_says(case: dict[str, Any]) -> None:
    data = bytes.fromhex(case["bytes"]["$hex"])
    assert packed(case["value"]) == data
    found = check_leaf(unpack(data, "leaf"), "leaf")
    assert meaning(found) == case["means"]
    assert type(meaning(found)) is type(case["means"])
    assert dumps(found) == data


def meaning(value: Any) -> Any:
    """A value of Python in the words of the cases."""
    match value:
        case float() if not math.isfinite(value) or value.is_integer():
            return {"type": "float", "text": str(value)}
        case bytes():
            return {"type": "bytes", "hex": value.hex()}
        case tuple():
            return {"type": "tuple", "items": [meaning(item) for item in value]}
        case dict() if not all(isinstance(key, str) for key in value):
            return {"type": "map", "items": [[k, meaning(v)] for k, v in value.items()]}
        case bool() | None:
            return value
        case int() if not -(2**63) <= value < 2**64:
            return {"type": "integer", "decimal": str(value)}
        case np.ndarray():
            plain = value.astype("f8") if value.dtype.kind == "V" else value
            return {
                "type": "array",
                "dtype": value.dtype.name,
                "shape": list(value.shape),
                "elements": plain.tolist(),
            }
        case np.generic():
            return {"type": "scalar", "dtype": value.dtype.name, "element": value.item()}
        case datetime.datetime():
            return {"type": "datetime", "iso": value.isoformat()}
    return value


@pytest.mark.parametrize("case", cases("valid", "name"))
def test_a_valid_name_is_spelled_as_it_has_to_be(case: dict[str, Any]) -> None:
    nodes, path = tuple(map(text, case["nodes"])), text(case["path"])
    assert join(*nodes) == path
    assert split(name_from_file(path, "name")) == nodes


def invalid_bytes(case: dict[str, Any]) -> bytes:
    base = valid(case["base"])
    assert base["document"] == case["document"]
    content = copy.deepcopy(base["content"])
    for path, value in case.get("edit", {}).items():
        *above, last = path.split(".")
        place = content
        for step in above:
            place = place[int(step)] if isinstance(place, list) else place[step]
        key = int(last) if isinstance(place, list) else last
        if value == {"$absent": True}:
            del place[key]
        else:
            place[key] = value
    return damaged(sealed(content | case.get("append", {})), case.get("damage", {}))


def damaged(data: bytes, damage: dict[str, Any]) -> bytes:
    changed = bytearray(data)
    for kind, what in damage.items():
        match kind:
            case "flip":
                changed[what[0]] ^= what[1]
            case "cut":
                del changed[-what:]
            case "keep":
                del changed[what:]
            case "append":
                changed += bytes.fromhex(what)
            case _:
                pytest.fail(f"no such damage: {kind}")
    return bytes(changed)


@pytest.mark.parametrize("case", cases("invalid", "manifest", "record"))
def test_an_invalid_document_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(errors.CkptkitError) as error:
        read(case, invalid_bytes(case))
    assert type(error.value).__name__ == case["error"]
    assert case["problem"] in str(error.value)
    assert error.value.where.startswith("file")
    assert error.value.where.endswith(case["where"])


def read_small(case: dict[str, Any]) -> None:
    if case["document"] == "name":
        name_from_file(text(case["name"]), "file")
    else:
        check_leaf(unpack(packed(case["value"]), "file"), "file")


@pytest.mark.parametrize("case", cases("invalid", "leaf", "name"))
def test_an_invalid_leaf_or_name_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(errors.FormatError) as error:
        read_small(case)
    assert type(error.value).__name__ == case["error"]
    assert case["problem"] in str(error.value)
    assert error.value.where == "file"


def test_there_are_cases_of_every_kind() -> None:
    assert len(cases("valid", "manifest", "record")) >= 6
    assert len(cases("invalid", "manifest", "record")) >= 40
    for folder in ("valid", "invalid"):
        for document in ("leaf", "name"):
            assert len(cases(folder, document)) >= 15
