"""The zarr.json documents that make a step a plain Zarr v3 hierarchy (FORMAT section 5)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import DType, Grid

DOCUMENT = "zarr.json"


def key_of(name: str) -> str:
    """The key of an array's or group's document; the root group is the empty name."""
    return f"{name}/{DOCUMENT}" if name else DOCUMENT


def chunk_key(name: str, index: tuple[int, ...]) -> str:
    """The key of one chunk."""
    return "/".join([name, "c", *map(str, index)])


def group_document() -> bytes:
    """The document of any group."""
    return _dump({"zarr_format": 3, "node_type": "group", "attributes": {}})


def array_document(array: ArrayInfo, grid: Grid | None = None) -> bytes:
    """The document of an array, as stored or as presented with another grid."""
    grid = grid or array.grid
    codec: dict[str, Any] = {"name": "bytes"}
    if array.dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little"}
    return _dump(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "chunk_grid": _grid(grid),
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": fill_value(array.dtype),
            "codecs": [codec],
            "attributes": {"ckptkit": {"role": array.role}},
        }
    )


def fill_value(dtype: DType) -> Any:
    """Zero as Zarr v3 writes it: in hexadecimal for the 8-bit floats, which strict readers
    demand.
    """
    if dtype.name.startswith("float8"):
        return "0x00"
    if dtype.name.startswith("complex"):
        return [0.0, 0.0]
    if dtype.name == "bool":
        return False
    return 0.0 if "float" in dtype.name else 0


def _grid(grid: Grid) -> dict[str, Any]:
    if grid.is_regular:
        return {"name": "regular", "configuration": {"chunk_shape": list(grid.chunk_shape)}}
    shapes = [
        np.diff([0, *edges, extent]).tolist()
        for extent, edges in zip(grid.shape, grid.edges, strict=True)
    ]
    return {"name": "rectilinear", "configuration": {"kind": "inline", "chunk_shapes": shapes}}


def _dump(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode("ascii")
