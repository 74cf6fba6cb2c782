"""Values as pickles have them, written by hand: what torch's own loader of weights allows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

BEGIN, END = b"\x80\x02", b"."
FALSE = b"\x89"


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
