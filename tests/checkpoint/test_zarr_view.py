"""The Zarr view: what zarr-python expects of a store that can only be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
import zarr
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

import ckptkit
from ckptkit import Checkpoint
from ckptkit.errors import CorruptionError
from ckptkit.format.zarr import ZarrView
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import (
    Tensor,
    contents,
    flipped,
    memory_with,
    random_values,
    same,
    save,
    save_by,
)

T = TypeVar("T")
PROTOTYPE = default_buffer_prototype()
REFUSALS = (ValueError, TypeError, NotImplementedError)
# Blocks of 3 and 4 cut in two give borders at 2, 3 and 5, which no regular grid has.
STATE = {
    "model/even": Tensor(random_values((8, 6), "float32", 1), {"fsdp": "shard(0)"}),
    "model/odd": Tensor(random_values((7, 5), "bfloat16", 2), {"fsdp": "shard(0, blocks=[3,4])"}),
    "model/deep/c": Tensor(random_values((4,), "int16", 3), {"fsdp": "shard(0)"}),
    "scalar": Tensor(random_values((), "float64", 4)),
    "empty": Tensor(random_values((0, 3), "int8")),
}


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    store = MemoryStore()
    save(store, STATE, strategy="fsdp:2", chunk_bytes=400)
    return store


@pytest.fixture(scope="module")
def checkpoint(store: MemoryStore) -> Iterator[Checkpoint]:
    with ckptkit.open(store) as opened:
        yield opened


@pytest.fixture(scope="module")
def view(checkpoint: Checkpoint) -> ZarrView:
    return checkpoint.zarr_store()


def collected(items: AsyncIterator[T]) -> list[T]:
    async def collect() -> list[T]:
        return [item async for item in items]

    return asyncio.run(collect())


def value_of(view: ZarrView, key: str, part: Any = None) -> bytes | None:
    buffer = asyncio.run(view.get(key, PROTOTYPE, part))
    return None if buffer is None else buffer.to_bytes()


def test_every_listed_key_exists_and_has_a_value(view: ZarrView) -> None:
    keys = collected(view.list())
    assert len(keys) == len(set(keys))
    for key in keys:
        assert asyncio.run(view.exists(key))
        value = value_of(view, key)
        assert value
        assert asyncio.run(view.getsize(key)) == len(value)


NOT_KEYS = [
    "",
    "model",
    "nothing/zarr.json",
    "zarr.json/zarr.json",
    "model/even",
    "model/even/c",
    "model/even/c/0",
    "model/even/c/0/0/0",
    "model/even/c/99/0",
    "model/even/c/-1/0",
    "model/even/c/a/0",
    "model/even/c/00/0",
    "model/even/c/0/0/",
    "model/even/c//0",
    "/zarr.json",
    "scalar/c/0",
    "empty/c/0/0",
    "model/c/0",
    ".ckptkit/rank-00000.msgpack",
]


@pytest.mark.parametrize("key", NOT_KEYS)
def test_what_is_not_listed_does_not_exist(view: ZarrView, key: str) -> None:
    assert key not in collected(view.list())
    assert value_of(view, key) is None
    assert not asyncio.run(view.exists(key))


PREFIXES = ["", "model", "model/", "model/even", "model/even/c", "model/odd/c/0", "model/deep"]
PREFIXES += ["model/deep/c", "model/deep/c/c", "scalar", "empty", "nothing", "mod", "zarr.json"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_folder_lists_what_is_directly_below(view: ZarrView, prefix: str) -> None:
    start = f"{prefix.rstrip('/')}/" if prefix else ""
    below = [key[len(start) :] for key in collected(view.list()) if key.startswith(start)]
    found = collected(view.list_dir(prefix))
    assert sorted(found) == sorted({key.partition("/")[0] for key in below})


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_lists_all_keys_below(view: ZarrView, prefix: str) -> None:
    keys = [key for key in collected(view.list()) if key.startswith(prefix)]
    assert collected(view.list_prefix(prefix)) == keys
    start = f"{prefix.rstrip('/')}/" if prefix else ""
    is_empty = not any(key.startswith(start) for key in collected(view.list()))
    assert asyncio.run(view.is_empty(prefix)) == is_empty


RANGES = [
    (None, slice(None)),
    (RangeByteRequest(0, 5), slice(0, 5)),
    (RangeByteRequest(3, 4), slice(3, 4)),
    (RangeByteRequest(2, 10_000), slice(2, None)),
    (OffsetByteRequest(4), slice(4, None)),
    (OffsetByteRequest(0), slice(None)),
    (SuffixByteRequest(3), slice(-3, None)),
    (SuffixByteRequest(10_000), slice(None)),
]


@pytest.mark.parametrize(("part", "expected"), RANGES, ids=str)
def test_ranges_of_values_are_read(view: ZarrView, part: Any, expected: slice) -> None:
    for key in ("zarr.json", "model/even/zarr.json", "model/even/c/0/0", "model/odd/c/1/0"):
        whole = value_of(view, key)
        assert whole is not None
        assert value_of(view, key, part) == whole[expected]


def test_many_ranges_are_read_at_once(view: ZarrView) -> None:
    wanted = [("zarr.json", RangeByteRequest(0, 3)), ("nothing", None), ("scalar/c", None)]
    found = asyncio.run(view.get_partial_values(PROTOTYPE, wanted))
    values = [None if buffer is None else buffer.to_bytes() for buffer in found]
    assert values == [b'{"z', None, STATE["scalar"].whole.tobytes()]


def test_groups_and_arrays_are_found_by_walking(checkpoint: Checkpoint) -> None:
    group = checkpoint.zarr
    found = {name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}
    assert found == set(STATE)
    assert sorted(group.group_keys()) == ["model"]
    assert sorted(group.array_keys()) == ["empty", "scalar"]
    assert "model/even" in group
    assert "nothing" not in group


def test_arrays_are_complete(checkpoint: Checkpoint) -> None:
    for name in STATE:
        array: Any = checkpoint.zarr[name]
        assert array.nchunks_initialized == array.nchunks
        assert array.attrs["ckptkit"] == {"role": "other"}


def test_borders_that_are_not_regular_are_shown_as_if_they_were(checkpoint: Checkpoint) -> None:
    assert not checkpoint["model/odd"].grid.is_regular
    array: Any = checkpoint.zarr["model/odd"]
    assert all(length >= 1 for length in array.chunks)
    whole = STATE["model/odd"].whole
    assert same(array[...], whole)
    assert same(array[2:6, ::2], np.ascontiguousarray(whole[2:6, ::2]))
    for start in range(7):
        assert same(array[start:, 1], np.ascontiguousarray(whole[start:, 1]))


def test_nothing_can_be_written(checkpoint: Checkpoint, view: ZarrView) -> None:
    assert view.read_only
    assert not view.supports_writes
    assert not view.supports_deletes
    group: Any = checkpoint.zarr
    buffer = PROTOTYPE.buffer.from_bytes(b"x")
    with pytest.raises(REFUSALS):
        group["scalar"][...] = 1
    with pytest.raises(REFUSALS):
        group.create_array("new", shape=(3,), dtype="f4")
    with pytest.raises(REFUSALS):
        group.attrs["x"] = 1
    with pytest.raises(REFUSALS):
        del group["scalar"]
    with pytest.raises(ValueError, match="read-only"):
        asyncio.run(view.set("zarr.json", buffer))
    with pytest.raises(ValueError, match="read-only"):
        asyncio.run(view.delete("zarr.json"))
    with pytest.raises(REFUSALS):
        zarr.open_group(view, mode="r+")
    with pytest.raises(REFUSALS):
        zarr.open_group(view, mode="w")
    assert same(group["scalar"][...], STATE["scalar"].whole)


def test_a_missing_pack_is_an_error_and_not_zeros(store: MemoryStore) -> None:
    objects = contents(store)
    key = next(key for key in objects if key.endswith("rank-00001.zip"))
    del objects[key]
    with ckptkit.open(memory_with(objects)) as opened:
        group: Any = opened.zarr
        with pytest.raises(CorruptionError) as caught:
            group["model/even"][...]
        assert key in caught.value.where


def test_a_flipped_byte_is_an_error(store: MemoryStore) -> None:
    with ckptkit.open(flipped(store, STATE["model/deep/c"].whole.tobytes()[:4])) as opened:
        group: Any = opened.zarr
        with pytest.raises(CorruptionError):
            group["model/deep/c"][...]
        assert same(group["scalar"][...], STATE["scalar"].whole)


def test_an_array_named_like_a_chunk_folder_is_an_array() -> None:
    store = MemoryStore()

    def fill(writer: ckptkit.Writer) -> None:
        writer.add("c/c", np.arange(4))
        writer.add("d/c/0", np.array(5))
        writer.add("e/0/c", np.arange(4).reshape(2, 2))

    save_by(store, fill)
    with ckptkit.open(store) as opened:
        group: Any = opened.zarr
        assert group["c/c"][...].tolist() == [0, 1, 2, 3]
        assert group["d/c/0"][...] == 5
        assert group["e/0/c"][...].tolist() == [[0, 1], [2, 3]]
        found = [name for name, node in group.members(None) if isinstance(node, zarr.Array)]
        assert sorted(found) == ["c/c", "d/c/0", "e/0/c"]


def test_views_of_one_checkpoint_are_equal(checkpoint: Checkpoint, store: MemoryStore) -> None:
    assert checkpoint.zarr_store() == checkpoint.zarr_store()
    assert hash(checkpoint.zarr_store()) == hash(checkpoint.zarr_store())
    with ckptkit.open(store) as other:
        assert checkpoint.zarr_store() != other.zarr_store()
    assert checkpoint.location in str(checkpoint.zarr_store())
