"""Arithmetic over named sizes, as rules write it: `num_attention_heads * head_dim`."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptkit.errors import RulesError
from ckptkit.model.box import MAX_COORDINATE

# It bounds the recursion, and the size of products.
_MAX_LENGTH = 200
_TEXT = re.compile(r"(\s*(\d{1,19}(?!\w)|[A-Za-z_]\w*\??|//|[-+*()]))+\s*", re.ASCII)
_GRAMMAR = "integers, names of sizes, + - * // and parentheses; a size ending in ? may be unknown"
# Python has no `?`: it is read as the end of a name that no size can have.
_OPTIONAL = "\u00f8"
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
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


_NESTED = ("text_config", "llm_config", "language_config")
_SYNONYMS = {
    "hidden_size": ("n_embd", "d_model", "n_embed", "dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "d_ff", "ffn_dim", "ffn_hidden_size"),
    "head_dim": ("d_kv",),
}


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
