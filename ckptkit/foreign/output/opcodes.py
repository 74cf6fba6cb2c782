"""Values as pickles have them, written by hand: what torch's own loader of weights allows."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ckptkit.errors import UnsupportedTypeError

BEGIN, END = b"\x80\x02", b"."
NONE, TRUE, FALSE = b"N", b"\x88", b"\x89"

Keys: TypeAlias = tuple[str | int, ...]
"""Keys of nested dictionaries, and numbers of lists among them."""


def flat(path: Keys) -> str:
    """What torch.distributed.checkpoint calls it."""
    return ".".join(map(str, path))


def named(module: str, name: str) -> bytes:
    """A class or a function."""
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def integer(value: int) -> bytes:
    """One that is not negative."""
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    return b"\x8a\x09" + value.to_bytes(9, "little")


def tupled(items: Iterable[bytes]) -> bytes:
    return b"(" + b"".join(items) + b"t"


def mapped(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A dictionary."""
    return b"}(" + b"".join(key + value for key, value in items) + b"u"


def called(function: bytes, arguments: Sequence[bytes]) -> bytes:
    return function + tupled(arguments) + b"R"


def instance(of: bytes, state: bytes | Mapping[str, bytes]) -> bytes:
    """An object of a class, whose state is a value or its attributes."""
    if isinstance(state, Mapping):
        state = mapped((text(name), value) for name, value in state.items())
    return of + b")\x81" + state + b"b"


def plain(value: Any, where: str = "") -> bytes:
    """A plain value; UnsupportedTypeError for any other."""
    if value is None or type(value) is bool:
        return NONE if value is None else TRUE if value else FALSE
    if type(value) is int:
        size = value.bit_length() // 8 + 1
        return b"\x8a" + size.to_bytes(1, "little") + value.to_bytes(size, "little", signed=True)
    if type(value) is float:
        return b"G" + struct.pack(">d", value)
    if type(value) is str:
        return text(value)
    if type(value) in (list, tuple):
        items = [plain(item, where) for item in value]
        return tupled(items) if type(value) is tuple else _listed(items)
    if type(value) is dict:
        return mapped((plain(k, where), plain(item, where)) for k, item in value.items())
    raise UnsupportedTypeError(
        "other programs have no such value",
        where=where,
        value=type(value).__name__,
        hint="leave the optimizer out",
    )


def nested(leaves: Iterable[tuple[Keys, bytes]]) -> bytes:
    """Dictionaries and lists of values, each at its path."""
    tree: dict[Any, Any] = {}
    for path, data in leaves:
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = data
    return _nested(tree)


def _nested(node: Any) -> bytes:
    if isinstance(node, bytes):
        return node
    if node and all(type(key) is int for key in node):
        return _listed(_nested(node[key]) for key in sorted(node))
    return mapped((text(key), _nested(inner)) for key, inner in node.items())


def _listed(items: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"
