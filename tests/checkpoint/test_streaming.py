from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.stream import Limits, bands, stored_arrays, stream
from ckptkit.errors import CorruptionError, UsageError
from ckptkit.model import Box, Grid
from tests.checkpoint.saving import Tensor, random_values, same, save
from tests.checkpoint.sharded import saved

MIB = 1 << 20


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> Grid:
    if draw(st.booleans()):
        return Grid.regular(shape, tuple(draw(st.integers(1, n + 2)) for n in shape))
    borders = [st.sets(st.integers(1, max(1, n - 1)), max_size=4 if n > 1 else 0) for n in shape]
    return Grid.rectilinear(shape, tuple(tuple(sorted(draw(each))) for each in borders))


@given(st.data())
def test_bands_are_all_elements_in_order_and_never_too_large(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 9), max_size=4).map(tuple))
    cuts = data.draw(st.lists(grids(shape), min_size=1, max_size=2))
    wanted, more = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 300))
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = list(bands(cuts, wanted, wanted + more))
    pieces = [whole[box.within(Box.whole(shape))].reshape(-1) for box in found]
    assert np.array_equal(np.concatenate([np.zeros(0, int), *pieces]), whole.reshape(-1))
    assert all(0 < box.size <= wanted + more for box in found)


def test_bands_end_where_both_sides_have_a_border() -> None:
    a, b = Grid.regular((96, 10), (8, 5)), Grid.regular((96, 10), (12, 10))
    assert [box.shape[0] for box in bands([a, b], 300, 400)] == [24] * 4
    assert [box.shape[0] for box in bands([a], 300, 400)] == [24] * 4
    assert [box.shape[0] for box in bands([b], 130, 400)] == [12] * 8
    # Larger than wanted, rather than a chunk twice; and cut only if there is no other way.
    assert [box.shape[0] for box in bands([b], 50, 130)] == [12] * 8
    assert [box.shape[0] for box in bands([b], 50, 70)][:4] == [7, 5, 7, 5]


def test_an_array_larger_than_a_row_may_be_is_streamed_below_it() -> None:
    grid = Grid.regular((2, 3, 100), (2, 3, 40))
    found = list(bands([grid], 40, 50))
    assert [(box.offset[:2], box.shape) for box in found[:3]] == [
        ((0, 0), (1, 1, 40)),
        ((0, 0), (1, 1, 40)),
        ((0, 0), (1, 1, 20)),
    ]
    assert len(found) == 18


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 11, 1 << 11), (1, 1 << 22), (1 << 20, 4)])
@pytest.mark.parametrize("chunk_bytes", [1 << 40, 3 * MIB])
def test_what_is_streamed_is_what_was_written(shape: tuple[int, ...], chunk_bytes: int) -> None:
    values = random_values(shape)
    store = saved({"model/w": Tensor(values)}, chunk_bytes=chunk_bytes)
    limits = Limits.of(16 * MIB, 3)
    assert limits.workers == 1
    found: list[np.ndarray[Any, Any]] = []
    with ckptkit.open(store) as checkpoint:
        arrays = stored_arrays(checkpoint, limits.chunk_bytes)
        read = [[arrays["model/w"]]]
        stream(read, lambda _, sides: found.append(sides[0].reshape(-1).copy()), limits)
    assert max(piece.nbytes for piece in found) <= limits.band_bytes
    assert same(np.concatenate(found).view(values.dtype).reshape(shape), values)


def test_bands_come_in_order_from_many_threads() -> None:
    state = {f"model/{i}": Tensor(random_values((1 << 13, 1 << 10), "uint8", i)) for i in range(3)}
    store = saved(state, chunk_bytes=64 << 10)
    limits = Limits(6, 100 << 10, 4 * MIB)
    order: dict[int, list[int]] = {}
    with ckptkit.open(store) as checkpoint:
        arrays = stored_arrays(checkpoint, limits.chunk_bytes)
        items = [[arrays[name]] for name in state]
        use = lambda band, _: order.setdefault(band.item, []).append(band.number)  # noqa: E731
        stream(items, use, limits, ordered=True)
    assert all(order[item] == sorted(order[item]) and len(order[item]) > 50 for item in range(3))


def test_small_arrays_are_read_together_and_each_is_what_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = [((), "float32"), ((3,), "uint8"), ((5, 7), "complex128"), ((0, 4), "int16")]
    kinds += [((129,), "float16"), ((1 << 11,), "float64")]
    state = {
        f"model/{i}": Tensor(random_values(*kinds[i % len(kinds)], i))
        for i in range(6 * len(kinds))
    }
    store = saved(state, chunk_bytes=64)
    reads: list[int] = []
    read_many = Checkpoint.read_many

    def counted(self: Checkpoint, wanted: Any, **options: Any) -> None:
        reads.append(len(wanted))
        read_many(self, wanted, **options)

    monkeypatch.setattr(Checkpoint, "read_many", counted)
    found: dict[str, list[np.ndarray[Any, Any]]] = {name: [] for name in state}
    names = list(state)

    def use(band: Any, sides: Any) -> None:
        assert same(sides[0], sides[1])
        found[names[band.item]].append(sides[0].reshape(-1).copy())

    limits = Limits(3, 32 << 10, 1 << 20)
    with ckptkit.open(store) as one, ckptkit.open(store) as other:
        sides = [stored_arrays(each, limits.chunk_bytes) for each in (one, other)]
        stream([[side[name] for side in sides] for name in names], use, limits, ordered=True)
    for name, tensor in state.items():
        empty = np.empty(0, np.uint8)
        raw = np.concatenate([empty, *(each.view(np.uint8) for each in found[name])])
        assert raw.tobytes() == tensor.whole.tobytes(), name
    assert sum(reads) == 2 * sum(tensor.whole.size > 0 for tensor in state.values())
    assert len(reads) < sum(reads) / 3


def test_one_damaged_chunk_among_many_small_arrays_is_found() -> None:
    state = {f"model/{i}": Tensor(random_values((16,), "float32", i)) for i in range(20)}
    store = saved(state)
    with ckptkit.open(store) as checkpoint:
        row = checkpoint.first_row("model/7")
        at = int(checkpoint.manifest.offset[row])
        (key,) = [entry.key for entry in store.list("") if entry.key.endswith(".zip")]
    pack = bytearray(store.read(key))
    pack[at] ^= 1
    store.put(key, bytes(pack))
    with pytest.raises(CorruptionError, match="model/7"):
        ckptkit.digest(store)


def test_an_error_in_one_thread_ends_those_that_wait_for_it() -> None:
    store = saved({"model/w": Tensor(random_values((1 << 12, 1 << 10), "uint8"))}, chunk_bytes=4096)

    def fail(band: Any, _: Any) -> None:
        if band.number == 3:
            raise KeyError(band.number)

    limits = Limits(6, 64 << 10, 4 * MIB)
    with ckptkit.open(store) as checkpoint:
        arrays = stored_arrays(checkpoint, limits.chunk_bytes)
        with pytest.raises(KeyError):
            stream([[arrays["model/w"]]], fail, limits, ordered=True)


def test_limits_keep_to_the_memory() -> None:
    for memory in (16 * MIB, 100 * MIB, 256 * MIB, 4096 * MIB):
        for sides in (1, 2):
            limits = Limits.of(memory, 8, sides=sides)
            buffers = sides * limits.band_bytes + max(limits.band_bytes, limits.chunk_bytes)
            assert limits.workers * (buffers + 4 * MIB) <= memory
    assert Limits.of(4096 * MIB, 8).workers == 8
    with pytest.raises(UsageError, match="too little memory"):
        Limits.of(16 * MIB - 1, None)
    with pytest.raises(UsageError, match="at least one thread"):
        Limits.of(16 * MIB, 0)


def test_a_chunk_of_mostly_padding_is_read_in_little_memory(tmp_path: Any) -> None:
    state = {"model/w": Tensor(random_values((33, 3)))}
    save(tmp_path, state)
    with ckptkit.open(tmp_path) as checkpoint:
        arrays = stored_arrays(checkpoint, 64)
        out = np.empty((33, 3), "<u4")
        arrays["model/w"].fill([("model/w", Box.whole((33, 3)), out)])
    assert out.tobytes() == state["model/w"].whole.tobytes()
