"""The names that users may rely on are exactly those, and need neither torch nor a command."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from zarr.dtype import data_type_registry

import ckptkit


def test_all_is_what_there_is() -> None:
    public = {
        name
        for name, value in vars(ckptkit).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("ckptkit.")
    }
    assert public <= set(ckptkit.__all__)
    assert all(hasattr(ckptkit, name) for name in ckptkit.__all__)


def test_what_is_imported_late_is_what_type_checkers_are_told() -> None:
    tree = ast.parse(Path(ckptkit.__file__).read_text(encoding="utf-8"))
    told = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    places = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in told
        for alias in node.names
    }
    for name in set(ckptkit.__all__) - {"__version__"}:
        module, original = places[name]
        assert getattr(ckptkit, name) is getattr(import_module(str(module)), original), name


# Torch is imported once, which is most of what each of them would do.
EACH_ROOM = """
import os, sys, torch
for room in sys.argv[1:]:
    if os.fork() == 0:
        import ckptkit
        print(getattr(ckptkit, room).__name__)
        sys.exit()
    os.wait()
"""


def test_a_room_is_there_after_a_bare_import() -> None:
    rooms = ("activation", "errors", "live", "model", "parallel", "storage")
    command = [sys.executable, "-c", EACH_ROOM, *rooms]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"ckptkit.{room}" for room in rooms], done.stderr


def test_import_needs_neither_torch_nor_commands() -> None:
    code = "import sys, ckptkit; print([m for m in ('torch', 'click', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_teaches_zarr_the_dtypes_it_lacks() -> None:
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "complex_float16"):
        assert name in data_type_registry.contents
