from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from ckptkit.cli.output import MEANING
from ckptkit.cli.program import COMMANDS
from jsonschema import Draft202012Validator

from tests.cli.programs import ckpt

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_ends_with_an_example_and_the_exit_codes(name: str) -> None:
    result = ckpt(name, "--help")
    assert result.exit_code == 0
    pattern = rf"\n  Example:\n(    ckpt {name}\b.*\n)+\n  Exit codes:\n(    \d+ +\S.*\n)+\Z"
    assert re.search(pattern, result.stdout)
    assert f"schemas/cli/{name}.schema.json" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_program_lists_its_commands_whole() -> None:
    result = ckpt()
    assert (result.exit_code, result.stdout) == (0, ckpt("--help").stdout)
    assert re.findall(r"^  (\w+)  +[A-Z].*\.$", result.stdout, re.MULTILINE)[
        -len(COMMANDS) :
    ] == list(COMMANDS)
    assert result.stdout.rstrip().endswith("141  the reader of the output went away")


def test_every_command_has_a_module_a_schema_and_a_place_in_the_docs() -> None:
    made = {
        name.rstrip("_"): path.stem
        for path in (ROOT / "cli").glob("*.py")
        for name in re.findall(r"^@command\((?:.|\n)*?^def (\w+)\(", path.read_text(), re.MULTILINE)
    }
    assert made == COMMANDS
    page = (ROOT / "docs" / "commands.md").read_text()
    assert not [name for name in COMMANDS if not re.search(rf"[$`] ?ckpt {name}\b", page)]
    schemas = {path.name for path in (ROOT / "schemas" / "cli").iterdir()}
    assert schemas == {f"{name}.schema.json" for name in COMMANDS}


def test_the_docs_have_every_exit_code() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    table = re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE)
    assert [int(code) for row in table for code in row.split(",")] == sorted(MEANING)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_schema_is_one(name: str) -> None:
    schema = json.loads((ROOT / "schemas" / "cli" / f"{name}.schema.json").read_text())
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"].endswith("2020-12/schema")
    assert schema["$id"] == f"urn:ckptkit:cli:{name}"


def test_the_version_is_the_packages() -> None:
    assert re.fullmatch(r"ckpt, version \d+\.\d+\.\d+\S*\n", ckpt("--version").stdout)
