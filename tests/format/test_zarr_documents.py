from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from ckptkit.format.arrays import (
    GROUP_DOCUMENT,
    ArrayInfo,
    ArrayKind,
    array_document,
    chunk_key,
    key_of,
)
from ckptkit.format.zarr import register
from ckptkit.model import DTYPES, Box, DType, Grid

register()

TENSORSTORE_LACKS = {"complex_float16", "float8_e8m0fnu"}


def info(shape: tuple[int, ...], dtype: str, grid: Grid) -> ArrayInfo:
    return ArrayInfo("model/a", ArrayKind(shape, DType.of(dtype), grid, "param", ()))


def some(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    known = DType.of(dtype)
    if dtype == "bool":
        flags: np.ndarray[Any, Any] = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3 == 0
        return flags
    count = int(np.prod(shape, dtype=int)) * known.itemsize
    raw = (np.arange(count) % 59 + 1).astype(np.uint8).tobytes()
    return np.frombuffer(raw, known.numpy).reshape(shape)


def at(slices: tuple[slice, ...]) -> Any:
    """The index of a view, also of an array without dims."""
    return (*slices, ...)


def written(folder: Path, array: ArrayInfo, value: np.ndarray[Any, Any]) -> Path:
    """What unpacking gives: the documents and the stored chunks of one array."""
    (folder / "model/a").mkdir(parents=True)
    for name in ("", "model"):
        (folder / key_of(name)).write_bytes(GROUP_DOCUMENT)
    (folder / key_of(array.name)).write_bytes(array_document(array))
    grid = array.grid
    for number in range(grid.chunk_count):
        index = grid.index(number)
        stored = np.zeros(grid.stored_shape(index), array.dtype.numpy)
        box = grid.box(index)
        inside = tuple(slice(0, n) for n in box.shape)
        stored[at(inside)] = value[at(box.within(Box.whole(array.shape)))]
        path = folder / chunk_key(array.name, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(stored.tobytes())
    return folder


SHAPES = [((), ()), ((0, 3), (1, 3)), ((5, 7), (2, 4))]


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("shape", "chunks"), SHAPES, ids=str)
def test_zarr_reads_every_dtype(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    value = some(dtype, shape)
    array = info(shape, dtype, Grid.regular(shape, chunks))
    found = zarr.open_group(written(tmp_path, array, value), mode="r")["model/a"]
    assert isinstance(found, zarr.Array)
    read = np.asarray(found[...])
    assert (read.dtype, read.shape) == (value.dtype, shape)
    assert read.tobytes() == value.tobytes()
    assert found.attrs["ckptkit"] == {"role": "param"}


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - TENSORSTORE_LACKS))
@pytest.mark.parametrize(("shape", "chunks"), SHAPES, ids=str)
def test_tensorstore_reads_every_dtype_it_knows(
    tmp_path: Path, dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    value = some(dtype, shape)
    written(tmp_path, info(shape, dtype, Grid.regular(shape, chunks)), value)
    store = {"driver": "file", "path": str(tmp_path / "model/a")}
    found = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    read = found.read().result()
    assert read.shape == shape
    assert np.asarray(read).tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_chunk_that_is_not_there_reads_as_zeros_elsewhere(tmp_path: Path, dtype: str) -> None:
    # Why ckptkit never reads through these documents; and that the fill value is one zarr takes.
    array = info((2,), dtype, Grid.regular((2,), (2,)))
    written(tmp_path, array, some(dtype, (2,)))
    (tmp_path / "model/a/c/0").unlink()
    found = zarr.open_group(tmp_path, mode="r")["model/a"]
    assert isinstance(found, zarr.Array)
    read = np.asarray(found[...])
    assert read.tobytes() == bytes(2 * array.dtype.itemsize)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_array_document_is_the_one_of_the_format(dtype: str) -> None:
    document = json.loads(array_document(info((5, 7), dtype, Grid.regular((5, 7), (2, 4)))))
    assert list(document.items()) == [
        ("zarr_format", 3),
        ("node_type", "array"),
        ("shape", [5, 7]),
        ("data_type", dtype),
        ("chunk_grid", {"name": "regular", "configuration": {"chunk_shape": [2, 4]}}),
        ("chunk_key_encoding", {"name": "default", "configuration": {"separator": "/"}}),
        ("fill_value", 0.0),
        ("codecs", [{"name": "bytes", "configuration": {"endian": "little"}}]),
        ("attributes", {"ckptkit": {"role": "param"}}),
    ]


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES.values() if d.itemsize == 1])
def test_elements_of_one_byte_have_no_byte_order(dtype: str) -> None:
    document = json.loads(array_document(info((2,), dtype, Grid.regular((2,), (2,)))))
    assert document["codecs"] == [{"name": "bytes"}]


def test_a_rectilinear_document_lists_the_sizes_of_the_chunks_inline() -> None:
    grid = Grid.rectilinear((5, 7, 3), ((1, 3), (), (2,)))
    document = json.loads(array_document(info((5, 7, 3), "int8", grid)))
    assert document["chunk_grid"] == {
        "name": "rectilinear",
        "configuration": {"kind": "inline", "chunk_shapes": [[1, 2, 2], [7], [2, 1]]},
    }
    for extent, sizes in zip(
        (5, 7, 3), document["chunk_grid"]["configuration"]["chunk_shapes"], strict=True
    ):
        assert sum(sizes) == extent


def test_a_document_can_present_another_grid_than_the_stored_one() -> None:
    array = info((5,), "int8", Grid.rectilinear((5,), ((1, 3),)))
    document = json.loads(array_document(array, Grid.regular((5,), (4,))))
    assert document["chunk_grid"]["configuration"] == {"chunk_shape": [4]}


def test_documents_and_chunks_have_the_keys_of_zarr() -> None:
    assert key_of("") == "zarr.json"
    assert key_of("model/a") == "model/a/zarr.json"
    assert chunk_key("model/a", (0, 12)) == "model/a/c/0/12"
    assert chunk_key("model/a", ()) == "model/a/c"
    assert json.loads(GROUP_DOCUMENT) == {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {},
    }
