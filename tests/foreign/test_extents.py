from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.checkpoint.places import StepFolder
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.errors import FormatError
from ckptkit.foreign import extents
from ckptkit.foreign.contents import manifest_of
from ckptkit.foreign.extents import Extent, ForeignArray, ForeignStep
from ckptkit.model import Box, DType
from ckptkit.storage import MemoryStore

INT16 = DType.of("int16")


def opened(array: ForeignArray, files: dict[str, bytes]) -> Checkpoint:
    store = MemoryStore()
    for key, data in files.items():
        store.put(key, data)
    step = ForeignStep(
        format="test", files={key: len(data) for key, data in files.items()}, arrays=[array]
    )
    return Checkpoint(StepFolder(store), manifest_of(step, b""))


@st.composite
def shapes_and_cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[tuple[int, ...]]]:
    """A shape, boxes that tile it, and for each the order in which its dims lie in the file."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(boxes) - 1))
        box = boxes.pop(place)
        if shape:
            dim = draw(st.integers(0, len(shape) - 1))
            at = draw(st.integers(box.offset[dim], box.stop[dim]))
            boxes += box.split(dim, at)
        else:
            boxes.append(box)
    orders = [tuple(draw(st.permutations(range(len(shape))))) for _ in boxes]
    return shape, boxes, orders


@given(shapes_and_cuts(), st.sampled_from([2, 16, 4 << 20]), st.data())
def test_boxes_in_any_order_give_the_array(
    case: tuple[tuple[int, ...], list[Box], list[tuple[int, ...]]], limit: int, data: st.DataObject
) -> None:
    shape, boxes, orders = case
    values = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int16).reshape(shape)
    file, parts = b"x", []
    for box, order in zip(boxes, orders, strict=True):
        inside: Any = (*box.within(Box.whole(shape)), ...)
        stored = values[inside].transpose(order)
        stored = stored.copy(order="C")
        steps = [0] * len(shape)
        for dim, step in zip(order, np.cumprod([1, *stored.shape[::-1]])[:-1][::-1], strict=True):
            steps[dim] = int(step)
        parts.append(Extent(box, "f", len(file), tuple(steps)))
        file += stored.tobytes()
    extents._cells.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "_CHUNK_BYTES", limit)
        checkpoint = opened(ForeignArray("model/w", shape, INT16, tuple(parts)), {"f": file})
    assert np.array_equal(checkpoint["model/w"][...], values)
    low = [data.draw(st.integers(0, n)) for n in shape]
    high = [data.draw(st.integers(a, n)) for a, n in zip(low, shape, strict=True)]
    index: Any = tuple(map(slice, low, high))
    assert np.array_equal(checkpoint["model/w"][(*index, ...)], values[(*index, ...)])


@given(
    st.lists(st.integers(0, 7), max_size=3).map(tuple),
    st.lists(st.integers(0, 400), max_size=4),
    st.sampled_from([2, 16, 4 << 20]),
)
def test_runs_of_the_flat_array_give_the_array(
    shape: tuple[int, ...], cuts: list[int], limit: int
) -> None:
    values = np.arange(int(np.prod(shape, dtype=int)), dtype=np.int16).reshape(shape)
    ends = sorted({min(cut, values.size) for cut in cuts} | {0, values.size})
    files: dict[str, bytes] = {}
    parts: list[Extent] = []
    flat = values.reshape(-1)
    for number, (low, high) in enumerate(pairwise(ends)):
        files[f"f{number}"] = b"abc" + flat[low:high].tobytes()
        parts.insert(0, Extent(Box((low,), (high - low,)), f"f{number}", 3))
    extents._flat_cells.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extents, "_CHUNK_BYTES", limit)
        array = ForeignArray("model/w", shape, INT16, tuple(parts), is_flat=True)
        checkpoint = opened(array, files)
    assert np.array_equal(checkpoint["model/w"][...], values)


def part(offset: tuple[int, ...], shape: tuple[int, ...], at: int = 0) -> Extent:
    return Extent(Box(offset, shape), "f", at)


@pytest.mark.parametrize(
    ("parts", "flat", "what"),
    [
        ([part((0, 0), (2, 3))], False, "no file has this part"),
        ([part((0, 0), (4, 4))], False, "not inside of"),
        ([part((0,), (4,))], False, "not inside of"),
        ([part((0, 0), (4, 3), 2)], False, "past the end of f"),
        ([part((0,), (12,), 2)], True, "past the end of f"),
        ([part((0,), (11,))], True, "no file has these elements"),
        ([part((1,), (11,))], True, "no file has these elements"),
        ([part((0,), (7,)), part((6,), (6,))], True, "two runs overlap"),
        ([part((0,), (13,))], True, "not inside of"),
        ([], True, "no file has these elements"),
        ([Extent(Box((0,), (12,)), "f", 0, (2,))], True, "lie apart in a file"),
    ],
)
def test_what_does_not_make_the_array_is_refused(
    parts: list[Extent], flat: bool, what: str
) -> None:
    array = ForeignArray("model/w", (4, 3), INT16, tuple(parts), is_flat=flat)
    with pytest.raises(FormatError, match=what):
        opened(array, {"f": bytes(24)})


def test_replicas_are_read_once_and_a_part_of_a_replica_fills_what_is_left() -> None:
    values: npt.NDArray[Any] = np.arange(12, dtype=np.int16).reshape(4, 3)
    parts = [part((0, 0), (2, 3)), part((0, 0), (2, 3)), part((0, 0), (4, 3))]
    array = ForeignArray("model/w", (4, 3), INT16, tuple(parts))
    assert np.array_equal(opened(array, {"f": values.tobytes()})["model/w"][...], values)


def test_a_large_transposed_tensor_is_read_along_its_file() -> None:
    values = np.arange(6 << 20, dtype=np.int32).astype(np.int16).reshape(1 << 10, 6 << 10)
    stored = Extent(Box.whole(values.shape), "f", 0, (1, values.shape[0]))
    array = ForeignArray("model/w", values.shape, INT16, (stored,))
    checkpoint = opened(array, {"f": np.ascontiguousarray(values.T).tobytes()})
    assert checkpoint["model/w"].grid.counts == (1, 2)
    assert np.array_equal(checkpoint["model/w"][5:900, 1000:3000], values[5:900, 1000:3000])


def test_chunks_are_counted_before_any_is_made() -> None:
    """A tensor whose elements are all one has any size, and needs four bytes of a file."""
    box = Box.whole((1 << 60,))
    array = ForeignArray("model/w", box.shape, INT16, (Extent(box, "f", 0, (0,)),))
    with pytest.raises(FormatError, match="too many chunks"):
        opened(array, {"f": bytes(4)})
