"""Patterns of names, with * and ?, as people pick arrays and objects with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from ckptkit.errors import UsageError

NAMES_HINT = "patterns match whole names, or those inside of their group: `ckpt show STEP`"


def pattern_list(patterns: Iterable[str], keyword: str) -> tuple[str, ...]:
    """Patterns as a tuple; a text alone is refused, as it would be read letter by letter."""
    if isinstance(patterns, str):
        raise UsageError(
            f"{keyword} takes a tuple of patterns, not one text",
            value=patterns,
            hint=f"write {keyword}=({patterns!r},)",
        )
    return tuple(patterns)


def matches(patterns: Iterable[str], name: str, inner: str) -> bool:
    """Whether one of the patterns means this name, or the one inside of its group."""
    return any(fnmatchcase(name, p) or fnmatchcase(inner, p) for p in patterns)


def check_used(patterns: Iterable[str], names: Collection[tuple[str, str]], objection: str) -> None:
    """Refuse a pattern that means none of the names, given with those inside of their groups."""
    for pattern in patterns:
        if not any(matches((pattern,), name, inner) for name, inner in names):
            raise UsageError(objection, value=pattern, hint=NAMES_HINT)
