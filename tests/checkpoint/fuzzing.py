"""Hostile manifests and records whose checksums are right, and everything that looks at a step.

`python -m tests.checkpoint.fuzzing FIRST COUNT` makes so many documents, the first of this number,
out of real ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ckptkit.cli.show import describe, lines_of

import ckptkit
from ckptkit import PerRank, Split, Sum, Writer
from ckptkit.checkpoint.export.files import unpack
from ckptkit.errors import CkptkitError
from ckptkit.format.pack import Entries, Entry, data_offset, directory
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Tensor, add, contents, memory_with, random_values, save_by
from tests.format.hostile import hostile
from tests.format.samples import plain, sealed
from tests.fuzzing import main

Doc = dict[Any, Any]
Objects = dict[str, bytes]

STEP = "step-0000000001"
TO = ("single", "fsdp:3", "ddp:2", "fsdp:2")


def bases() -> list[Objects]:
    """Steps as they are really written, each with what the others lack."""
    state = {
        "model/layers.0.w": Tensor(random_values((6, 5), "bfloat16", 1), {"fsdp": "shard(0)"}),
        "model/layers.1.w": Tensor(random_values((8, 3), "float32", 2), {"fsdp": "shard(1)"}),
        "model/none": Tensor(random_values((0, 7), "int8"), {"fsdp": "shard(0)"}),
        "model/one": Tensor(random_values((), "float64", 3)),
    }

    def fill(writer: Writer) -> None:
        for name, tensor in state.items():
            add(writer, name, tensor, role="param")
        whole = random_values((6, 5), seed=4)
        add(
            writer,
            "optimizer/layers.0.w/exp_avg",
            Tensor(whole, {"fsdp": "shard(0)"}),
            role="optimizer",
            of="model/layers.0.w",
        )
        writer.add_alias("model/tied", "model/layers.0.w")
        options = {"params": ["layers.0.w", "layers.1.w"], "options": {"lr": 0.1}}
        writer.add_object("optimizer", [{"kind": "adamw", "groups": [options], "values": {}}])
        writer.add_object("group", {"x": {"ckptkit.array": "model/one"}, "n": (1, 2.5, None)})
        writer.add_object("alike/model/one", 12345)
        writer.add_object("extra/rng", PerRank(np.arange(3) + writer.rank))
        writer.add_object("extra/seen", Sum(np.float32(writer.rank)))
        writer.add_object("extra/counts", Sum(np.arange(2)))
        writer.add_object("extra/cursor", Split([1, 2]))

    def stages(writer: Writer) -> None:
        stage = writer.rank
        whole = random_values((5,), seed=stage)
        writer.add(f"model/{stage}/w", whole, placements={"pp": f"stage({stage})"})

    found = []
    for fill_one, strategy in ((fill, "fsdp:2"), (fill, "fsdp:3"), (stages, "pp:2")):
        store = MemoryStore()
        save_by(store, fill_one, strategy=strategy, chunk_bytes=32, details={"precision": "bf16"})
        found.append(contents(store))
    return found


def with_record(pack: bytes, rng: random.Random) -> bytes:
    """A pack whose record is hostile, and whose directory has the record's new place and CRC."""
    entries = []
    for item in zipfile.ZipFile(io.BytesIO(pack)).infolist():
        offset = data_offset(item.filename, item.file_size, item.header_offset)
        entries.append(Entry(item.filename, offset, item.file_size, item.CRC))
    last = entries[-1]
    doc = plain(pack[last.offset : last.offset + last.length])
    record = hostile(sealed(doc), rng)
    header = pack[: last.offset]
    entries[-1] = Entry(last.name, last.offset, len(record), zlib.crc32(record))
    return header + record + directory(Entries.of(entries))


def look_at(objects: Objects, rng: random.Random, good: bytes) -> None:
    """Everything that reads a step; what succeeds says the same twice."""
    store = memory_with(objects)
    (info,) = ckptkit.Run(store).listing()
    findings = ckptkit.verify(store)
    with ckptkit.open(store) as checkpoint:
        if not findings:
            assert checkpoint.manifest.to_bytes() == good, "verify finds nothing"
        assert not info.problem, "the listing finds more than open"
        doc = json.loads(json.dumps(describe(checkpoint), allow_nan=False))
        assert lines_of(doc, each=False)
        ranks = checkpoint.strategy.world_size
        describe(checkpoint, None, rng.randrange(min(ranks, 64)))
        ways: list[Callable[[], object]] = [
            lambda: dict(checkpoint.objects),
            lambda: [checkpoint.read(name).shape for name in checkpoint.arrays],
            partial(viewed, checkpoint),
            partial(digests, store),
            partial(resharded, store, rng.choice(TO)),
            partial(unpacked, checkpoint),
        ]
        for way in rng.sample(ways, 2):
            with contextlib.suppress(CkptkitError):
                way()


def digests(store: MemoryStore) -> None:
    assert ckptkit.digest(store) == ckptkit.digest(store), "two digests"
    assert ckptkit.diff(store, store).same, "a step differs from itself"


def resharded(store: MemoryStore, to: str) -> None:
    target = MemoryStore()
    ckptkit.plan_reshard(store, target, to=to)
    ckptkit.reshard(store, target, to=to)
    assert ckptkit.digest(target).step == ckptkit.digest(store).step, "a reshard changed the state"


def viewed(checkpoint: ckptkit.Checkpoint) -> None:
    group: Any = checkpoint.zarr
    for name, array in checkpoint.arrays.items():
        assert group[name][...].shape == array.shape


def unpacked(checkpoint: ckptkit.Checkpoint) -> None:
    with tempfile.TemporaryDirectory() as folder:
        unpack(checkpoint, Path(folder) / "plain")


def attempt(objects: Objects, rng: random.Random) -> None:
    """One document."""
    manifest = f"{STEP}/manifest.msgpack"
    good = objects[manifest]
    if rng.random() < 0.7:
        look_at({**objects, manifest: hostile(good, rng)}, rng, good)
        return
    packs = sorted(key for key in objects if "/rank-" in key)
    key = rng.choice(packs)
    changed = {**objects, key: with_record(objects[key], rng)}
    ckptkit.verify(memory_with(changed))
    del changed[manifest]
    store = memory_with({k.removeprefix(f"{STEP}/"): v for k, v in changed.items()})
    ckptkit.rebuild(store)
    made = contents(store)
    look_at({f"{STEP}/{k}": v for k, v in made.items()}, rng, made["manifest.msgpack"])


if __name__ == "__main__":
    STEPS = bases()

    def warm() -> None:
        for step in STEPS:
            look_at(step, random.Random(0), step[f"{STEP}/manifest.msgpack"])

    sys.exit(main(warm, lambda rng: attempt(rng.choice(STEPS), rng), wall=120))
