"""Bytes that are not as they were written: every one is found, and no wrong value is read."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import msgpack
import numpy as np
import pytest

import ckptkit
from ckptkit import Writer
from ckptkit.errors import CorruptionError, FormatError, VersionError
from ckptkit.format.encoding import seal, unseal
from ckptkit.storage import MemoryStore, Store
from tests.checkpoint.saving import (
    Tensor,
    assert_holds,
    at_step,
    contents,
    memory_with,
    random_values,
    same,
    save,
    save_by,
)

STATE = {
    "a": Tensor(random_values((10,), "float32", 1), {"fsdp": "shard(0)"}),
    "g/b": Tensor(random_values((3,), "int8", 2), {"fsdp": "shard(0)"}),
}
MANIFEST = "step-0000000002/manifest.msgpack"


@pytest.fixture(scope="module")
def whole() -> dict[str, bytes]:
    """A run of two steps, the second of which is to be damaged."""
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:2", step=1)
    save(store, STATE, strategy="fsdp:2", step=2, chunk_bytes=16)
    return contents(store)


def packs_of(objects: dict[str, bytes]) -> list[str]:
    return [key for key in objects if key.startswith("step-0000000002/data/")]


def assert_never_wrong(store: Store) -> None:
    """Each array of step 2 is read as it was written, or its damage is reported with the place."""
    try:
        checkpoint = ckptkit.Run(store).open(2)
    except FormatError as error:
        assert_helpful(error)
        return
    with checkpoint:
        for name, tensor in STATE.items():
            try:
                assert same(checkpoint.read(name), tensor.whole)
            except CorruptionError as error:
                assert_helpful(error)


def assert_helpful(error: FormatError) -> None:
    assert "step-0000000002" in error.where
    assert error.what
    assert error.hint


def assert_found(store: Store) -> None:
    """Verify has something to say about step 2, and step 1 is as good as ever."""
    findings = ckptkit.verify(store, threads=1)
    assert findings
    assert all("step-0000000002" in finding.where and finding.what for finding in findings)


def assert_previous_loads(store: Store) -> None:
    with ckptkit.Run(store).open(1) as checkpoint:
        assert_holds(checkpoint, STATE)
    assert ckptkit.verify(at_step(store, 1)) == []


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_every_flipped_byte_of_a_pack_is_found(whole: dict[str, bytes], first: int) -> None:
    key = packs_of(whole)[0]
    missed = []
    for place in range(first, len(whole[key]), 3):
        data = bytearray(whole[key])
        data[place] ^= 1 << place % 8
        store = memory_with({**whole, key: bytes(data)})
        if not ckptkit.verify(store, threads=1):
            missed.append(place)
        assert_never_wrong(store)
    assert missed == []


@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_every_flipped_byte_of_a_manifest_is_found(whole: dict[str, bytes], bit: int) -> None:
    for place in range(len(whole[MANIFEST])):
        data = bytearray(whole[MANIFEST])
        data[place] ^= bit
        store = memory_with({**whole, MANIFEST: bytes(data)})
        (finding,) = ckptkit.verify(store)
        assert finding.kind == "corrupt"
        assert "step-0000000002" in finding.where
        with pytest.raises(FormatError) as caught:
            ckptkit.open(store)
        assert "step-0000000002" in caught.value.where


def test_flipped_bytes_of_group_documents_are_found() -> None:
    def fill(writer: Writer) -> None:
        placed = {"pp": f"stage({writer.rank})"}
        writer.add(f"stage{writer.rank}/w", np.arange(3), placements=placed)

    store = MemoryStore()
    save_by(store, fill, strategy="pp:2")
    objects = contents(store)
    (key,) = [key for key in objects if key.endswith("groups.zip")]
    for place in range(len(objects[key])):
        data = bytearray(objects[key])
        data[place] ^= 1
        assert ckptkit.verify(memory_with({**objects, key: bytes(data)})), place


@pytest.mark.parametrize("left", [0.0, 0.01, 0.3, 0.7, 0.99, "-100", "-22", "-1"], ids=str)
def test_a_truncated_pack_is_found(whole: dict[str, bytes], left: float | str) -> None:
    for key in packs_of(whole):
        size = len(whole[key])
        kept = size + int(left) if isinstance(left, str) else int(size * left)
        store = memory_with({**whole, key: whole[key][:kept]})
        assert_found(store)
        assert any(str(size) in finding.what for finding in ckptkit.verify(store))
        assert_never_wrong(store)
        assert_previous_loads(store)


@pytest.mark.parametrize("verify", [True, False])
def test_a_pack_of_another_size_is_not_read(whole: dict[str, bytes], verify: bool) -> None:
    for key in packs_of(whole):
        for data in (whole[key][:-1], whole[key] + b"\0"):
            store = memory_with({**whole, key: data})
            assert_found(store)
            with ckptkit.open(store) as checkpoint, pytest.raises(CorruptionError) as caught:
                checkpoint.read("a", verify=verify)
            assert key in caught.value.where
            assert_helpful(caught.value)


def test_a_missing_pack_is_found(whole: dict[str, bytes]) -> None:
    for key in packs_of(whole):
        store = memory_with({k: data for k, data in whole.items() if k != key})
        findings = ckptkit.verify(store)
        assert [(f.kind, f.where.endswith(key)) for f in findings] == [("missing", True)]
        with ckptkit.open(store) as checkpoint, pytest.raises(CorruptionError) as caught:
            checkpoint.read("a")
        assert key in caught.value.where
        assert_helpful(caught.value)
        assert_previous_loads(store)


def test_an_extra_pack_is_found_and_does_no_harm(whole: dict[str, bytes]) -> None:
    first, second = packs_of(whole)
    for name in ("rank-00002.zip", "groups.zip", "notes.txt"):
        key = second.replace("rank-00001.zip", name)
        store = memory_with({**whole, key: whole[first]})
        (finding,) = ckptkit.verify(store)
        assert finding.kind == "extra"
        assert finding.where.endswith(key)
        assert finding.hint
        with ckptkit.open(store) as checkpoint:
            assert_holds(checkpoint, STATE)


def test_swapped_packs_are_found(whole: dict[str, bytes]) -> None:
    first, second = packs_of(whole)
    store = memory_with({**whole, first: whole[second], second: whole[first]})
    assert_found(store)
    assert_never_wrong(store)
    assert_previous_loads(store)


def test_swapped_packs_of_ranks_that_hold_nothing_are_found() -> None:
    store = MemoryStore()
    only = {"a": Tensor(np.arange(3), {"zero1": "owner(0)"})}
    save(store, only, strategy="zero1:3")
    objects = contents(store)
    _, second, third = [key for key in objects if key.endswith(".zip")]
    swapped = memory_with({**objects, second: objects[third], third: objects[second]})
    assert ckptkit.verify(swapped)


def test_the_pack_of_another_save_is_found(whole: dict[str, bytes]) -> None:
    store = memory_with(whole)
    save(store, STATE, strategy="fsdp:2", step=3, chunk_bytes=16)
    objects = contents(store)
    for key in packs_of(objects):
        (other,) = [
            k
            for k in objects
            if k.startswith("step-0000000003/data/") and k.endswith(key.rpartition("/")[2])
        ]
        store = memory_with({**whole, key: objects[other]})
        assert_found(store)
        assert_never_wrong(store)


def _resealed(data: bytes, change: Callable[[dict[str, object]], object]) -> bytes:
    """A manifest whose checksum is right, whatever else was done to it."""
    fields = unseal("ckptkit-manifest", data, "")
    change(fields)
    return seal("ckptkit-manifest", fields)


def test_a_manifest_of_a_newer_version_is_refused_by_name(whole: dict[str, bytes]) -> None:
    document = {"format": "ckptkit-manifest", "version": 2, "shards": {}, "crc32": 0}
    body = msgpack.packb(document)[:-1] + b"\xce"
    data = body + zlib.crc32(body).to_bytes(4, "big")
    store = memory_with({**whole, MANIFEST: data})
    with pytest.raises(VersionError, match="version 2") as caught:
        ckptkit.open(store)
    assert caught.value.where.endswith(MANIFEST)
    assert "upgrade" in caught.value.hint
    assert_found(store)
    assert_previous_loads(store)


def test_a_manifest_that_lies_is_found(whole: dict[str, bytes]) -> None:
    def other_crc(fields: dict[str, object]) -> None:
        chunks = fields["chunks"]
        assert isinstance(chunks, dict)
        chunks["crc32"] = chunks["crc32"][4:] + chunks["crc32"][:4]

    def other_role(fields: dict[str, object]) -> None:
        arrays = fields["arrays"]
        assert isinstance(arrays, list)
        arrays[0]["role"] = "buffer"

    def other_dtype(fields: dict[str, object]) -> None:
        arrays = fields["arrays"]
        assert isinstance(arrays, list)
        arrays[0]["dtype"] = "int32"

    changes: list[Callable[[dict[str, object]], object]] = [
        other_crc,
        other_role,
        other_dtype,
        lambda fields: fields.update(details={"zero": 3}),
        lambda fields: fields.update(time=0.0),
        lambda fields: fields.update(objects=[]) if fields["objects"] else fields.update(writer=""),
    ]
    for change in changes:
        store = memory_with({**whole, MANIFEST: _resealed(whole[MANIFEST], change)})
        assert any(finding.kind == "mismatch" for finding in ckptkit.verify(store))


def test_a_document_too_deep_to_read_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with monkeypatch.context() as patch:
        patch.setattr("ckptkit.checkpoint.write.plan.GROUP_DOCUMENT", b"[" * 60000)
        save(store, STATE, strategy="fsdp:2")
    told = [str(finding) for finding in ckptkit.verify(store)]
    assert told
    assert all("does not say what the manifest says" in each for each in told)
