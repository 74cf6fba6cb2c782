"""The promise: what was written under one strategy is read under any other, bit for bit."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit import Checkpoint, Strategy
from ckptkit.checkpoint.read import reader
from ckptkit.model import Box, Layout, layout_of
from ckptkit.storage import MemoryStore
from tests.checkpoint.cuts import parallel, placements, tensors
from tests.checkpoint.saving import Tensor, same, save, take

chunk_sizes = st.sampled_from([1, 16, 100, 4 << 20])


@st.composite
def written(draw: st.DrawFn) -> tuple[Strategy, dict[str, Tensor], int]:
    """What to save: a strategy, some tensors cut for it, and the size of chunks."""
    strategy = draw(parallel())
    names = [f"model/{number}" for number in range(draw(st.integers(1, 3)))]
    state = {name: draw(tensors(strategy)) for name in names}
    return strategy, state, draw(chunk_sizes)


def read_as_rank(
    checkpoint: Checkpoint, name: str, layout: Layout, rank: int, *, verify: bool
) -> Any:
    """The part of a rank, every box read straight to its place in the rank's tensor."""
    part = layout.part(rank)
    local = np.zeros(part.shape, checkpoint[name].dtype.numpy)
    wanted = []
    for box, place in zip(part.boxes, part.places, strict=True):
        inside: Any = (*place.within(Box.whole(part.shape)), ...)
        wanted.append((name, box, local[inside]))
    checkpoint.read_many(wanted, verify=verify)
    return local


@given(written(), parallel(), st.data(), st.booleans())
def test_every_part_of_any_other_strategy_is_read_bit_for_bit(
    saved: tuple[Strategy, dict[str, Tensor], int],
    other: Strategy,
    data: st.DataObject,
    verify: bool,
) -> None:
    strategy, state, chunk_bytes = saved
    store = MemoryStore()
    save(store, state, strategy=strategy, chunk_bytes=chunk_bytes)
    assert ckptkit.verify(store) == []
    with ckptkit.open(store) as checkpoint:
        for name, tensor in state.items():
            shape = tensor.whole.shape
            row = list(data.draw(placements(shape, other)).values())
            layout = layout_of(shape, other, [p for p in row if not isinstance(p, str)])
            for rank in range(other.world_size):
                local = read_as_rank(checkpoint, name, layout, rank, verify=verify)
                assert same(local, take(layout.part(rank), tensor.whole))


@given(written())
def test_zarr_shows_the_same_bits(saved: tuple[Strategy, dict[str, Tensor], int]) -> None:
    strategy, state, chunk_bytes = saved
    store = MemoryStore()
    save(store, state, strategy=strategy, chunk_bytes=chunk_bytes)
    with ckptkit.open(store) as checkpoint:
        group = checkpoint.zarr
        for name, tensor in state.items():
            array: Any = group[name]
            assert array.dtype == tensor.whole.dtype
            assert same(np.asarray(array[...]), tensor.whole)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset, lengths = [], []
    for extent in shape:
        start = draw(st.integers(0, extent))
        offset.append(start)
        lengths.append(draw(st.integers(0, extent - start)))
    return Box(tuple(offset), tuple(lengths))


@given(written(), st.data(), st.booleans(), st.sampled_from([1, 1 << 30]))
def test_any_box_is_read_bit_for_bit(
    saved: tuple[Strategy, dict[str, Tensor], int],
    data: st.DataObject,
    verify: bool,
    least_lent: int,
) -> None:
    """Also where the store lends the memory that it lies in."""
    strategy, state, chunk_bytes = saved
    store = MemoryStore()
    save(store, state, strategy=strategy, chunk_bytes=chunk_bytes)
    with ckptkit.open(store) as checkpoint:
        for name, tensor in state.items():
            box = data.draw(boxes(tensor.whole.shape))
            expected = tensor.whole[box.within(Box.whole(tensor.whole.shape))]
            with patch.object(reader, "_LEAST_LENT", least_lent):
                found = checkpoint.read(name, box, verify=verify)
            assert same(found, np.asarray(expected))


@given(written())
def test_each_part_is_the_one_that_the_writer_held(
    saved: tuple[Strategy, dict[str, Tensor], int],
) -> None:
    strategy, state, chunk_bytes = saved
    store = MemoryStore()
    save(store, state, strategy=strategy, chunk_bytes=chunk_bytes)
    with ckptkit.open(store) as checkpoint:
        assert checkpoint.strategy == strategy
        for name, tensor in state.items():
            layout = tensor.layout(strategy)
            for rank in range(strategy.world_size):
                assert checkpoint[name].part(rank) == layout.part(rank)


def test_ranks_that_replicate_write_each_byte_once() -> None:
    store = MemoryStore()
    tensor = Tensor(np.arange(1 << 16, dtype=np.int64))
    save(store, {"model/w": tensor}, strategy="ddp:4", chunk_bytes=1 << 12)
    sizes = [entry.size for entry in store.list() if entry.key.endswith(".zip")]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    assert sum(sizes) < 1.2 * tensor.whole.nbytes
