"""Where an array may be read to, and what indexing selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit import Checkpoint
from ckptkit.errors import LayoutError, NotFoundError
from ckptkit.model import Box
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Tensor, Values, bits, random_values, same, save
from tests.storage.counting import CountingStore

WHOLE = random_values((12, 10, 3), "float32")
HALF = random_values((8,), "float16")


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    store = MemoryStore()
    state = {
        "w": Tensor(WHOLE, {"fsdp": "shard(1)"}),
        "half": Tensor(HALF),
        "scalar": Tensor(np.array(2.5)),
        "empty": Tensor(np.zeros((0, 4), np.int8)),
    }
    save(store, state, strategy="fsdp:3", chunk_bytes=64)
    with ckptkit.open(store) as opened:
        yield opened


TARGETS: dict[str, Callable[[], Values]] = {
    "contiguous": lambda: np.zeros(WHOLE.shape, "f4"),
    "Fortran order": lambda: np.zeros(WHOLE.shape, "f4", order="F"),
    "strided": lambda: np.zeros((24, 10, 6), "f4")[::2, :, 1::2],
    "backwards": lambda: np.zeros(WHOLE.shape, "f4")[::-1, :, ::-1],
    "raw elements": lambda: np.zeros(WHOLE.shape, "u4"),
    "unaligned": lambda: np.zeros(WHOLE.nbytes + 1, "u1")[1:].view("f4").reshape(WHOLE.shape),
}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", TARGETS)
def test_memory_of_any_order_is_filled(checkpoint: Checkpoint, kind: str, verify: bool) -> None:
    target = TARGETS[kind]()
    assert checkpoint.read("w", out=target, verify=verify) is target
    assert np.array_equal(bits(target), bits(WHOLE))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("w", np.zeros((12, 10), "f4")),
        ("w", np.zeros((12, 10, 4), "f4")),
        ("w", np.zeros(WHOLE.size, "f4")),
        ("w", np.zeros(WHOLE.shape, "f8")),
        ("w", np.zeros(WHOLE.shape, "f2")),
        ("scalar", np.zeros(1)),
        ("half", np.zeros(8, "f4")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.shape} {value.dtype}",
)
def test_memory_of_another_shape_or_size_is_refused(
    checkpoint: Checkpoint, name: str, target: Values
) -> None:
    with pytest.raises(LayoutError) as caught:
        checkpoint.read(name, out=target)
    assert caught.value.where == name
    assert caught.value.has_value
    assert not target.any()


@pytest.mark.parametrize(
    ("name", "dtype"), [("w", ">f4"), ("half", ml_dtypes.bfloat16), ("half", ">u2")], ids=str
)
def test_memory_whose_elements_mean_something_else_is_refused(
    checkpoint: Checkpoint, name: str, dtype: Any
) -> None:
    target = np.zeros(checkpoint[name].shape, dtype)
    with pytest.raises(LayoutError):
        checkpoint.read(name, out=target)


def test_read_only_memory_is_refused(checkpoint: Checkpoint) -> None:
    target = np.zeros(WHOLE.shape, "f4")
    target.flags.writeable = False
    with pytest.raises(LayoutError):
        checkpoint.read("w", out=target)


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0, 0), (13, 10, 3)),
        Box((12, 0, 0), (1, 1, 1)),
        Box((0, 0), (12, 10)),
        Box((0, 0, 0), (1, 1, 1 << 40)),
        Box((1 << 61, 0, 0), (1, 1, 1)),
    ],
    ids=str,
)
def test_a_box_outside_of_the_array_is_refused(checkpoint: Checkpoint, box: Box) -> None:
    with pytest.raises(LayoutError):
        checkpoint.read("w", box, out=np.zeros(1, "f4"))
    with pytest.raises(LayoutError):
        checkpoint.read("w", box)


def test_what_is_not_there_is_not_found(checkpoint: Checkpoint) -> None:
    for read in (checkpoint.read, checkpoint.__getitem__):
        with pytest.raises(NotFoundError) as caught:
            read("model/nothing")
        assert "model/nothing" in str(caught.value)
        assert caught.value.hint
    assert "model/nothing" not in checkpoint
    assert "w" in checkpoint


items = st.integers(-12, 11) | st.slices(12) | st.just(...)


@given(st.lists(items, max_size=4).map(tuple))
def test_indexing_selects_what_numpy_selects(checkpoint: Checkpoint, index: Any) -> None:
    try:
        expected = WHOLE[index]
    except IndexError:
        with pytest.raises((IndexError, LayoutError)):
            checkpoint["w"][index]
    else:
        assert same(np.asarray(checkpoint["w"][index]), np.asarray(expected))


@pytest.mark.parametrize("index", [None, "a", 1.5, True, [1, 2], np.array([1, 2]), (0, None)])
def test_other_indices_are_refused(checkpoint: Checkpoint, index: Any) -> None:
    with pytest.raises(LayoutError):
        checkpoint["w"][index]


def test_an_array_is_an_array_for_numpy(checkpoint: Checkpoint) -> None:
    assert same(np.asarray(checkpoint["w"]), WHOLE)
    assert np.asarray(checkpoint["half"], dtype="f8").dtype == "f8"
    assert np.asarray(checkpoint["scalar"]).shape == ()
    assert checkpoint["scalar"][()] == 2.5
    assert checkpoint["empty"][...].shape == (0, 4)
    with pytest.raises(LayoutError):
        np.asarray(checkpoint["w"], copy=False)


def test_many_boxes_are_read_at_once(checkpoint: Checkpoint) -> None:
    out = np.zeros((2, *WHOLE.shape), "f4")
    rows = [("w", Box((row, 0, 0), (1, 10, 3)), out[0, row : row + 1]) for row in range(12)]
    seen: list[int] = []
    checkpoint.read_many(
        [*rows, ("w", Box.whole(WHOLE.shape), out[1])], threads=3, progress=seen.append
    )
    assert same(out[0], WHOLE)
    assert same(out[1], WHOLE)
    assert sum(seen) > 0
    checkpoint.read_many([])


def test_closing_twice_and_reading_again_are_fine() -> None:
    store = MemoryStore()
    save(store, {"w": Tensor(WHOLE)})
    opened = ckptkit.open(store)
    opened.close()
    opened.close()
    assert same(opened.read("w"), WHOLE)
    opened.close()


def test_without_checks_only_the_bytes_that_are_needed_are_read() -> None:
    store = CountingStore(MemoryStore())
    save(store, {"w": Tensor(random_values((1 << 20,), "uint8"))})
    with ckptkit.open(store) as opened:
        store.reset()
        opened.read("w", Box((5000,), (1000,)), verify=False)
        assert store.bytes_read == 1000
