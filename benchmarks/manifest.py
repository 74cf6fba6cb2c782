"""A manifest of two million chunks: how long it takes and what it weighs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import ckptkit
from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.ranks import isolated
from benchmarks.table import Bar, Section
from ckptkit.checkpoint.write.commit import assemble
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import ArrayInfo, ArrayKind, key_of
from ckptkit.format.manifest import Manifest, PackInfo, Record, SaveInfo, pack_name
from ckptkit.format.pack import Entries, Entry
from ckptkit.model import DType, Grid, Shard, Strategy
from ckptkit.storage import open_store

ARRAYS, PER_ARRAY, WRITERS = 1000, 2000, 50
CHUNK = 4096
LIMIT_BYTES, LIMIT_SECONDS = 60, 5


def manifest(folder: Path) -> Section:
    """Built from records, written, opened again."""
    seconds, memory, size = isolated(_measure, folder / "manifest")
    chunks = ARRAYS * PER_ARRAY
    rows = [[what, f"{s:.2f}", f"{memory[what]:.0f}"] for what, s in seconds.items()]
    bars = [
        Bar(f"{what}, {chunks:,} chunks", s, LIMIT_SECONDS, at_least=False, unit="s")
        for what, s in seconds.items()
    ]
    bars.append(
        Bar("manifest on disk, per chunk", size / chunks, LIMIT_BYTES, at_least=False, unit="B")
    )
    title = f"A manifest of {chunks:,} chunks, {ARRAYS:,} arrays, {WRITERS} writers"
    return Section(title, ["", "s", "peak of more memory, MiB"], rows, bars)


def _measure(folder: Path) -> tuple[dict[str, float], dict[str, float], int]:
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}

    @contextmanager
    def measured(what: str) -> Iterator[None]:
        before = resident_mib()
        reset_peak()
        start = time.monotonic()
        yield
        seconds[what] = time.monotonic() - start
        memory[what] = peak_mib() - before

    table = ArrayTable.of([_array(number) for number in range(ARRAYS)], ())
    records = [_record(rank, table) for rank in range(WRITERS)]
    size = CHUNK * ARRAYS * PER_ARRAY
    packs = [PackInfo(pack_name(rank), size, (0, 1)) for rank in range(WRITERS)]
    store = open_store(folder)
    with measured("build"):
        built = assemble(records, packs)
    with measured("write"):
        _publish(folder, built)
    del built, records
    with measured("open"):
        step = ckptkit.open(folder)
    if len(step.arrays) != ARRAYS:
        raise RuntimeError("the manifest lost arrays")
    return seconds, memory, store.size("step-0000000001/manifest.msgpack")


def _publish(folder: Path, built: Manifest) -> None:
    store = open_store(folder)
    store.put("step-0000000001/manifest.msgpack", built.to_bytes(), exclusive=True)


def _record(rank: int, table: ArrayTable) -> Record:
    mine = PER_ARRAY // WRITERS
    rows = ARRAYS * mine
    keys = [key_of(array.name) for array in table.arrays] if rank == 0 else []
    chunk = np.tile(np.arange(rank * mine, (rank + 1) * mine, dtype=np.uint64), ARRAYS)
    return Record(
        save=SaveInfo("20260101T000000Z-000000000000", 1, 0.0, "bench", WRITERS, _STRATEGY, {}),
        rank=rank,
        table=table,
        documents=Entries.of(Entry(key, 0, 1, 0) for key in keys),
        array=np.repeat(np.arange(ARRAYS, dtype=np.uint32), mine),
        chunk=chunk,
        offset=np.arange(rows, dtype=np.uint64) * np.uint64(CHUNK),
        length=np.full(rows, CHUNK, np.uint64),
        crc32=np.arange(rows, dtype=np.uint32),
        objects=(),
    )


_STRATEGY = Strategy.of(f"fsdp:{WRITERS}")


def _array(number: int) -> ArrayInfo:
    shape = (PER_ARRAY, CHUNK // 4)
    grid = Grid.regular(shape, (1, CHUNK // 4))
    name = f"model/layers.{number:04d}.weight"
    return ArrayInfo(name, ArrayKind(shape, DType.of("float32"), grid, "param", (Shard(0),)))
