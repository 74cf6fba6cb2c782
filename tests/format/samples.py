"""Small documents, and the ways to change a field of them and to put the checksum right."""

from __future__ import annotations

import copy
import zlib
from typing import Any

import msgpack
import numpy as np

from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import Alias, ArrayInfo, ArrayKind
from ckptkit.format.manifest import Manifest, PackInfo, Record, SaveInfo
from ckptkit.format.objects import ObjectInfo
from ckptkit.format.pack import Entries, Entry
from ckptkit.model import DType, Grid, Replicate, Shard, Strategy

KINDS = {"manifest": "ckptkit-manifest", "record": "ckptkit-rank"}
ABSENT: Any = object()

SAVE = SaveInfo(
    save_id="20261121T101500Z-0123456789ab",
    step=1000,
    time=1795256100.25,
    writer="ckptkit 0.1.0",
    world_size=2,
    strategy=Strategy.parse("fsdp:2"),
    details={"precision": "bf16", "stages": (1, 2), "seed": 2**70},
)
ARRAYS = (
    ArrayInfo(
        "model/a",
        ArrayKind((4, 6), DType.of("float32"), Grid.regular((4, 6), (2, 4)), "param", (Shard(0),)),
    ),
    ArrayInfo(
        "model/b",
        ArrayKind(
            (5,), DType.of("bfloat16"), Grid.rectilinear((5,), ((1, 3),)), "buffer", (Replicate(),)
        ),
    ),
    ArrayInfo(
        "optimizer/a/step",
        ArrayKind((), DType.of("int64"), Grid.regular((), ()), "optimizer", (Replicate(),)),
        "model/a",
    ),
)
ALIASES = (Alias("model/c", "model/b"),)
LENGTHS = np.array([32, 32, 32, 32, 2, 4, 4, 8], np.uint64)


def manifest() -> Manifest:
    """Eight chunks of three arrays in two packs."""
    count = len(LENGTHS)
    return Manifest(
        save=SAVE,
        packs=(
            PackInfo("rank-00000.zip", 4096, (2048, 700)),
            PackInfo("rank-00001.zip", 2048, (1024, 500)),
            PackInfo("groups.zip", 300, None),
        ),
        table=ArrayTable.of(ARRAYS, ALIASES),
        pack=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.uint32),
        offset=np.arange(count, dtype=np.uint64) * 64 + 64,
        length=LENGTHS,
        crc32=np.arange(count, dtype=np.uint32) + 2**31,
        objects=(
            ObjectInfo("lr", "replicated", 0.1),
            ObjectInfo("rng", "per_rank", [b"\0\1", b"\2\3"]),
            ObjectInfo("tokens", "sum", [3, 4]),
        ),
    )


def record() -> Record:
    """What rank 0 wrote: four of the chunks."""
    rows = np.array([0, 1, 4, 5])
    return Record(
        save=SAVE,
        rank=0,
        table=ArrayTable.of(ARRAYS, ALIASES),
        documents=Entries.of(
            [Entry("zarr.json", 64, 50, 1), Entry("model/a/zarr.json", 192, 300, 2**32 - 1)]
        ),
        array=np.array([0, 0, 1, 1], np.uint32),
        chunk=np.array([0, 1, 0, 1], np.uint64),
        offset=rows.astype(np.uint64) * 64 + 640,
        length=LENGTHS[rows],
        crc32=np.array([7, 8, 9, 10], np.uint32),
        objects=(ObjectInfo("lr", "replicated", 0.1), ObjectInfo("rng", "per_rank", b"\0\1")),
    )


def plain(data: bytes) -> dict[Any, Any]:
    """A document as msgpack has it, extension types left alone, without its checksum."""
    found: dict[Any, Any] = msgpack.unpackb(data, strict_map_key=False)
    del found["crc32"]
    return found


def sealed(document: dict[Any, Any]) -> bytes:
    """The document with the right checksum at its end."""
    return with_crc(msgpack.packb({**document, "crc32": 0})[:-1] + b"\xce")


def with_crc(body: bytes) -> bytes:
    """A document up to its checksum, and that."""
    return body + zlib.crc32(body).to_bytes(4, "big")


def edited(document: dict[Any, Any], path: str, value: Any) -> dict[Any, Any]:
    """A copy in which the field at `arrays.0.shape` is the value, or is gone."""
    result = copy.deepcopy(document)
    *above, last = path.split(".")
    place: Any = result
    for step in above:
        place = place[int(step)] if isinstance(place, list) else place[step]
    key: Any = int(last) if isinstance(place, list) else last
    if value is ABSENT:
        del place[key]
    else:
        place[key] = value
    return result


def extension(code: int, *payload: Any) -> msgpack.ExtType:
    """An extension type with msgpack inside."""
    return msgpack.ExtType(code, b"".join(map(msgpack.packb, payload)))
