"""The notation of schemas/conformance/README.md, to msgpack and back."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np

HEADS: dict[type, tuple[int, int, int]] = {list: (0x90, 0xDC, 0xDD), dict: (0x80, 0xDE, 0xDF)}


def packed(value: Any) -> bytes:
    """A value of the notation as msgpack."""
    if isinstance(value, list):
        return _head(list, len(value)) + b"".join(map(packed, value))
    if not isinstance(value, dict):
        return bytes(msgpack.packb(value))
    if len(value) == 1 and next(iter(value)).startswith("$"):
        return _special(*next(iter(value.items())))
    return _map(list(value.items()))


def _special(tag: str, body: Any) -> bytes:
    match tag:
        case "$raw":
            return bytes.fromhex(body)
        case "$hex":
            return bytes(msgpack.packb(bytes.fromhex(body)))
        case "$u32" | "$u64":
            return bytes(msgpack.packb(np.array(body, f"<u{int(tag[2:]) // 8}").tobytes()))
        case "$float":
            return bytes(msgpack.packb(float(body)))
        case "$map":
            return _map(body)
        case "$repeat":
            text: str = body[0]
            return packed(text * body[1])
        case "$nested":
            return bytes([0x91] * body + [0xC0])
        case "$ext":
            code, payload = body
            raw = isinstance(payload, dict) and "$hex" in payload
            data = bytes.fromhex(payload["$hex"]) if raw else packed(payload)
            return bytes(msgpack.packb(msgpack.ExtType(code, data)))
    raise ValueError(f"no such notation: {tag}")


def _map(pairs: list[Any]) -> bytes:
    return _head(dict, len(pairs)) + b"".join(packed(k) + packed(v) for k, v in pairs)


def _head(kind: type, length: int) -> bytes:
    fix, short, long = HEADS[kind]
    if length < 16:
        return bytes([fix | length])
    if length < 1 << 16:
        return bytes([short]) + length.to_bytes(2, "big")
    return bytes([long]) + length.to_bytes(4, "big")


def plain_json(value: Any) -> Any:
    """What msgpack decoded, extension types left alone, as the JSON that the schemas are for."""
    match value:
        case msgpack.ExtType():
            return {"$ext": [value.code, {"$hex": value.data.hex()}]}
        case bytes():
            return {"$hex": value.hex()}
        case list():
            return [plain_json(item) for item in value]
        case dict():
            if all(isinstance(key, str) for key in value):
                return {key: plain_json(item) for key, item in value.items()}
            return {"$map": [[plain_json(k), plain_json(v)] for k, v in value.items()]}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
    return value
