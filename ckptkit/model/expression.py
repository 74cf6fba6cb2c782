"""Arithmetic over named sizes, as rules write it: `num_attention_heads * head_dim`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ckptkit.errors import RulesError
from ckptkit.model.box import MAX_COORDINATE

# Recursion and the size of products are bounded by the length of the text.
_MAX_LENGTH = 200
_TOKEN = re.compile(r"\s*(?:(\d{1,19})|([A-Za-z_]\w*)(\??)|(//|[-+*()]))", re.ASCII)
_GRAMMAR = "integers, names of sizes, + - * // and parentheses; a size ending in ? may be unknown"

_Name: TypeAlias = tuple[str, bool]
_Tree: TypeAlias = "int | _Name | tuple[str, _Tree, _Tree]"
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
}


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
        return [
            name
            for name, optional in _names(_parsed(self.text))
            if not optional and name not in sizes
        ]

    def unknown(self, sizes: Mapping[str, int]) -> list[str]:
        """The sizes that it would rather know, and does not."""
        return [
            name for name, optional in _names(_parsed(self.text)) if optional and name not in sizes
        ]

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
def _parsed(text: str) -> _Tree:
    if len(text) > _MAX_LENGTH:
        raise RulesError(f"longer than {_MAX_LENGTH} characters", value=text)
    tokens = list(_tokens(text))
    tree, rest = _sum(tokens, 0, text)
    if rest != len(tokens):
        raise _refusal(text)
    return tree


def _tokens(text: str) -> Iterator[_Tree | str]:
    text, place = text.rstrip(), 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise _refusal(text)
        number, name, optional, sign = match.groups()
        yield int(number) if number else (name, bool(optional)) if name else sign
        place = match.end()


def _sum(tokens: list[_Tree | str], at: int, text: str) -> tuple[_Tree, int]:
    tree, at = _product(tokens, at, text)
    while at < len(tokens) and tokens[at] in ("+", "-"):
        sign = str(tokens[at])
        right, at = _product(tokens, at + 1, text)
        tree = (sign, tree, right)
    return tree, at


def _product(tokens: list[_Tree | str], at: int, text: str) -> tuple[_Tree, int]:
    tree, at = _atom(tokens, at, text)
    while at < len(tokens) and tokens[at] in ("*", "//"):
        sign = str(tokens[at])
        right, at = _atom(tokens, at + 1, text)
        tree = (sign, tree, right)
    return tree, at


def _atom(tokens: list[_Tree | str], at: int, text: str) -> tuple[_Tree, int]:
    item = tokens[at] if at < len(tokens) else ")"
    if item == "(":
        tree, at = _sum(tokens, at + 1, text)
        if at < len(tokens) and tokens[at] == ")":
            return tree, at + 1
        raise _refusal(text)
    if isinstance(item, str):
        raise _refusal(text)
    return item, at + 1


def _evaluated(tree: _Tree, sizes: Mapping[str, int]) -> int:
    if isinstance(tree, int):
        return tree
    if len(tree) == 2:
        return sizes[tree[0]]
    sign, left, right = tree
    return _OPERATORS[sign](_evaluated(left, sizes), _evaluated(right, sizes))


def _names(tree: _Tree) -> Iterator[_Name]:
    if isinstance(tree, int):
        return
    if len(tree) == 2:
        yield tree
        return
    yield from _names(tree[1])
    yield from _names(tree[2])


def _refusal(text: str) -> RulesError:
    return RulesError("not a number, nor arithmetic over sizes", value=text, hint=_GRAMMAR)
