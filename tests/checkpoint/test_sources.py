"""What a rank may pass to `add`: any memory that holds its part, and nothing else."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import ckptkit
from ckptkit import Writer
from ckptkit.errors import CkptkitError, LayoutError, UnsupportedTypeError, UsageError
from ckptkit.model import DTYPES
from ckptkit.storage import MemoryStore
from tests.checkpoint.cuts import dtypes
from tests.checkpoint.saving import Values, random_values, same, save_by

VALUES = random_values((6, 10), "float32")


def written_alone(data: object, **options: Any) -> Values:
    """What is read back of an array that one writer wrote."""
    store = MemoryStore()
    with Writer(store, step=1, chunk_bytes=options.pop("chunk_bytes", 64)) as writer:
        writer.add("w", data, **options)
    with ckptkit.open(store) as checkpoint:
        return checkpoint.read("w")


def _spread(values: Values) -> Values:
    """The values in every third element of a larger array."""
    larger = np.zeros(tuple(3 * extent for extent in values.shape), values.dtype)
    view: Values = larger[tuple(slice(1, None, 3) for _ in values.shape)]
    view[...] = values
    return view


SOURCES: dict[str, Callable[[Values], Values]] = {
    "contiguous": lambda values: values,
    "Fortran order": np.asfortranarray,
    "strided": _spread,
    "backwards": lambda values: np.ascontiguousarray(values[::-1, ::-1])[::-1, ::-1],
    "transposed": lambda values: np.ascontiguousarray(values.T).T,
    "read-only": lambda values: np.frombuffer(values.tobytes(), values.dtype).reshape(values.shape),
    "unaligned": lambda values: (
        np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:]
        .view(values.dtype)
        .reshape(values.shape)
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex128", "complex_float16", "bool"])
@pytest.mark.parametrize("kind", SOURCES)
def test_memory_of_any_order_is_written_as_the_values_it_shows(kind: str, dtype: str) -> None:
    values = random_values((6, 10), dtype)
    assert same(written_alone(SOURCES[kind](values)), values)


def test_what_is_broadcast_is_written_as_the_values_it_shows() -> None:
    row = random_values((10,), "float32")
    assert same(written_alone(np.broadcast_to(row, (6, 10))), np.tile(row, (6, 1)))


@given(dtypes)
def test_raw_bytes_are_written_under_the_dtype_that_is_named(dtype: str) -> None:
    values = random_values((4, 3), dtype)
    raw = values.tobytes()
    for data in (raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, np.uint8)):
        assert same(written_alone(data, shape=(4, 3), dtype=dtype), values)


def test_raw_elements_are_written_under_the_dtype_that_is_named() -> None:
    values = random_values((4, 3), "bfloat16")
    assert same(written_alone(values.view(np.uint16), dtype="bfloat16"), values)
    assert same(written_alone(values.view(np.int16), dtype=ml_dtypes.bfloat16), values)


def test_other_buffers_are_written_under_the_dtype_that_is_named() -> None:
    numbers = array.array("d", [1.0, -2.5, 3.0])
    assert written_alone(numbers, shape=(3,), dtype="float64").tolist() == [1.0, -2.5, 3.0]


def test_bytes_of_a_scalar_and_of_nothing_are_accepted() -> None:
    assert written_alone(b"\0\0\x80?", shape=(), dtype="float32") == np.float32(1)
    assert written_alone(b"", shape=(0, 4), dtype="float32").shape == (0, 4)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (VALUES[:5], {"shape": (6, 10)}),
        (VALUES.T, {"shape": (6, 10)}),
        (VALUES.reshape(10, 6), {"shape": (6, 10)}),
        (VALUES, {"dtype": "float64"}),
        (VALUES, {"dtype": "float16"}),
        (VALUES.tobytes()[:-1], {"shape": (6, 10), "dtype": "float32"}),
        (VALUES.tobytes() + b"1234", {"shape": (6, 10), "dtype": "float32"}),
        (VALUES.tobytes(), {"shape": (6, 10), "dtype": "float64"}),
        (np.asfortranarray(VALUES.view(np.uint8)), {"shape": (6, 10), "dtype": "float32"}),
    ],
    ids=str,
)
def test_memory_of_another_size_is_refused(data: object, options: dict[str, Any]) -> None:
    with pytest.raises(LayoutError) as caught:
        written_alone(data, **options)
    assert caught.value.where == "w"


@pytest.mark.parametrize("named", [None, "float32"])
def test_big_endian_memory_is_refused(named: str | None) -> None:
    with pytest.raises(CkptkitError) as caught:
        written_alone(VALUES.astype(">f4"), dtype=named)
    assert caught.value.where == "w"


@pytest.mark.parametrize("named", ["float32", "int32"])
def test_big_endian_buffers_are_refused(named: str) -> None:
    with pytest.raises(CkptkitError):
        written_alone(memoryview(VALUES.astype(">f4").data), shape=(6, 10), dtype=named)


@pytest.mark.parametrize(
    "values", [np.array(["a"]), np.array([object()]), np.array([1], "M8[s]"), np.array([b"ab"])]
)
def test_elements_that_no_dtype_describes_are_refused(values: Values) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        written_alone(values)
    assert caught.value.where == "w"


@pytest.mark.parametrize("data", ["text", 3, 2.5, [1, 2], {"a": 1}, object()])
def test_what_has_no_memory_is_refused(data: object) -> None:
    with pytest.raises(UsageError):
        written_alone(data, shape=(1,), dtype="float32")


def test_nothing_at_all_is_refused_of_a_rank_that_holds_a_part() -> None:
    with pytest.raises(UsageError) as caught:
        written_alone(None, shape=(2,), dtype="float32")
    assert caught.value.where == "w"


@pytest.mark.parametrize("options", [{"shape": (3,)}, {"dtype": "float32"}])
def test_what_cannot_be_seen_has_to_be_said(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        written_alone(b"123456789012", **options)
    assert caught.value.hint


def test_a_rank_that_holds_nothing_passes_nothing() -> None:
    def fill(writer: Writer) -> None:
        mine = np.arange(5.0) if writer.rank == 1 else None
        writer.add("w", mine, shape=(5,), dtype="float64", placements={"zero1": "owner(1)"})

    store = MemoryStore()
    save_by(store, fill, strategy="zero1:3")
    with ckptkit.open(store) as checkpoint:
        assert checkpoint["w"][...].tolist() == [0, 1, 2, 3, 4]
    assert ckptkit.verify(store) == []


def test_all_dtypes_have_a_way_in() -> None:
    for name, dtype in DTYPES.items():
        values = random_values((3,), name)
        assert same(written_alone(values), values)
        assert same(written_alone(values, dtype=dtype), values)
