"""Chunks that lie side by side, out of one request into the rows of a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.reader import ReadPlan, Wanted, plan_read
from ckptkit.errors import CorruptionError
from ckptkit.model import Box
from ckptkit.storage import MemoryStore, Store
from tests.checkpoint.remote import RemoteStore
from tests.checkpoint.saving import Tensor, memory_with, random_values, same, save

CHUNK_BYTES = 4096
# No multiple of a chunk, so that requests end in the middle of those side by side.
REQUEST_BYTES = 50_000
STATE = {
    "wide": Tensor(random_values((64, 8192))),
    "deep": Tensor(random_values((8, 48, 256), seed=1)),
    "flat": Tensor(random_values((5000,), seed=2)),
    # Among names of all lengths are some whose chunks are not at equal distances.
    **{"x" * n: Tensor(random_values((2, 16384), "int8", seed=n)) for n in range(1, 65)},
}


def hasty(store: RemoteStore) -> RemoteStore:
    """The same store, which likes short requests."""
    store._abilities = replace(store.abilities, request_bytes=REQUEST_BYTES, gap_bytes=2048)
    return store


@pytest.fixture(scope="module")
def made() -> RemoteStore:
    """A step whose arrays are cut into many columns."""
    store = RemoteStore()
    save(store, STATE, chunk_bytes=CHUNK_BYTES // 4)
    return hasty(store)


@pytest.fixture
def step(made: RemoteStore) -> Iterator[Checkpoint]:
    """It, open."""
    with ckptkit.open(made) as checkpoint:
        yield checkpoint


def planned(step: Checkpoint, name: str, box: Box) -> ReadPlan:
    """How a box is read."""
    target = np.empty(box.shape, STATE[name].whole.dtype)
    place = [array.name for array in step.manifest.arrays].index(name)
    wanted = Wanted(place, box, target.view(step[name].dtype.bits))
    return plan_read(step.packs, [wanted], step.packs.pace, verify=True)


@pytest.mark.parametrize("verify", [True, False])
def test_any_part_arrives(step: Checkpoint, verify: bool) -> None:
    for name, tensor in STATE.items():
        for box in parts_of(tensor.whole.shape):
            values = step.read(name, box, verify=verify)
            assert same(values, tensor.whole[box.within(Box.whole(tensor.whole.shape))]), box


def parts_of(shape: tuple[int, ...]) -> Iterator[Box]:
    """All of it, some that begin and end within chunks, and one that ends with them."""
    yield Box.whole(shape)
    yield Box(tuple(n // 3 for n in shape), tuple(n // 2 for n in shape))
    yield Box((0,) * len(shape), (*shape[:-1], shape[-1] // 2))
    yield Box((*(0,) * (len(shape) - 1), 1), (*shape[:-1], shape[-1] - 1))


def test_some_are_brought_at_once_from_one_request_at_equal_distances(step: Checkpoint) -> None:
    at_once, uneven = 0, 0
    for name, tensor in STATE.items():
        job = planned(step, name, Box.whole(tensor.whole.shape))
        at_once += len(job.bands)
        for first, last in job.bands.items():
            assert any(a <= first and last <= b for a, b in job.runs)
            assert len(set(np.diff(job.start[first:last]).tolist())) == 1
        uneven += len(set(np.diff(job.start).tolist())) > 1
    assert at_once > len(STATE)
    assert uneven


@pytest.mark.parametrize("kind", [MemoryStore, RemoteStore])
def test_empty_parts_are_read_with_others(kind: Callable[[], Store]) -> None:
    store = kind()
    state = {"none": Tensor(random_values((0, 2))), "some": Tensor(random_values((4, 4)))}
    save(store, state)
    parts = {
        ("none", Box.whole((0, 2))),
        ("some", Box((2, 0), (0, 4))),
        ("some", Box((0, 3), (4, 0))),
        ("some", Box.whole((4, 4))),
    }
    wanted = [(name, box, np.zeros(box.shape, np.float32)) for name, box in parts]
    with ckptkit.open(store) as checkpoint:
        checkpoint.read_many(wanted)
    for name, box, values in wanted:
        whole = state[name].whole
        assert same(values, whole[box.within(Box.whole(whole.shape))])


def test_a_target_that_is_no_block_of_memory_is_filled(step: Checkpoint) -> None:
    whole = STATE["wide"].whole
    memory = np.zeros((whole.shape[1] + 3, whole.shape[0]), whole.dtype).T
    step.read("wide", out=memory[:, 3:])
    assert same(memory[:, 3:], whole)
    assert not memory[:, :3].any()
    every_other = np.zeros((2 * whole.shape[0], whole.shape[1]), whole.dtype)
    step.read("wide", out=every_other[::2])
    assert same(every_other[::2], whole)
    assert not every_other[1::2].any()


def test_the_damaged_one_among_them_is_named(made: RemoteStore) -> None:
    objects = {entry.key: made.read(entry.key) for entry in made.list()}
    pack = next(key for key in objects if key.endswith(".zip"))
    with ckptkit.open(made) as checkpoint:
        job = planned(checkpoint, "wide", Box.whole((64, 8192)))
    first, last = max(job.bands.items(), key=lambda band: band[1] - band[0])
    assert last - first > 2
    for row in (first, first + 1, last - 1):
        damaged = bytearray(objects[pack])
        damaged[int(job.stop[row]) - 1] ^= 1
        store = hasty(RemoteStore(memory_with(objects | {pack: bytes(damaged)})))
        with ckptkit.open(store) as checkpoint, pytest.raises(CorruptionError) as caught:
            checkpoint.read("wide")
        assert f"at byte {int(job.start[row])}" in str(caught.value)
