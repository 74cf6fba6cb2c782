"""Chunk tables: packed integer columns, never an object per chunk (FORMAT section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import FormatError
from ckptkit.model.document import Fields

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

MAX_ROWS = (1 << 32) - 1  # of a table: one is one chunk


def columns_to_doc(columns: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    """A document of little-endian columns of one length."""
    count = len(next(iter(columns.values())))
    packed = {
        name: column.astype(column.dtype.newbyteorder("<")).tobytes()
        for name, column in columns.items()
    }
    return {"count": count, **packed}


def columns_from_doc(value: object, where: str, names: Sequence[str]) -> dict[str, Any]:
    """The columns of a document, as views of its bytes, once their lengths are proven."""
    fields = Fields(value, where)
    count = fields.integer("count", below=MAX_ROWS + 1)
    columns = {}
    for name in names:
        dtype = np.dtype("<u8" if name in ("offset", "length", "chunk") else "<u4")
        data = fields.bytes(name)
        if len(data) != count * dtype.itemsize:
            raise FormatError(
                f"{len(data)} bytes are not {count} values of {dtype.itemsize}",
                where=fields.at(name),
            )
        columns[name] = np.frombuffer(data, dtype=dtype)
    fields.finish()
    return columns


def check_placed(
    pack: U32, offset: U64, length: U64, pack_sizes: Sequence[int], where: str
) -> None:
    """Every chunk lies inside its pack and apart from every other one."""
    if not len(pack):
        return
    if int(pack.max()) >= len(pack_sizes):
        raise FormatError(
            "a chunk in a pack that is not listed", where=where, value=int(pack.max())
        )
    sizes = np.array(pack_sizes, dtype=np.uint64)[pack]
    # The numbers are unsigned: `offset + length` may wrap, and so may `sizes - offset`.
    outside = (offset > sizes) | (length > sizes - np.minimum(offset, sizes))
    if outside.any():
        row = int(outside.argmax())
        raise FormatError(
            f"a chunk reaches past the end of its pack of {int(sizes[row])} bytes",
            where=f"{where}.{row}",
            value=(int(offset[row]), int(length[row])),
        )
    order = np.lexsort((offset, pack))
    same = pack[order][1:] == pack[order][:-1]
    clash = same & (offset[order][:-1] + length[order][:-1] > offset[order][1:])
    if clash.any():
        row = int(order[int(clash.argmax()) + 1])
        raise FormatError(
            "two chunks overlap in their pack", where=f"{where}.{row}", value=int(offset[row])
        )
