"""Documents that nobody wrote: real ones, changed in a few places, with the right checksum."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np

from ckptkit.format.manifest import Manifest
from ckptkit.model import DType
from tests.format.samples import plain, sealed

Doc = dict[Any, Any]

NUMBERS = (0, 1, -1, 2, 255, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
EXTENTS = (0, 0, 1, 2, 3, 2**20, 2**31, 2**40, 2**53, 2**61, 2**62)
NAMES = ("", ".", "..", "../x", "/x", "a/b", "\0", "é", "zarr.json", "c/0", "%2e%2E", "__x")
DTYPES = ("bool", "int8", "uint64", "float64", "bfloat16", "complex_float16", "float8_e8m0fnu")


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a document."""
    if above:
        yield above
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, item in items:
        yield from paths(item, (*above, key))


def mutated(value: Any, rng: random.Random) -> Any:
    """Another value in the place of this one."""
    if rng.random() < 0.08:
        return rng.choice(
            [None, True, 0, -1, 0.5, "x", b"x", [], {}, [[]], msgpack.ExtType(9, b"")]
        )
    match value:
        case bool():
            return not value
        case int():
            largest = 2**64 - 1  # that msgpack writes
            near = [min(value + 1, largest), max(0, value - 1), min(value * 2, largest)]
            return rng.choice([*near, *NUMBERS])
        case float():
            return rng.choice([float("nan"), float("inf"), -0.0, 1e308, -1.0, 2**63])
        case str():
            return rng.choice([*NAMES, *DTYPES, value + "/x", value[:-1], value.upper()])
        case bytes():
            return mutated_bytes(value, rng)
        case list():
            return mutated_list(list(value), rng)
        case dict():
            return mutated_map(dict(value), rng)
        case msgpack.ExtType():
            return mutated_extension(value, rng)
    return rng.choice([0, "x", [], leaf(rng)])


def mutated_bytes(value: bytes, rng: random.Random) -> bytes:
    way = rng.randrange(5)
    if way == 0 or not value:
        return value[: rng.randrange(len(value) + 1)]
    if way == 1:
        return value + value[: rng.choice([1, 4, 8])]
    size = rng.choice([4, 8])
    numbers = [value[i : i + size] for i in range(0, len(value), size)]
    if way == 2:
        rng.shuffle(numbers)
    elif way == 3:
        numbers[rng.randrange(len(numbers))] = rng.choice(numbers)
    else:
        other = rng.choice(NUMBERS) % (1 << 8 * size)
        numbers[rng.randrange(len(numbers))] = other.to_bytes(size, "little")
    return b"".join(numbers)


def mutated_list(value: list[Any], rng: random.Random) -> list[Any]:
    if not value:
        return [rng.choice([0, "x", {}, [], None])]
    at, way = rng.randrange(len(value)), rng.randrange(6)
    if way == 0:
        del value[at]
    elif way == 1:
        value.insert(at, value[rng.randrange(len(value))])
    elif way == 2:
        rng.shuffle(value)
    elif way == 3:
        return []
    elif way == 4:
        return value * rng.choice([2, 50, 1000])
    else:
        value.append(mutated(value[at], rng))
    return value


def mutated_map(value: Doc, rng: random.Random) -> Doc:
    if not value:
        return {"x": 1}
    key, way = rng.choice(list(value)), rng.randrange(5)
    if way == 0:
        del value[key]
    elif way == 1:
        value[rng.choice(["x", "of", "ranks", "alias_of", "unit", "blocks", 5])] = leaf(rng)
    elif way == 2:
        items = list(value.items())
        rng.shuffle(items)
        return dict(items)
    elif way == 3:
        value[str(key) + "x"] = value.pop(key)
    else:
        value[key] = mutated(value[key], rng)
    return value


def mutated_extension(value: msgpack.ExtType, rng: random.Random) -> msgpack.ExtType:
    if rng.random() < 0.2:
        return msgpack.ExtType(rng.choice([1, 2, 3, 4, 5]), value.data)
    try:
        inner = msgpack.unpackb(value.data, strict_map_key=False)
    except Exception:  # noqa: BLE001 — not every payload is msgpack
        return msgpack.ExtType(value.code, mutated_bytes(value.data, rng))
    return msgpack.ExtType(value.code, msgpack.packb(mutated(inner, rng)))


def leaf(rng: random.Random, depth: int = 0) -> Any:
    """Any value of an object, arrays without elements and huge numbers above all."""
    way = rng.randrange(9 if depth < 3 else 5)
    if way == 0:
        return rng.choice([None, True, 1, 2.5, float("nan"), "text", b"bytes", -(2**63), 2**64 - 1])
    if way == 1:
        number = rng.choice([2**64, -(2**70), 10**400, 10**5000])
        return msgpack.ExtType(2, number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True))
    if way == 2:
        name = rng.choice(DTYPES)
        data = bytes(DType.of(name).itemsize)
        return msgpack.ExtType(4, msgpack.packb([name, data]))
    if way in (3, 4):
        shape = [rng.choice(EXTENTS) for _ in range(rng.randrange(4))]
        name = rng.choice(DTYPES)
        size = DType.of(name).itemsize * int(np.prod(shape, dtype=object))
        return msgpack.ExtType(3, msgpack.packb([name, shape, bytes(size if size < 999 else 0)]))
    items = [leaf(rng, depth + 1) for _ in range(rng.randrange(3))]
    if way == 5:
        return msgpack.ExtType(1, msgpack.packb(items))
    if way == 6:
        return {rng.choice(["a", "ckptkit.array", 1]): item for item in items}
    return items


def with_empty_array(doc: Doc, counts: list[int], rng: random.Random) -> None:
    """An array without elements in the place of one, and its chunks gone; all else fits."""
    numbers = [i for i, entry in enumerate(doc["arrays"]) if "shape" in entry]
    which = rng.randrange(len(numbers))
    entry = doc["arrays"][numbers[which]]
    shape = [rng.choice(EXTENTS) for _ in range(rng.randrange(1, 5))]
    shape[rng.randrange(len(shape))] = 0
    entry["shape"], entry["dtype"] = shape, rng.choice(DTYPES)
    kinds = [
        [1] * len(shape),
        [max(1, n) for n in shape],
        [rng.choice(EXTENTS) or 1 for _ in shape],
    ]
    entry["grid"] = {"kind": "regular", "chunk_shape": rng.choice(kinds)}
    if rng.random() < 0.2:
        edges = [[n // 2] if n >= 2 else [] for n in shape]
        entry["grid"] = {"kind": "rectilinear", "edges": edges}
    first = sum(counts[:which])
    for name, size in (("pack", 4), ("offset", 8), ("length", 8), ("crc32", 4)):
        data = doc["chunks"][name]
        doc["chunks"][name] = data[: first * size] + data[(first + counts[which]) * size :]
    doc["chunks"]["count"] -= counts[which]


def hostile(data: bytes, rng: random.Random) -> bytes:
    """A document like this one, changed in a few places, with the right checksum."""
    doc = plain(data)
    if doc["format"] == "ckptkit-manifest" and rng.random() < 0.4:
        counts = np.diff(Manifest.from_bytes(data, "base").starts).tolist()
        with_empty_array(doc, counts, rng)
        if rng.random() < 0.5:
            return sealed(doc)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change(doc, rng)
    return sealed(doc)


def change(doc: Doc, rng: random.Random) -> None:
    if doc.get("objects") and isinstance(doc["objects"], list) and rng.random() < 0.3:
        item = rng.choice(doc["objects"])
        if isinstance(item, dict) and "value" in item:
            if isinstance(item["value"], list) and item["value"] and rng.random() < 0.7:
                item["value"] = [leaf(rng) for _ in item["value"]]
            else:
                item["value"] = leaf(rng)
            if rng.random() < 0.3:
                item["semantics"] = rng.choice(["replicated", "per_rank", "sum", "split"])
            return
    found = list(
        paths({key: value for key, value in doc.items() if key not in ("format", "version")})
    )
    *above, last = rng.choice(found)
    place: Any = doc
    for key in above:
        place = place[key]
    place[last] = mutated(place[last], rng)
