"""Rules from files, from presets that come with ckptkit, and from documents."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ckptkit.errors import RulesError, nearest
from ckptkit.model import Strategy
from ckptkit.model.rules import Rules, fits, sizes_of

RulesLike: TypeAlias = Rules | Mapping[str, Any] | str | os.PathLike[str]

_NUMBER = re.compile(r"(?<![^./])[0-9]+(?![^./])")
_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Preset:
    """Rules for the models of one architecture, and the names by which these are known."""

    rules: Rules
    all: tuple[str, ...]
    none: tuple[str, ...]


def load_rules(
    what: RulesLike, *, names: Iterable[str] = (), sizes: Mapping[str, Any] | None = None
) -> Rules:
    """The rules of a preset, of `auto` (the preset that fits the names), of a file or a document.

    `sizes` are those that rules refer to, and may be a whole Hugging Face config. Names that no
    preset fits give rules that know no tensor.
    """
    if isinstance(what, Rules):
        rules = what
    elif isinstance(what, Mapping):
        rules = Rules.from_doc(what, where="rules")
    elif what == "auto":
        fitting = fitting_presets(names)
        if len(fitting) > 1:
            raise RulesError(
                f"more than one preset fits: {', '.join(fitting)}",
                where="rules auto",
                hint=f"name the one that is meant, such as --rules {fitting[0]}",
            )
        rules = Rules("auto, which knows no preset for these names", ())
        if fitting:
            rules = presets()[fitting[0]].rules
    elif isinstance(what, str) and what in presets():
        rules = presets()[what].rules
    else:
        rules = Rules.from_doc(document_in(what, [*presets(), "auto"]), where=Path(what).name)
    return rules.with_sizes(sizes_of({**rules.known, **(sizes or {})}))


def rules_between(
    source: Strategy,
    target: Strategy,
    rules: RulesLike | None,
    *,
    names: Iterable[str],
    sizes: Mapping[str, Any] | None = None,
) -> Rules | None:
    """The rules that are given, or else the detected ones, for what the source does not tell: how
    it cuts along tp and ep itself, or which stages it has, goes on.

    Tensors seldom say how long a head is, so where another number of ranks would cut one in two,
    the rules are asked for that.
    """
    if rules is not None:
        return load_rules(rules, names=names, sizes=sizes)
    had, wanted = _ranks_by_kind(source), _ranks_by_kind(target)
    cuts = {"tp", "ep"} & wanted.keys() - had.keys()
    if wanted.get("tp", 1) not in (1, had.get("tp")):
        cuts.add("tp")
    stages = "pp" in wanted and wanted["pp"] != had.get("pp")
    if not cuts and not stages:
        return None
    found = load_rules("auto", names=names, sizes=sizes)
    return replace(
        found,
        is_guess=True,
        rules=found.rules if cuts else (),
        pipeline=found.pipeline if stages else None,
    )


@cache
def presets() -> dict[str, Preset]:
    """All presets, by name."""
    folder = files("ckptkit") / "presets"
    found: dict[str, Preset] = {}
    # A first save waits for this, and the loader in C is faster. It is for our own files only: what
    # is nested too deeply would end the process.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        doc = yaml.load(path.read_text(encoding="utf-8"), loader)  # noqa: S506 — both are safe
        detect, name = doc["detect"], path.name.removesuffix(".yaml")
        rules = Rules.from_doc(doc, where=name)
        found[name] = Preset(rules, tuple(detect["all"]), tuple(detect.get("none", ())))
    return found


def of_first_layer(name: str) -> str:
    """The name with all numbers of layers and experts 0: as layers are alike, one of each kind is
    asked for.
    """
    return _NUMBER.sub("0", name)


def fitting_presets(names: Iterable[str]) -> list[str]:
    """The presets that fit the names of a model's tensors: one, where these are known."""
    known, found = {of_first_layer(name) for name in names}, []
    for preset_name, preset in presets().items():
        has_all = all(any(fits(pattern, name) for name in known) for pattern in preset.all)
        if has_all and not any(fits(pattern, name) for pattern in preset.none for name in known):
            found.append(preset_name)
    return found


def _ranks_by_kind(strategy: Strategy) -> dict[str, int]:
    found: dict[str, int] = {}
    for axis in strategy.mesh.axes:
        if axis.size > 1:
            found[axis.kind] = found.get(axis.kind, 1) * axis.size
    return found


def document_in(
    what: str | os.PathLike[str], known: Sequence[str] = (), kind: str = "preset"
) -> Any:
    """What a file of YAML or JSON holds; `known` are the names that could be written instead."""
    path = Path(what)
    if isinstance(what, str):
        is_file = path.suffix in _SUFFIXES
        with suppress(OSError, ValueError):  # a name that no file can have
            is_file = is_file or path.exists()
        if not is_file:
            raise RulesError(
                f"no {kind} of this name, nor a file",
                value=what,
                hint=f"{nearest(what, known)}{kind}s are {', '.join(known)}",
            )
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise RulesError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RulesError(f"is neither YAML nor JSON: {error}", where=str(path)) from error
