"""Names of arrays: paths in the Zarr hierarchy, with exactly one spelling each (FORMAT section
2).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TypeVar
from urllib.parse import quote, unquote_to_bytes

from ckptkit.errors import FormatError, InvalidNameError, UsageError

T = TypeVar("T")

MAX_NODE_BYTES = 240
MAX_NAME_BYTES = 1024
MAX_NODES = 32

# A path of nodes that need no escape, and of which none means something else: nearly all names.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9\-][A-Za-z0-9_.\-]*(?:/[A-Za-z0-9\-][A-Za-z0-9_.\-]*)*")
_PLAIN_PATHS = re.compile(rf"(?:{_PLAIN_PATH.pattern}\n)*+")
_ESCAPED = re.compile(r"(?:[A-Za-z0-9_.\-]|%[0-9A-F]{2})+")


def escape(node: str) -> str:
    """One tensor or group name, as the format spells it in a path."""
    if "/" not in node and _is_plain_path(node):
        return node
    if not node or "\0" in node:
        raise InvalidNameError(
            "an empty name, or one with a NUL, cannot be stored", value=node, hint="rename it"
        )
    try:
        text = quote(node, safe="").replace("~", "%7E")
    except UnicodeEncodeError as error:
        raise InvalidNameError("the name is not valid Unicode", value=node) from error
    # What is left are the names that mean something to a file system, to Zarr, or to a pack.
    if not text.strip("."):
        text = text.replace(".", "%2E")
    elif text.startswith(("__", ".ckptkit")):
        text = f"%{ord(text[0]):02X}{text[1:]}"
    elif text == "zarr.json":
        text = "zarr%2Ejson"
    if len(text) > MAX_NODE_BYTES:
        raise InvalidNameError(
            f"the name is {len(text)} bytes long in the format, {MAX_NODE_BYTES} are allowed",
            value=node,
            hint="file systems allow 255 bytes in a file name; shorten the module names",
        )
    return text


def unescape(node: str) -> str:
    """The tensor's own name for a node of a path."""
    if "%" not in node:
        return node
    try:
        return unquote_to_bytes(node).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("the name does not decode as UTF-8", value=node) from error


def join(*nodes: str) -> str:
    """The path of unescaped names: `join("model", "a/b")` is `model/a%2Fb`."""
    path = "/".join(nodes)
    if _is_plain_path(path) and path.count("/") == len(nodes) - 1:
        return path
    return checked_path("/".join(escape(node) for node in nodes))


def split(name: str) -> tuple[str, ...]:
    """The unescaped names along a path; the inverse of `join`."""
    nodes = name.split("/")
    return tuple(map(unescape, nodes)) if "%" in name else tuple(nodes)


def inner_name(name: str, role: str) -> str:
    """The unescaped name of an array inside of its group: of optimizer state, its parameter's."""
    nodes = split(name)
    if role == "optimizer" and len(nodes) > 2:
        return "/".join(nodes[1:-1])
    return "/".join(nodes[1:] or nodes)


def in_group(group: str, by_name: Mapping[str, T]) -> dict[str, T]:
    """What lies below a group, by the paths from there."""
    start = f"{group}/"
    return {n.removeprefix(start): value for n, value in by_name.items() if n.startswith(start)}


def ancestors(name: str) -> tuple[str, ...]:
    """The groups above an array, the root (the empty name) first."""
    return _with_ancestors(name.rpartition("/")[0])


@lru_cache(maxsize=65536)
def _with_ancestors(group: str) -> tuple[str, ...]:
    return (*ancestors(group), group) if group else ("",)


def groups_of(names: Iterable[str]) -> set[str]:
    """All groups above some arrays."""
    inner = {name.rpartition("/")[0] for name in names}
    return {above for group in inner for above in _with_ancestors(group)}


def checked_path(name: str, *, where: str = "") -> str:
    """The name itself if it is spelled as the format demands, else an InvalidNameError."""
    problem = _problem(name)
    if problem:
        raise InvalidNameError(
            problem,
            where=where,
            value=name,
            hint="ckptkit.format.names.join() builds a name from any tensor names",
        )
    return name


def name_from_file(value: object, where: str) -> str:
    """A name read from a document: hostile until it is proven to be canonical."""
    if not isinstance(value, str):
        raise FormatError("a name has to be text", where=where, value=value)
    problem = _problem(value)
    if problem:
        raise FormatError(problem, where=where, value=value)
    return value


def _problem(name: str) -> str:
    if _is_plain_path(name):
        return ""
    if len(name) > MAX_NAME_BYTES:
        return f"the name is longer than {MAX_NAME_BYTES} bytes"
    nodes = name.split("/")
    if len(nodes) > MAX_NODES:
        return f"the name has more than {MAX_NODES} levels"
    for node in nodes:
        if not _is_canonical(node):
            return f"{node[:80]!r} is not a name as the format spells it"
    return ""


def _is_plain_path(path: str) -> bool:
    """Whether all nodes of a short path are their own names."""
    is_safe = _PLAIN_PATH.fullmatch(path) is not None and "zarr.json" not in path
    return is_safe and len(path) <= MAX_NODE_BYTES and path.count("/") < MAX_NODES


def are_plain(names: Sequence[str]) -> bool:
    """Whether the nodes of all short paths are their own names."""
    if not names:
        return True
    if max(map(len, names)) > MAX_NODE_BYTES or max(n.count("/") for n in names) >= MAX_NODES:
        return False
    together = "".join(f"{name}\n" for name in names)
    if "zarr.json" in together or together.count("\n") > len(names):
        return False
    return _PLAIN_PATHS.fullmatch(together) is not None


@lru_cache(maxsize=65536)
def _is_canonical(node: str) -> bool:
    if _is_plain_path(node):
        return True
    if len(node) > MAX_NODE_BYTES:
        return False
    if not _ESCAPED.fullmatch(node):
        return False
    try:
        return escape(unescape(node)) == node
    except (InvalidNameError, FormatError):
        return False


MODEL = "model"
OPTIMIZER = "optimizer"
BY_ORDER = "parameters by the order of the model"
"""What `details["optimizer"]` says where an optimizer only counted its parameters."""
# What a training job says of arrays again, under some strategies only: `alike/<name>`.
ALIKE = "alike"
# How the arrays `<name>%2F<part>` make the tensor that a training job had at `<name>`:
# `wrapped/<name>`.
WRAPPED = "wrapped"
# What only some ranks have in a nested dictionary: `own/<group>/<path>`.
OWN = "own"
# The one key of a map that stands for the array of that name.
REFERENCE = "ckptkit.array"
# The one key of a map around a value of one share of the data: [which, of how many or None, value].
DATA_RANK = "ckptkit.data_rank"

DIGEST_ALGORITHM = "xxh3-128"

NAMES_HINT = "patterns match whole names, or those inside of their group: `ckpt show STEP`"


def pattern_list(patterns: Iterable[str], keyword: str) -> tuple[str, ...]:
    """Patterns as a tuple; a text alone is refused, as it would be read letter by letter."""
    if isinstance(patterns, str):
        raise UsageError(
            f"{keyword} takes a tuple of patterns, not one text",
            value=patterns,
            hint=f"write {keyword}=({patterns!r},)",
        )
    said: object = patterns
    given: tuple[object, ...] = tuple(said) if isinstance(said, Iterable) else (said,)
    found = tuple(pattern for pattern in given if isinstance(pattern, str))
    if found != given:
        raise UsageError(f"{keyword} takes patterns of names, which are text", value=patterns)
    return found


def check_named(values: object, keyword: str) -> None:
    """Refuse what has no names, or others than text: they would come back as text."""
    if not isinstance(values, Mapping):
        hint = f"write {keyword}={{name: …}}"
        raise UsageError(f"{keyword} takes a dictionary", value=type(values).__name__, hint=hint)
    for name in values:
        if not isinstance(name, str):
            raise UsageError(f"the names in {keyword} are text", value=name)


def matches(patterns: Iterable[str], name: str, inner: str) -> bool:
    """Whether one of the patterns means this name, or the one inside of its group."""
    # They have * and ?; a bracket is itself.
    globs = [pattern.replace("[", "[[]") for pattern in patterns]
    return any(fnmatchcase(name, glob) or fnmatchcase(inner, glob) for glob in globs)


def check_used(patterns: Iterable[str], names: Collection[tuple[str, str]], objection: str) -> None:
    """Refuse a pattern that means none of the names, given with those inside of their groups."""
    for pattern in patterns:
        if not any(matches((pattern,), name, inner) for name, inner in names):
            raise UsageError(objection, value=pattern, hint=NAMES_HINT)
