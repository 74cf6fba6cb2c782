"""The architecture, enforced: who may import whom, and how long and how named a module may be."""

from __future__ import annotations

import ast
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUES = {"errors", "model"}
ENGINE = VALUES | {"plan", "format", "storage", "foreign", "checkpoint"}
TORCH = {"live", "parallel", "activation", "plugins"}
LAYERS: dict[str, tuple[set[str], str]] = {
    "errors": (set(), "every layer raises errors, so they stand on nothing"),
    "model": ({"errors"}, "values are pure: they know no plans, no documents, no bytes"),
    "plan": (VALUES, "decisions are pure functions of values, wherever the bytes lie"),
    "format": (VALUES, "documents describe values, whoever decided and wherever the bytes lie"),
    "storage": ({"errors"}, "storage moves bytes, whatever they mean"),
    "foreign": (
        VALUES | {"format", "storage"},
        "a reader of foreign metadata says where bytes lie, and moves none",
    ),
    "checkpoint": (ENGINE | {"version"}, "the engine is below torch and commands"),
    "page": (ENGINE | {"version"}, "a page tells what the engine knows, and needs no torch"),
    "live": (ENGINE, "live is the one door between torch and the engine"),
    **dict.fromkeys(
        ("parallel", "activation", "plugins"), (ENGINE | {"live"}, "all stand on live, apart")
    ),
    "schemas": (set(), "the written format is data"),
    "version": (set(), "a number stands on nothing"),
    "ckptkit": (
        ENGINE | {"page", "version"},
        "`import ckptkit` must work without torch and without commands",
    ),
    "cli": (set(), "a command calls the public API only, as a user's script would"),
}
PUBLIC = {"ckptkit", "ckptkit.errors", "ckptkit.schemas", *(f"ckptkit.{door}" for door in TORCH)}
PUBLIC.add("ckptkit.parallel.launch")  # what `ckpt launch` is, without the rest of the door
ONLY: dict[str, tuple[set[str], str]] = {
    "torch": (TORCH, "it costs seconds and 220 MB, which offline work must not pay"),
    "zarr": ({"format", "checkpoint"}, "zarr is a view for others, never the data path"),
    **dict.fromkeys(
        ("fsspec", "s3fs", "gcsfs", "obstore", "botocore"), ({"storage"}, "it hides the stores")
    ),
    **dict.fromkeys(("click", "rich"), ({"cli"}, "a library returns or raises, it never prints")),
}
BANNED = {"util", "utils", "helper", "helpers", "core", "common", "manager"}


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _imports(code: str, package: str) -> list[tuple[int, str]]:
    """Line and absolute name of all that code in `package` imports, in functions too."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package)
            inner = LAYERS if base == "ckptkit" else {}
            names = [f"{base}.{it.name}" if it.name in inner else base for it in node.names]
            found += [(node.lineno, name) for name in names]
    return found


def _objection(layer: str, target: str) -> str | None:
    """Why `layer` may not import `target`, or None when it may."""
    root, _, rest = target.partition(".")
    if root != "ckptkit":
        layers, why = ONLY.get(root, ({layer}, ""))
        return None if layer in layers else f"only {', '.join(sorted(layers))} may: {why}"
    allowed, why = LAYERS[layer]
    other = rest.partition(".")[0] or "ckptkit"
    if other == layer or other in allowed or (layer == "cli" and target in PUBLIC):
        return None
    return f"{layer} may import {', '.join(sorted(allowed)) or 'no other layer'}: {why}"


def test_imports_go_down_the_layers_only() -> None:
    wrong: list[str] = []
    for path in _sources("ckptkit", "cli", "schemas"):
        parts = path.relative_to(ROOT).parts[path.is_relative_to(ROOT / "ckptkit") :]
        layer = parts[0].removesuffix(".py").replace("__init__", "ckptkit")
        assert layer in LAYERS, f"{path}: say in LAYERS what {layer} may import, and why"
        for line, target in _imports(path.read_text(), ".".join(["ckptkit", *parts[:-1]])):
            if objection := _objection(layer, target):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}, but {objection}")
    assert not wrong, "\n".join(wrong)


def test_no_way_of_importing_goes_unseen() -> None:
    for layer, code in (
        ("model", "def load():\n    from ..storage import local"),
        ("model", "from .. import errors, cli"),
        ("cli", "from ckptkit import open, format"),
        ("plan", "if True:\n    import torch.nn as nn"),
    ):
        found = _imports(code, f"ckptkit.{layer}")
        assert any(_objection(layer, target) for _, target in found), code


def test_modules_are_short_and_named_after_what_they_hold() -> None:
    paths = _sources("ckptkit", "cli", "schemas", "tests", "examples", "benchmarks")
    lengths = {path: len(path.read_text().splitlines()) for path in paths}
    assert not [path for path in paths if {path.stem, path.parent.name} & BANNED], "name the idea"
    assert not {path: n for path, n in lengths.items() if n > 500}, (
        "a chapter has 100 to 500 lines: split it by idea"
    )


def _graph() -> dict[str, set[str]]:
    """Which module of the package imports which, in functions too."""
    files = {}
    for path in _sources("ckptkit"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                each = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[name] |= {it if it in files else node.module for it in each} & files.keys()
        graph[name].discard(name)
    return graph


def _cycle(graph: dict[str, set[str]]) -> list[str]:
    """Those that lead back to themselves, or between such; none where nothing does."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        used = set().union(*left.values())
        ends = {name for name, targets in left.items() if not targets or name not in used}
        if not ends:
            return sorted(left)
        left = {name: targets - ends for name, targets in left.items() if name not in ends}


def test_nothing_imports_what_imports_it() -> None:
    graph = _graph()
    assert not _cycle(graph), "two modules that need each other are one"
    rooms: dict[str, set[str]] = {}
    for name, targets in graph.items():
        room = name if name.count(".") < 2 else name.rpartition(".")[0]
        for target in targets:
            other = target if target.count(".") < 2 else target.rpartition(".")[0]
            if "." in room and "." in other and other != room:
                rooms.setdefault(room, set()).add(other)
                rooms.setdefault(other, set())
    assert not _cycle(rooms), "a room is used by those above it only"


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in _sources("ckptkit", "cli"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: those for name, those in places.items() if len(those) > 1}, (
        "one word for one idea, and one idea for one word"
    )


def test_a_folder_can_be_seen_at_once() -> None:
    counts: dict[Path, int] = {}
    for path in _sources("ckptkit", "cli"):
        counts[path.parent] = counts.get(path.parent, 0) + 1
    assert not {folder: count for folder, count in counts.items() if count > 14}, (
        "a dozen files, then it wants rooms"
    )
