"""Small chunks are filled by runs of bytes that were found once: the packs are those that are made
chunk by chunk.
"""

from __future__ import annotations

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoint.reshard import copy
from ckptkit.errors import CorruptionError
from ckptkit.model import Box
from ckptkit.storage import MemoryStore
from tests.checkpoint.reshard.toy import reshard, saved

PAIRS = [
    ("fsdp:3", "tp:2"),
    ("tp:4", "fsdp:8"),
    ("fsdp:2,tp:3", "single"),
    ("single", "fsdp:2,tp:3"),
    ("pp:2,tp:2,fsdp:2", "zero1:3"),
]


@pytest.mark.parametrize(("source", "to"), PAIRS)
def test_packs_are_the_same_bytes_however_small_chunks_are_filled(
    source: str, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, one_by_one = MemoryStore(), MemoryStore()
    reshard(saved(source), at_once, to)
    monkeypatch.setattr(copy, "_SMALL", 0)
    reshard(saved(source), one_by_one, to)
    packs = [entry.key for entry in at_once.list() if entry.key.endswith(".zip")]
    assert packs
    for key in packs:
        assert at_once.read(key) == one_by_one.read(key), key


def test_rows_columns_and_edges_of_small_chunks_go_where_they_belong() -> None:
    source, destination = MemoryStore(), MemoryStore()
    values = np.arange(5 * 7 * 6, dtype=np.int16).reshape(5, 7, 6)
    with ckptkit.Writer(source, step=1, chunk_bytes=64) as writer:
        writer.add("model/w", values, role="param")
        writer.add("model/one", values[0, 0, 0], role="param")
    rules = {"rules": [{"match": "w", "tp": "shard(1)"}, {"match": "one", "tp": "replicate"}]}
    ckptkit.reshard(source, destination, to="tp:3", rules=rules, chunk_bytes=128)
    with ckptkit.open(destination) as step:
        assert np.array_equal(step["model/w"].read(), values)
        assert step["model/one"].read() == values[0, 0, 0]
        box = Box((1, 2, 3), (3, 4, 2))
        assert np.array_equal(step["model/w"].read(box), values[1:4, 2:6, 3:5])


@pytest.mark.parametrize("to", ["fsdp:3", "tp:2"])
def test_a_flipped_bit_of_a_small_chunk_ends_a_reshard(to: str) -> None:
    whole, damaged = saved("fsdp:3"), MemoryStore()
    with ckptkit.open(whole) as step:
        number = next(i for i, a in enumerate(step.manifest.arrays) if a.name.endswith("1.down"))
        row = int(step.manifest.starts[number])
        offset, pack = int(step.manifest.offset[row]), int(step.manifest.pack[row])
        name = step.manifest.packs[pack].name
    for entry in whole.list():
        data = bytearray(whole.read(entry.key))
        if entry.key.endswith(name):
            data[offset] ^= 16
        damaged.put(entry.key, bytes(data))
    destination = MemoryStore()
    with pytest.raises(CorruptionError, match=r"chunk .*1\.down/c/0/0 has the checksum"):
        reshard(damaged, destination, to)
    assert not any(entry.key.endswith("manifest.msgpack") for entry in destination.list())
