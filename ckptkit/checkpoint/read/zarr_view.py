"""A step as a read-only Zarr v3 store: for zarr-python and everything that stands on it, never
our own data path.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.core.buffer import Buffer, BufferPrototype

from ckptkit.errors import UsageError
from ckptkit.format.arrays import (
    DOCUMENT,
    ArrayInfo,
    array_document,
    chunk_key,
    group_document,
    key_of,
    presented_grid,
)
from ckptkit.format.names import ancestors
from ckptkit.model import Box

Values = npt.NDArray[Any]

_NUMBER = re.compile(r"0|[1-9][0-9]{0,18}")


class ZarrView(Store):
    """Every key of a step, tied arrays under each of their names; a chunk that is not there is
    an error, never a fill value.
    """

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(
        self, location: str, arrays: Mapping[str, ArrayInfo], read: Callable[[str, Box], Values]
    ) -> None:
        """A view of the step at `location`, whose elements `read` gives, box by box."""
        super().__init__(read_only=True)
        self._location = location
        self._arrays = arrays
        self._read = read
        self._groups = {g for name in arrays for g in ancestors(name)} | {""}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZarrView) and other._read == self._read

    def __hash__(self) -> int:
        return hash(self._read)

    def __str__(self) -> str:
        return f"ckptkit:{self._location}"

    def read_key(self, key: str) -> bytes | None:
        """The bytes of a key, or None where a step has no such key."""
        name, _, last = key.rpartition("/")
        if last == DOCUMENT and key == key_of(name):
            if name in self._groups:
                return group_document()
            info = self._arrays.get(name)
            return None if info is None else array_document(info, presented_grid(info))
        chunk = self._chunk(key)
        if chunk is None:
            return None
        name, index = chunk
        array = self._arrays[name]
        grid = presented_grid(array)
        box = grid.box(index)
        stored = np.zeros(grid.chunk_shape, dtype=array.dtype.bits)
        inside: Any = (*(slice(0, extent) for extent in box.shape), ...)
        stored[inside] = self._read(name, box).view(array.dtype.bits)
        return stored.tobytes()

    def keys(self) -> Iterable[str]:
        """All keys."""
        yield from map(key_of, sorted(self._groups))
        for name in self._arrays:
            yield from self._keys_of(name)

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The value of a key, or a range of it."""
        data = await asyncio.to_thread(self.read_key, key)
        if data is None:
            return None
        part = slice(None)
        match byte_range:
            case RangeByteRequest(start, end):
                part = slice(start, end)
            case OffsetByteRequest(offset):
                part = slice(offset, None)
            case SuffixByteRequest(suffix):
                part = slice(max(0, len(data) - suffix), None)
        return prototype.buffer.from_bytes(data[part])

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Several values or ranges."""
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def exists(self, key: str) -> bool:
        """Whether a step has the key."""
        name, _, last = key.rpartition("/")
        if last == DOCUMENT and key == key_of(name):
            return name in self._groups or name in self._arrays
        return self._chunk(key) is not None

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self.list_prefix("")

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """All keys that begin so."""
        for key in self.keys():
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names directly below a prefix."""
        start = f"{prefix.rstrip('/')}/" if prefix else ""
        name, mark, _ = f"/{start}".rpartition("/c/")
        if mark and name[1:] in self._arrays:
            keys: Iterable[str] = self._keys_of(name[1:])
        else:
            # Of the chunks only that there are some: a step may have millions.
            with_chunks = (key for key, array in self._arrays.items() if array.grid.chunk_count)
            nodes = map(key_of, chain(self._groups, self._arrays))
            keys = chain(nodes, (f"{key}/c" for key in with_chunks))
        seen = {key[len(start) :].partition("/")[0] for key in keys if key.startswith(start)}
        for child in sorted(seen):
            yield child

    async def set(self, key: str, value: Buffer) -> None:  # noqa: ARG002
        """Refused: a step never changes."""
        raise UsageError("a checkpoint is read-only", where=str(self), value=key)

    async def delete(self, key: str) -> None:
        """Refused: a step never changes."""
        raise UsageError("a checkpoint is read-only", where=str(self), value=key)

    def _keys_of(self, name: str) -> Iterator[str]:
        yield key_of(name)
        grid = presented_grid(self._arrays[name])
        # `ndindex` refuses some shapes that have no index.
        for index in np.ndindex(*grid.counts) if grid.chunk_count else ():
            yield chunk_key(name, index)

    def _chunk(self, key: str) -> tuple[str, tuple[int, ...]] | None:
        name, mark, numbers = f"{key}/".rpartition("/c/")
        if not mark or name not in self._arrays:
            return None
        parts = [part for part in numbers.split("/") if part]
        counts = presented_grid(self._arrays[name]).counts
        if len(parts) != len(counts) or not all(_NUMBER.fullmatch(part) for part in parts):
            return None
        index = tuple(map(int, parts))
        inside = all(i < count for i, count in zip(index, counts, strict=True))
        return (name, index) if inside and key == chunk_key(name, index) else None
