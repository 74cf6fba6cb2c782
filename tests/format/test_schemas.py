from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import pytest

from tests.format import samples
from tests.format.encoding import plain_json
from tests.format.test_conformance import cases, invalid_bytes

SCHEMAS = Path(__file__).parents[2] / "schemas"


def schema(document: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"{document}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


VALIDATORS = {
    document: jsonschema.Draft202012Validator(schema(document))
    for document in ("manifest", "record")
}


def problems(document: str, data: bytes) -> list[str]:
    decoded = plain_json(msgpack.unpackb(data, strict_map_key=False))
    return [error.message for error in VALIDATORS[document].iter_errors(decoded)]


@pytest.mark.parametrize("case", cases("valid", "manifest", "record"))
def test_the_schemas_accept_the_valid_cases(case: dict[str, Any]) -> None:
    assert problems(case["document"], bytes.fromhex(case["bytes"]["$hex"])) == []


def test_the_schemas_accept_what_is_written() -> None:
    assert problems("manifest", samples.manifest().to_bytes()) == []
    assert problems("record", samples.record().to_bytes()) == []


@pytest.mark.parametrize(
    "case", [p for p in cases("invalid", "manifest", "record") if "schema" in p.values[0]]
)
def test_the_schemas_refuse_what_a_case_says_they_refuse(case: dict[str, Any]) -> None:
    found = problems(case["document"], invalid_bytes(case))
    assert bool(found) == (case["schema"] == "refuses"), found


def test_the_schemas_list_the_keys_in_the_order_in_which_they_are_written() -> None:
    for document, data in (
        ("manifest", samples.manifest().to_bytes()),
        ("record", samples.record().to_bytes()),
    ):
        assert list(schema(document)["properties"]) == list(msgpack.unpackb(data))
