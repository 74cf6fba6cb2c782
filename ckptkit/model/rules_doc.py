"""Rules as documents: read strictly, with all problems at once."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model.expression import Expression
from ckptkit.model.placement import Replicate, Shard, parse_placement
from ckptkit.model.rules import Cut, Experts, Pipeline, Rule, Rules

_T = TypeVar("_T")
_MAX_RULES = 10_000
_CUTS = "write replicate, shard(0) or {shard: 0, blocks: [...], unit: n}"
_HINT = "schemas/RULES.md says what a rules file holds"


class _Problems:
    """What is wrong with a document, and where; reading goes on with what is left."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, where: str, what: str) -> None:
        """One more."""
        self.found.append(f"{where}: {what}")

    def fields(self, doc: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
        """The document as a map of known keys; what else is there is a problem."""
        if not isinstance(doc, Mapping):
            self.add(where, f"must be a map, not {_shown(doc)}")
            return {}
        for key in doc:
            if key not in known:
                self.add(where, f"has an unknown key {_shown(key)}; known are {', '.join(known)}")
        return {key: doc[key] for key in known if key in doc}

    def tried(self, where: str, make: Callable[[], _T], otherwise: _T) -> _T:
        """What a reader gives, or a problem."""
        try:
            return make()
        except (LayoutError, RulesError) as error:
            self.add(where, str(error).replace("\nhint: ", "; "))
            return otherwise


def rules_from(doc: object, where: str) -> Rules:
    """The rules of a document that was parsed from YAML or JSON."""
    problems = _Problems()
    # A preset says by what names it is known; where rules are named, that is not asked.
    found = problems.fields(doc, where, ("rules", "pipeline", "default", "sizes", "detect"))
    found.pop("detect", None)
    if not found and not problems.found:
        problems.add(where, "is empty; it has at least `rules` or `pipeline`")
    listed = found.get("rules", [])
    if not isinstance(listed, list | tuple) or len(listed) > _MAX_RULES:
        problems.add("rules", f"must be a list, not {_shown(listed)}")
        listed = []
    rules = tuple(_rule(each, f"rules.{i}", problems) for i, each in enumerate(listed))
    pipeline = None
    if found.get("pipeline") is not None:
        pipeline = _pipeline(found["pipeline"], "pipeline", problems)
    default = found.get("default", "error")
    if default not in ("error", "replicate"):
        problems.add("default", f"must be error or replicate, not {_shown(default)}")
    sizes = _sizes(found.get("sizes", {}), "sizes", problems)
    if problems.found:
        count = len(problems.found)
        what = "not rules" if count == 1 else f"not rules, for {count} reasons"
        lines = "\n  ".join(problems.found[:50])
        raise RulesError(f"{what}:\n  {lines}", where=where, hint=_HINT)
    return Rules(where, rules, pipeline, default, sizes)


def _rule(doc: object, where: str, problems: _Problems) -> Rule:
    found = problems.fields(doc, where, ("match", "tp", "ep", "ndim", "when"))
    if isinstance(doc, Mapping) and "match" not in found:
        problems.add(where, "lacks match")
    if isinstance(doc, Mapping) and not {"tp", "ep"} & found.keys():
        problems.add(where, "says of neither tp nor ep what it does")
    match = _patterns(found.get("match", []), f"{where}.match", problems)
    tp = _cut(found["tp"], f"{where}.tp", problems) if "tp" in found else None
    ep = _experts(found["ep"], f"{where}.ep", problems) if "ep" in found else None
    ndim = found.get("ndim")
    if ndim is not None and not _is_count(ndim):
        problems.add(f"{where}.ndim", f"must be a number of dims, not {_shown(ndim)}")
    return Rule(match, tp, ep, ndim, _sizes(found.get("when", {}), f"{where}.when", problems))


def _cut(doc: object, where: str, problems: _Problems) -> Cut:
    if isinstance(doc, str):
        text = doc
        return problems.tried(where, lambda: _cut_of_text(text), Cut())
    if not isinstance(doc, Mapping):
        problems.add(where, f"no placement: {_shown(doc)}; {_CUTS}")
        return Cut()
    found = problems.fields(doc, where, ("shard", "blocks", "unit"))
    if not _is_count(found.get("shard")):
        problems.add(f"{where}.shard", f"must be a dim, not {_shown(found.get('shard'))}; {_CUTS}")
        return Cut()
    blocks, unit = found.get("blocks"), found.get("unit")
    read: Any = None
    if isinstance(blocks, list | tuple):
        read = tuple(
            _expression(each, f"{where}.blocks.{i}", problems) for i, each in enumerate(blocks)
        )
        if not blocks:
            problems.add(f"{where}.blocks", "cannot be empty; leave it out")
    elif blocks is not None:
        read = _expression(blocks, f"{where}.blocks", problems)
    return Cut(
        found["shard"], read, None if unit is None else _expression(unit, f"{where}.unit", problems)
    )


def _cut_of_text(text: str) -> Cut:
    placement = parse_placement(text)
    if isinstance(placement, Replicate):
        return Cut()
    if not isinstance(placement, Shard):
        raise LayoutError("a rule cuts or replicates", value=text, hint=_CUTS)
    blocks = placement.blocks
    return Cut(
        placement.dim,
        None if blocks is None else tuple(Expression(str(block)) for block in blocks),
        None if placement.unit == 1 else Expression(str(placement.unit)),
    )


def _experts(doc: object, where: str, problems: _Problems) -> Cut | Experts:
    if not isinstance(doc, Mapping) or "expert" not in doc:
        return _cut(doc, where, problems)
    found = problems.fields(doc, where, ("expert",))
    return Experts(_numbering(found["expert"], f"{where}.expert", problems))


def _pipeline(doc: object, where: str, problems: _Problems) -> Pipeline:
    found = problems.fields(doc, where, ("layers", "split", "first", "last", "every"))
    layers = found.get("layers")
    listed = layers if isinstance(layers, list | tuple) else [layers]
    if not listed:
        problems.add(f"{where}.layers", "cannot be empty")
    patterns = tuple(_numbering(each, f"{where}.layers", problems) for each in listed)
    split = found.get("split", "balanced")
    if isinstance(split, list | tuple):
        split = tuple(split)
        rising = all(map(_is_count, split)) and list(split) == sorted(set(split)) and 0 not in split
        if not rising:
            problems.add(f"{where}.split", f"must be rising layer numbers, not {_shown(split)}")
    elif split != "balanced":
        problems.add(f"{where}.split", f"must be balanced or a list, not {_shown(split)}")
    first, last, every = (
        _patterns(found.get(key, []), f"{where}.{key}", problems)
        for key in ("first", "last", "every")
    )
    return Pipeline(patterns, split, first, last, every)


def _patterns(doc: object, where: str, problems: _Problems) -> tuple[str, ...]:
    listed = [doc] if isinstance(doc, str) else doc
    if not isinstance(listed, list | tuple) or not all(isinstance(p, str) and p for p in listed):
        problems.add(where, f"must be a pattern or a list of them, not {_shown(doc)}")
        return ()
    for pattern in listed:
        if pattern.startswith("re:"):
            _regex(pattern[3:], where, problems)
    return tuple(listed)


def _numbering(doc: object, where: str, problems: _Problems) -> str:
    """A regular expression with one group, which is to match a number."""
    found = _regex(doc, where, problems) if isinstance(doc, str) else None
    if not isinstance(doc, str):
        problems.add(where, f"must be a regular expression, not {_shown(doc)}")
    elif found is not None and found.groups != 1:
        problems.add(where, rf"must have one group for the number, such as layers\.(\d+): {doc}")
    return str(doc)


def _regex(text: str, where: str, problems: _Problems) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error as error:
        problems.add(where, f"no regular expression ({error}): {_shown(text)}")
        return None


def _expression(doc: object, where: str, problems: _Problems) -> Expression:
    one = Expression("1")
    if type(doc) is not str and not (type(doc) is int and doc > 0):
        problems.add(where, f"must be a positive integer or arithmetic, not {_shown(doc)}")
        return one
    return problems.tried(where, lambda: Expression(str(doc)), one)


def _sizes(doc: object, where: str, problems: _Problems) -> tuple[tuple[str, int], ...]:
    if not isinstance(doc, Mapping) or not all(
        isinstance(name, str) and type(size) is int for name, size in doc.items()
    ):
        problems.add(where, f"must be names with integers, not {_shown(doc)}")
        return ()
    return tuple(sorted(doc.items()))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


# A file may say a lot in few lines, by aliases of aliases.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = _SHORT.maxlist = _SHORT.maxdict = 3
_SHORT.maxstring = _SHORT.maxother = 80


def _shown(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
