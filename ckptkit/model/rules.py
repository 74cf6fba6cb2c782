"""How the tensors of an architecture are cut: patterns of names, first match wins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, TypeAlias

from ckptkit.errors import LayoutError, RulesError
from ckptkit.model.expression import Expression, missing_sizes
from ckptkit.model.placement import Placement, Replicate, Shard

Blocks: TypeAlias = Expression | tuple[Expression, ...]


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
        """All numbers that are written in it."""
        blocks = (self.blocks,) if isinstance(self.blocks, Expression) else self.blocks or ()
        return blocks if self.unit is None else (*blocks, self.unit)

    def unknown(self, sizes: Mapping[str, int]) -> list[str]:
        """The sizes it can do without, but would rather know."""
        return [name for each in self.expressions for name in each.unknown(sizes)]

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
        return Shard(self.dim, self._blocks(shape[self.dim], sizes), unit)

    def _blocks(self, length: int, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
        if self.blocks is None:
            return None
        if not isinstance(self.blocks, Expression):
            return tuple(each.value(sizes) for each in self.blocks)
        count = self.blocks.value(sizes)
        if length % count:
            raise LayoutError(f"a length of {length} has no {count} equal blocks")
        return (length // count,) * count if length else None

    def __str__(self) -> str:
        if self.dim is None:
            return "replicate"
        blocks = f", blocks={_written(self.blocks)}" if self.blocks is not None else ""
        unit = f", unit={self.unit}" if self.unit is not None else ""
        return f"shard({self.dim}{blocks}{unit})"


@dataclass(frozen=True, slots=True)
class Experts:
    """One tensor per expert: the group of a regular expression, found in the name, numbers them."""

    expert: str

    def number(self, name: str) -> int | None:
        """The number of the expert that a tensor belongs to."""
        return _number(self.expert, name)


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

    def matches(self, name: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> bool:
        """Whether it applies to a tensor."""
        if self.ndim is not None and self.ndim != len(shape):
            return False
        if any(sizes.get(size) != value for size, value in self.when):
            return False
        return any(matches(pattern, name) for pattern in self.match)

    def pattern(self, name: str) -> str:
        """The pattern that matches a name, for people."""
        return next((pattern for pattern in self.match if matches(pattern, name)), "")


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
            layer = _number(pattern, name)
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
        # There, because a document is made of the values that are defined here.
        from ckptkit.model.rules_doc import rules_from  # noqa: PLC0415

        return rules_from(doc, where)

    @property
    def known(self) -> dict[str, int]:
        """The sizes, by name."""
        return dict(self.sizes)

    def with_sizes(self, sizes: Mapping[str, int]) -> Rules:
        """The same rules, knowing more sizes; those that are given win."""
        return replace(self, sizes=tuple(sorted((self.known | dict(sizes)).items())))

    def find(self, name: str, shape: tuple[int, ...]) -> Rule | None:
        """The first rule for a tensor of this name (inside of its group) and shape."""
        known = self.known
        return next((rule for rule in self.rules if rule.matches(name, shape, known)), None)


def matches(pattern: str, name: str) -> bool:
    """Whether a glob, or a regular expression behind `re:`, matches the whole name."""
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).fullmatch(name) is not None
    return fnmatchcase(name, pattern)


def _number(pattern: str, name: str) -> int | None:
    match = _compiled(pattern).search(name)
    digits = match[1] if match else None
    return int(digits) if digits and re.fullmatch(r"[0-9]{1,9}", digits) else None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RulesError(f"no regular expression: {error}", value=pattern) from error


def _written(blocks: Blocks | None) -> str:
    if isinstance(blocks, tuple):
        return f"[{', '.join(map(str, blocks))}]"
    return str(blocks)
