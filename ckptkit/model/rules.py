"""How the tensors of an architecture are cut: patterns of names, first match wins; and arithmetic
over the sizes of a model, which rules refer to.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model.box import MAX_COORDINATE
from ckptkit.model.document import in_short
from ckptkit.model.strategy import Placement, Replicate, Shard, parse_placement

Blocks: TypeAlias = "Expression | tuple[Expression, ...]"
# It bounds the recursion, and the size of products.
_MAX_LENGTH = 200
# Possessive: a name read as several would be tried in 2**letters ways.
_TEXT = re.compile(r"(\s*(\d{1,19}(?!\w)|[A-Za-z_]\w*+\??|//|[-+*()]))+\s*", re.ASCII)
_GRAMMAR = "integers, names of sizes, + - * // and parentheses; a size ending in ? may be unknown"
# Python has no `?`: it is read as the end of a name that no size can have.
_OPTIONAL = "\u00f8"
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_NESTED = ("text_config", "llm_config", "language_config")
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model", "n_embed", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
    "head_dim": ("d_kv",),
}


@dataclass(frozen=True, slots=True)
class Cut:
    """A placement whose numbers may be arithmetic over sizes; without a dim it replicates.

    Blocks that are one expression are that many equal ones.
    """

    dim: int | None = None
    blocks: Blocks | None = None
    unit: Expression | None = None

    @property
    def expressions(self) -> tuple[Expression, ...]:
        blocks = (self.blocks,) if isinstance(self.blocks, Expression) else self.blocks or ()
        return blocks if self.unit is None else (*blocks, self.unit)

    def placement(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Placement:
        """How it cuts a tensor of this shape."""
        if self.dim is None:
            return Replicate()
        missing = [name for each in self.expressions for name in each.missing(sizes)]
        if missing:
            raise missing_sizes(missing, str(self))
        if self.dim >= len(shape):
            raise LayoutError(f"there is no dim {self.dim} in a tensor of shape {list(shape)}")
        unit = 1 if self.unit is None else self.unit.value(sizes)
        blocks: tuple[int, ...] | None = None
        if isinstance(self.blocks, Expression):
            length, count = shape[self.dim], self.blocks.value(sizes)
            if length % count:
                raise LayoutError(f"a length of {length} has no {count} equal blocks")
            # Blocks of no length are none that a shard may have.
            blocks = (length // count,) * count if length else None
        elif self.blocks is not None:
            blocks = tuple(each.value(sizes) for each in self.blocks)
        return Shard(self.dim, blocks, unit)

    def __str__(self) -> str:
        if self.dim is None:
            return "replicate"
        blocks = self.blocks
        listed = f"[{', '.join(map(str, blocks))}]" if isinstance(blocks, tuple) else blocks
        said = "" if listed is None else f", blocks={listed}"
        unit = f", unit={self.unit}" if self.unit is not None else ""
        return f"shard({self.dim}{said}{unit})"


@dataclass(frozen=True, slots=True)
class Experts:
    """One tensor per expert: the group of a regular expression, found in the name, numbers them."""

    expert: str


@dataclass(frozen=True, slots=True)
class Rule:
    """How the tensors that one of the patterns matches are cut by the axes of each kind.

    `ndim` and `when` (sizes that must be known to have these values) narrow it further.
    """

    match: tuple[str, ...]
    tp: Cut | None = None
    ep: Cut | Experts | None = None
    ndim: int | None = None
    when: tuple[tuple[str, int], ...] = ()

    def fits(self, name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        if self.ndim is not None and self.ndim != len(shape):
            return False
        if any(sizes.get(size) != value for size, value in self.when):
            return False
        return any(fits(pattern, name) for pattern in self.match)

    def pattern(self, name: str) -> str:
        """The pattern that matches a name, for people."""
        return next((pattern for pattern in self.match if fits(pattern, name)), "")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Which tensors are layers, how these are split into stages, and where the others go: to the
    first stage, the last one, or every one.
    """

    layers: tuple[str, ...]
    split: Literal["balanced"] | tuple[int, ...] = "balanced"
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    every: tuple[str, ...] = ()

    def layer(self, name: str) -> tuple[int, int] | None:
        """The number of the pattern, and that of the layer, which a tensor belongs to."""
        for number, pattern in enumerate(self.layers):
            layer = number_in(name, pattern)
            if layer is not None:
                return number, layer
        return None


@dataclass(frozen=True, slots=True)
class Rules:
    """An ordered list of rules, the pipeline, and what happens to tensors that no rule matches."""

    name: str
    rules: tuple[Rule, ...]
    pipeline: Pipeline | None = None
    default: Literal["error", "replicate"] = "error"
    sizes: tuple[tuple[str, int], ...] = ()
    is_guess: bool = False
    """Whether they were detected by names, so that what the source tells of itself wins."""

    @classmethod
    def from_doc(cls, doc: object, *, where: str = "rules") -> Rules:
        """The rules of a document; a RulesError lists all that is wrong with it."""
        problems = _Problems()
        # A preset says by what names it is known; where rules are named, that is not asked.
        found = problems.fields(doc, where, ("rules", "pipeline", "default", "sizes", "detect"))
        found.pop("detect", None)
        if not found and not problems.found:
            problems.add(where, "is empty; it has at least `rules` or `pipeline`")
        listed = found.get("rules", [])
        if not isinstance(listed, list | tuple) or len(listed) > _MAX_RULES:
            problems.add("rules", f"must be a list, not {in_short(listed)}")
            listed = []
        rules = tuple(_rule(each, f"rules.{i}", problems) for i, each in enumerate(listed))
        pipeline = None
        if found.get("pipeline") is not None:
            pipeline = _pipeline(found["pipeline"], "pipeline", problems)
        default = found.get("default", "error")
        if default not in ("error", "replicate"):
            problems.add("default", f"must be error or replicate, not {in_short(default)}")
        sizes = _sizes(found.get("sizes", {}), "sizes", problems)
        if problems.found:
            count = len(problems.found)
            what = "not rules" if count == 1 else f"not rules, for {count} reasons"
            lines = "\n  ".join(problems.found[:50])
            raise RulesError(f"{what}:\n  {lines}", where=where, hint=_HINT)
        return cls(where, rules, pipeline, default, sizes)

    @property
    def known(self) -> dict[str, int]:
        return dict(self.sizes)

    def with_sizes(self, sizes: Mapping[str, int]) -> Rules:
        """The same rules, knowing more sizes; those that are given win."""
        return replace(self, sizes=tuple(sorted((self.known | dict(sizes)).items())))

    def find(self, name: str, shape: tuple[int, ...]) -> Rule | None:
        """The first rule for a tensor of this name (inside of its group) and shape."""
        known = self.known
        return next((rule for rule in self.rules if rule.fits(name, shape, known)), None)


def fits(pattern: str, name: str) -> bool:
    """Whether a glob, or a regular expression behind `re:`, fits the whole name."""
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).fullmatch(name) is not None
    return fnmatchcase(name, pattern)


def number_in(name: str, pattern: str) -> int | None:
    """The number, of a layer or of an expert, that the group of a regular expression finds."""
    match = _compiled(pattern).search(name)
    digits = match[1] if match else None
    return int(digits) if digits and re.fullmatch(r"[0-9]{1,9}", digits) else None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RulesError(f"no regular expression: {error}", value=pattern) from error


_MAX_RULES = 10_000
_CUTS = "write replicate, shard(0) or {shard: 0, blocks: [...], unit: n}"
_HINT = "schemas/RULES.md says what a rules file holds"


@dataclass(slots=True)
class _Problems:
    """What is wrong with a document, and where; reading goes on with what is left."""

    found: list[str] = field(default_factory=list)

    def add(self, where: str, what: str) -> None:
        self.found.append(f"{where}: {what}")

    def fields(self, doc: object, where: str, known: tuple[str, ...]) -> dict[str, Any]:
        """The document as a map of known keys; what else is there is a problem."""
        if not isinstance(doc, Mapping):
            self.add(where, f"must be a map, not {in_short(doc)}")
            return {}
        for key in doc:
            if key not in known:
                self.add(where, f"has an unknown key {in_short(key)}; known are {', '.join(known)}")
        return {key: doc[key] for key in known if key in doc}

    @contextmanager
    def noted(self, where: str) -> Iterator[None]:
        """What the block refuses is a problem, and ends the block."""
        try:
            yield
        except (LayoutError, RulesError) as error:
            self.add(where, str(error).replace("\nhint: ", "; "))


def _rule(doc: object, where: str, problems: _Problems) -> Rule:
    found = problems.fields(doc, where, ("match", "tp", "ep", "ndim", "when"))
    if isinstance(doc, Mapping) and "match" not in found:
        problems.add(where, "lacks match")
    if isinstance(doc, Mapping) and not {"tp", "ep"} & found.keys():
        problems.add(where, "says of neither tp nor ep what it does")
    match = _patterns(found.get("match", []), f"{where}.match", problems)
    tp = _cut(found["tp"], f"{where}.tp", problems) if "tp" in found else None
    ep: Cut | Experts | None = None
    if isinstance(found.get("ep"), Mapping) and "expert" in found["ep"]:
        said = problems.fields(found["ep"], f"{where}.ep", ("expert",))
        ep = Experts(_numbering(said["expert"], f"{where}.ep.expert", problems))
    elif "ep" in found:
        ep = _cut(found["ep"], f"{where}.ep", problems)
    ndim = found.get("ndim")
    if ndim is not None and not _is_count(ndim):
        problems.add(f"{where}.ndim", f"must be a number of dims, not {in_short(ndim)}")
    return Rule(match, tp, ep, ndim, _sizes(found.get("when", {}), f"{where}.when", problems))


def _cut(doc: object, where: str, problems: _Problems) -> Cut:
    if isinstance(doc, str):
        with problems.noted(where):
            placement = parse_placement(doc)
            if isinstance(placement, Shard):
                each = placement.blocks
                return Cut(
                    placement.dim,
                    None if each is None else tuple(Expression(str(block)) for block in each),
                    None if placement.unit == 1 else Expression(str(placement.unit)),
                )
            if not isinstance(placement, Replicate):
                raise LayoutError("a rule cuts or replicates", value=doc, hint=_CUTS)
        return Cut()
    if not isinstance(doc, Mapping):
        problems.add(where, f"no placement: {in_short(doc)}; {_CUTS}")
        return Cut()
    found = problems.fields(doc, where, ("shard", "blocks", "unit"))
    dim = found.get("shard")
    if not _is_count(dim):
        problems.add(f"{where}.shard", f"must be a dim, not {in_short(dim)}; {_CUTS}")
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
    return Cut(dim, read, None if unit is None else _expression(unit, f"{where}.unit", problems))


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
            problems.add(f"{where}.split", f"must be rising layer numbers, not {in_short(split)}")
    elif split != "balanced":
        problems.add(f"{where}.split", f"must be balanced or a list, not {in_short(split)}")
    first, last, every = (
        _patterns(found.get(key, []), f"{where}.{key}", problems)
        for key in ("first", "last", "every")
    )
    return Pipeline(patterns, split, first, last, every)


def _patterns(doc: object, where: str, problems: _Problems) -> tuple[str, ...]:
    listed = [doc] if isinstance(doc, str) else doc
    if not isinstance(listed, list | tuple) or not all(isinstance(p, str) and p for p in listed):
        problems.add(where, f"must be a pattern or a list of them, not {in_short(doc)}")
        return ()
    for pattern in listed:
        if pattern.startswith("re:"):
            _regex(pattern[3:], where, problems)
    return tuple(listed)


def _numbering(doc: object, where: str, problems: _Problems) -> str:
    """A regular expression with one group, which is to match a number."""
    if not isinstance(doc, str):
        problems.add(where, f"must be a regular expression, not {in_short(doc)}")
    elif (found := _regex(doc, where, problems)) is not None and found.groups != 1:
        problems.add(where, rf"must have one group for the number, such as layers\.(\d+): {doc}")
    return str(doc)


def _regex(text: str, where: str, problems: _Problems) -> re.Pattern[str] | None:
    try:
        return re.compile(text)
    except re.error as error:
        problems.add(where, f"no regular expression ({error}): {in_short(text)}")
        return None


def _expression(doc: object, where: str, problems: _Problems) -> Expression:
    if type(doc) is str or (type(doc) is int and doc > 0):
        with problems.noted(where):
            return Expression(str(doc))
    else:
        problems.add(where, f"must be a positive integer or arithmetic, not {in_short(doc)}")
    return Expression("1")


def _sizes(doc: object, where: str, problems: _Problems) -> tuple[tuple[str, int], ...]:
    if not isinstance(doc, Mapping) or not all(
        isinstance(name, str) and type(size) is int for name, size in doc.items()
    ):
        problems.add(where, f"must be names with integers, not {in_short(doc)}")
        return ()
    return tuple(sorted(doc.items()))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


# Arithmetic over named sizes, as rules write it: `num_attention_heads * head_dim`.


@dataclass(frozen=True, slots=True)
class Expression:
    """An integer, or a text that gives one once the sizes it names are known."""

    text: str

    def __post_init__(self) -> None:
        _parsed(self.text)

    def __str__(self) -> str:
        return self.text

    def missing(self, sizes: Mapping[str, int]) -> list[str]:
        """The sizes that it needs and nobody gave."""
        names = _names(_parsed(self.text))
        return [name for name in names if not name.endswith(_OPTIONAL) and name not in sizes]

    def unknown(self, sizes: Mapping[str, int]) -> list[str]:
        """The sizes that it would rather know, and does not."""
        names = [name for name in _names(_parsed(self.text)) if name.endswith(_OPTIONAL)]
        return [name[:-1] for name in names if name[:-1] not in sizes]

    def value(self, sizes: Mapping[str, int]) -> int:
        """What it comes to; 1 where a size that may be unknown is."""
        missing = self.missing(sizes)
        if missing:
            raise missing_sizes(missing, self.text)
        if self.unknown(sizes):
            return 1
        try:
            found = _evaluated(_parsed(self.text), sizes)
        except ZeroDivisionError as error:
            raise RulesError("divides by zero", value=self.text) from error
        if not 1 <= found <= MAX_COORDINATE:
            raise RulesError(f"comes to {found}, which is no size", value=self.text)
        return found


def missing_sizes(names: list[str], text: str) -> RulesError:
    """What to say when a rule needs sizes that nobody gave."""
    listed = ", ".join(dict.fromkeys(names))
    return RulesError(
        f"needs to know {listed}",
        value=text,
        hint=f"pass --config config.json, or --set {names[0]}=N (sizes={{...}} in Python)",
    )


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    """Python's own reading of the text, once it holds nothing but what the grammar has."""
    if len(text) > _MAX_LENGTH:
        raise RulesError(f"longer than {_MAX_LENGTH} characters", value=text)
    refusal = RulesError("not a number, nor arithmetic over sizes", value=text, hint=_GRAMMAR)
    if not _TEXT.fullmatch(text):
        raise refusal
    try:
        tree = ast.parse(" ".join(text.replace("?", _OPTIONAL).split()), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise refusal from error
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            continue
        if not isinstance(node, ast.Constant | ast.Name | ast.operator | ast.expr_context):
            raise refusal
    return tree


def _names(tree: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]


def _evaluated(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name.removesuffix(_OPTIONAL)]
        case ast.BinOp(left=left, op=sign, right=right):
            return _OPERATORS[type(sign)](_evaluated(left, sizes), _evaluated(right, sizes))
    raise RulesError("not arithmetic", value=ast.unparse(tree))


def sizes_of(config: Mapping[str, Any]) -> dict[str, int]:
    """The integers of a Hugging Face config, those of a nested text model first, and what follows
    from them: other names, `head_dim`, and `num_key_value_heads`.
    """
    found: dict[str, int] = {}
    for part in (*(config.get(key) for key in _NESTED), config):
        if isinstance(part, Mapping):
            integers = {str(key): value for key, value in part.items() if type(value) is int}
            found = {**integers, **found}
    for name, others in _SYNONYMS.items():
        known = next((found[other] for other in others if other in found), None)
        if known is not None:
            found.setdefault(name, known)
    heads, hidden = found.get("num_attention_heads"), found.get("hidden_size")
    # Falcon and others say so apart, and give a number of heads that then means nothing.
    is_shared = config.get("multi_query") is True
    if heads and is_shared and config.get("new_decoder_architecture") is not True:
        found["num_key_value_heads"] = 1
    elif heads:
        found.setdefault("num_key_value_heads", heads)
    if heads and hidden and hidden % heads == 0:
        found.setdefault("head_dim", hidden // heads)
    return found
