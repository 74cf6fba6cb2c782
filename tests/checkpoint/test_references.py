"""Ranks that know the arrays that rank 0 knows do not list them again."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

import ckptkit
from ckptkit import Run, Writer
from ckptkit.checkpoint import workers
from ckptkit.checkpoint.places import StepFolder
from ckptkit.checkpoint.write.commit import gather
from ckptkit.checkpoint.write.pack import Pack, pack_of, plan_of
from ckptkit.errors import CkptkitError, FormatError, PeerError
from ckptkit.format import array_table
from ckptkit.format.arrays import arrays_from_docs
from ckptkit.format.manifest import SaveInfo
from ckptkit.model import Strategy
from ckptkit.storage import MemoryStore, Store
from tests.checkpoint.saving import (
    assert_holds,
    at_step,
    contents,
    memory_with,
    outcomes,
    save,
    save_by,
    small_state,
)

STATE = small_state(3)


def staged(writer: Writer) -> None:
    """Two stages of a pipeline, each of several ranks."""
    ranks = writer.strategy.world_size // 2
    stage = writer.rank // ranks
    placed = {"pp": f"stage({stage})", "fsdp": "shard(0)"}
    for number in range(3):
        part = np.full(8 // ranks, writer.rank)
        writer.add(f"stage{stage}/w{number}", part, shape=(8,), placements=placed)


def key_of(store: Store, rank: int) -> str:
    (key,) = [key for key in contents(store) if key.endswith(f"rank-{rank:05d}.zip")]
    return key


def record_of(store: Store, rank: int) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(store.read(key_of(store, rank)))) as pack:
        found: dict[str, Any] = msgpack.unpackb(pack.read(pack.infolist()[-1]))
        return found


def with_record(store: Store, rank: int, change: Callable[[bytes], bytes]) -> Store:
    """A copy of a store in which one record has other bytes, as many, and all checksums right."""
    key = key_of(store, rank)
    data = store.read(key)
    with zipfile.ZipFile(io.BytesIO(data)) as pack:
        entry = pack.infolist()[-1]
        record = pack.read(entry)
    body = change(record)[:-4]
    changed = body + zlib.crc32(body).to_bytes(4, "big")
    assert len(changed) == len(record)
    old, new = struct.pack("<I", entry.CRC), struct.pack("<I", zlib.crc32(changed))
    tail = data[entry.header_offset :].replace(record, changed).replace(old, new)
    return memory_with({**contents(store), key: data[: entry.header_offset] + tail})


def without_manifest(store: Store) -> Store:
    return memory_with({k: v for k, v in contents(store).items() if not k.endswith(".msgpack")})


@pytest.fixture
def store() -> MemoryStore:
    """A step of three ranks that all know all arrays."""
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:3")
    return store


@pytest.fixture
def pipeline() -> MemoryStore:
    store = MemoryStore()
    save_by(store, staged, strategy="pp:2,fsdp:2")
    return store


def test_only_rank_0_lists_what_all_know(store: Store) -> None:
    assert [entry["name"] for entry in record_of(store, 0)["arrays"]] == sorted(STATE)
    for rank in (1, 2):
        record = record_of(store, rank)
        assert set(record["arrays"]) == {"rank", "sha256"}
        assert record["placements"] == []
    assert ckptkit.verify(store) == []
    with ckptkit.open(store) as checkpoint:
        assert_holds(checkpoint, STATE)


def test_a_stage_that_rank_0_has_no_part_in_lists_its_arrays(pipeline: Store) -> None:
    kinds = [type(record_of(pipeline, rank)["arrays"]) for rank in range(4)]
    assert kinds == [list, dict, list, list]
    assert ckptkit.verify(pipeline) == []


def test_a_rank_that_adds_one_more_alias_lists_its_arrays() -> None:
    def fill(writer: Writer) -> None:
        writer.add("w", np.arange(8))
        if writer.rank == 1:
            writer.add_alias("tied", "w")

    store = MemoryStore()
    save_by(store, fill, strategy="ddp:3")
    assert [type(record_of(store, rank)["arrays"]) for rank in range(3)] == [list, list, dict]
    assert ckptkit.open(store)["tied"].alias_of == "w"


@pytest.mark.parametrize(("fill", "tables"), [(None, 1), (staged, 2)], ids=["all", "pipeline"])
def test_equal_arrays_are_read_once_however_many_ranks_know_them(
    monkeypatch: pytest.MonkeyPatch, fill: Callable[[Writer], None] | None, tables: int
) -> None:
    store = MemoryStore()
    if fill:
        save_by(store, fill, strategy="pp:2,fsdp:4")
    else:
        save(store, STATE, strategy="fsdp:8")
    calls = []

    def counted(*given: Any) -> Any:
        calls.append(given)
        return arrays_from_docs(*given)

    monkeypatch.setattr(array_table, "arrays_from_docs", counted)
    monkeypatch.setattr(workers, "_FEW", 1)
    (save_id,) = store.children("step-0000000001/data")
    gather(StepFolder(store, "step-0000000001"), save_id)
    assert len(calls) == tables


def test_a_reference_to_other_arrays_is_refused(store: Store) -> None:
    digest = record_of(store, 1)["arrays"]["sha256"]
    changed = with_record(store, 2, lambda record: record.replace(digest, bytes(32)))
    (finding,) = ckptkit.verify(changed)
    assert finding.kind == "corrupt"
    assert key_of(store, 2) in finding.where
    assert "rank-00000.zip" in finding.hint
    with pytest.raises(FormatError, match="other arrays") as caught:
        ckptkit.rebuild(at_step(without_manifest(changed), 1))
    assert "rank-00002.zip" in str(caught.value)


def test_rank_0_that_refers_to_itself_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Pack.begin

    def referring(*given: Any, refers: bool, **options: Any) -> None:
        begin(*given, refers=True, **options)

    monkeypatch.setattr(Pack, "begin", referring)
    store = MemoryStore()
    errors = outcomes(store, lambda w: w.add("w", np.arange(8)), strategy="ddp:2")
    assert isinstance(errors[0], FormatError)
    assert "itself" in str(errors[0])
    assert "rank-00000.zip" in errors[0].where
    assert isinstance(errors[1], PeerError)
    assert Run(store).steps() == []


def test_without_rank_0s_pack_the_others_are_verified_by_the_manifest(store: Store) -> None:
    objects = contents(store)
    del objects[key_of(store, 0)]
    assert [finding.kind for finding in ckptkit.verify(memory_with(objects))] == ["missing"]
    key = key_of(store, 1)
    data = bytearray(objects[key])
    data[0] ^= 1
    findings = ckptkit.verify(memory_with({**objects, key: bytes(data)}))
    assert [finding.kind for finding in findings] == ["missing", "corrupt"]
    assert "the header of" in findings[1].what


def test_where_the_manifest_does_not_help_the_chunks_are_verified(pipeline: Store) -> None:
    objects = contents(pipeline)
    del objects[key_of(pipeline, 0)]
    findings = ckptkit.verify(memory_with(objects))
    assert [finding.kind for finding in findings] == ["missing", "unreadable"]
    assert findings[1].where.endswith("rank-00001.zip: arrays")
    assert "rank-00000.zip" in findings[1].hint
    key = key_of(pipeline, 1)
    data = bytearray(objects[key])
    data[data.index(np.full(4, 1).tobytes())] ^= 1
    findings = ckptkit.verify(memory_with({**objects, key: bytes(data)}))
    assert [finding.kind for finding in findings] == ["missing", "unreadable", "corrupt"]


def test_strategies_are_compared_where_there_are_no_arrays() -> None:
    def fill(writer: Writer) -> None:
        if writer.rank:
            writer.strategy = Strategy.parse("ddp:2,tp:1")
        writer.add_object("lr", 0.1)

    errors = outcomes(MemoryStore(), fill, strategy="ddp:2")
    assert all(isinstance(error, PeerError) for error in errors), errors
    assert "strategy" in str(errors[0])


def test_a_world_of_absurd_size_is_refused_by_the_pack_that_is_missing() -> None:
    strategy = Strategy.parse(f"fsdp:{1 << 24}")
    save_id = "20261121T101500Z-0123456789ab"
    info = SaveInfo(save_id, 1, 0.0, "test", strategy.world_size, strategy, {})
    store = MemoryStore()
    pack = pack_of(0, plan_of(0, strategy, {}), [])
    pack.begin(StepFolder(store), info, pack.segments_of(1 << 20), refers=False)
    pack.write_segment(0)
    tracemalloc.start()
    try:
        with pytest.raises(CkptkitError, match=r"rank-00001\.zip: the pack is missing"):
            ckptkit.rebuild(store)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
