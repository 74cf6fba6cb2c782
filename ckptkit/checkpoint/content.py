"""What a pack holds: documents first, then chunks, which a saving rank cuts out of its buffers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import LayoutError, UsageError
from ckptkit.format.arrays import ArrayInfo, chunk_key
from ckptkit.model import Box, DType, Grid, Part
from ckptkit.storage.buffers import copy_elements

# Places of chunks: as many as a few layers have.
_KEPT = 4096


@dataclass(frozen=True, slots=True, eq=False)
class PackedArray:
    """One array, and the chunks of it that a pack has."""

    info: ArrayInfo
    chunks: npt.NDArray[np.int64]

    def stored_bytes(self, chunk: int) -> int:
        """The length of a chunk in the pack."""
        grid = self.info.grid
        if grid.is_regular:
            return grid.chunk_elements * self.info.dtype.itemsize
        return math.prod(grid.stored_shape(grid.index(chunk))) * self.info.dtype.itemsize

    def opened(self, chunk: int, target: memoryview) -> tuple[Box, npt.NDArray[Any]]:
        """The box of a chunk, and its place in the memory that the chunk is stored as; what the
        box leaves of that is zero.
        """
        box, stored_shape = _chunk_of(self.info.grid, chunk)
        stored = np.frombuffer(target, dtype=self.info.dtype.bits).reshape(stored_shape)
        if box.shape != stored_shape:
            stored.fill(0)
            stored = stored[tuple(slice(0, extent) for extent in box.shape)]
        return box, stored


@dataclass(frozen=True, slots=True, eq=False)
class LocalArray(PackedArray):
    """One array, the part this rank holds of it, and the chunks it writes."""

    part: Part
    data: npt.NDArray[Any] | None

    def fill(self, chunk: int, target: memoryview) -> None:
        """Copy one chunk, in stored order, out of the part."""
        box, stored = self.opened(chunk, target)
        at = _place_in(self.part, box)
        if at is None or self.data is None:
            raise LayoutError("this rank does not hold the chunk", where=self.info.name, value=box)
        copy_elements(self.data[at], stored)


# Cached, because layers are alike: what one has found out holds for all.
@lru_cache(_KEPT)
def _chunk_of(grid: Grid, chunk: int) -> tuple[Box, tuple[int, ...]]:
    """The box of a chunk, and the shape that it is stored in."""
    index = grid.index(chunk)
    return grid.box(index), grid.stored_shape(index)


@lru_cache(_KEPT)
def _place_in(part: Part, box: Box) -> tuple[Any, ...] | None:
    """The index of a box in the memory of a part, a view also where there are no dims; None where
    the part does not hold it.
    """
    for held, place in zip(part.boxes, part.places, strict=True):
        if held.contains(box):
            inner = zip(box.within(held), place.offset, strict=True)
            return (*(slice(s.start + first, s.stop + first) for s, first in inner), ...)
    return None


class PackContent(ABC):
    """Documents and chunks of one pack, numbered in pack order."""

    def __init__(
        self, documents: Sequence[tuple[str, bytes]], arrays: Sequence[PackedArray]
    ) -> None:
        self.documents = documents
        self.arrays = arrays
        counts = [len(array.chunks) for array in arrays]
        self.array: npt.NDArray[np.uint32] = np.repeat(
            np.arange(len(arrays), dtype=np.uint32), counts
        )
        parts = [array.chunks for array in arrays]
        self.chunk: npt.NDArray[np.int64] = (
            np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
        )

    def __len__(self) -> int:
        return len(self.documents) + len(self.chunk)

    def name(self, index: int) -> str:
        """The Zarr key of an entry."""
        if index < len(self.documents):
            return self.documents[index][0]
        array, chunk = self._at(index)
        return chunk_key(array.info.name, array.info.grid.index(chunk))

    def length(self, index: int) -> int:
        """The number of bytes of an entry."""
        if index < len(self.documents):
            return len(self.documents[index][1])
        array, chunk = self._at(index)
        return array.stored_bytes(chunk)

    def filled(self, targets: Mapping[int, memoryview]) -> Iterator[int]:
        """Fill entries, and yield each as soon as its bytes are there."""
        documents = [index for index in targets if index < len(self.documents)]
        for index in documents:
            targets[index][:] = self.documents[index][1]
        yield from documents
        rest = {index: target for index, target in targets.items() if index >= len(self.documents)}
        yield from self.filled_chunks(rest)

    @abstractmethod
    def filled_chunks(self, targets: Mapping[int, memoryview]) -> Iterator[int]:
        """The same, for chunks alone."""

    def at(self, index: int) -> tuple[int, int]:
        """Of an entry that is a chunk, the place of its array in the pack, and its number."""
        row = index - len(self.documents)
        return int(self.array[row]), int(self.chunk[row])

    def _at(self, index: int) -> tuple[PackedArray, int]:
        array, chunk = self.at(index)
        return self.arrays[array], chunk


class LocalContent(PackContent):
    """What a saving rank holds in memory."""

    def __init__(
        self, documents: Sequence[tuple[str, bytes]], arrays: Sequence[LocalArray]
    ) -> None:
        super().__init__(documents, arrays)
        self._local = arrays

    def filled_chunks(self, targets: Mapping[int, memoryview]) -> Iterator[int]:
        """Copied one by one, so that each is still in the processor's cache when it is yielded."""
        for index, target in targets.items():
            array, chunk = self.at(index)
            self._local[array].fill(chunk, target)
            yield index


def as_local(name: str, data: object, shape: tuple[int, ...], dtype: DType) -> npt.NDArray[Any]:
    """Any buffer as an array of raw elements in the shape of the part, without a copy."""
    array = data if isinstance(data, np.ndarray) else _from_buffer(name, data)
    if array.dtype not in _spellings(dtype):
        array = _from_bytes(name, array, dtype)
    array = array.view(dtype.bits)
    if array.ndim == 1 and array.flags.c_contiguous and array.size == math.prod(shape):
        array = array.reshape(shape)
    if array.shape != shape:
        raise LayoutError(
            f"the buffer does not fit: this rank holds {shape} of {dtype.name}",
            where=name,
            value=array.shape,
            hint="pass the local part, in its own shape, or as flat bytes",
        )
    return array


def _spellings(dtype: DType) -> tuple[np.dtype[Any], ...]:
    """The numpy dtypes whose elements are these: its own, raw bits, and for what numpy lacks the
    signed integers that torch's `view` offers.
    """
    if dtype.numpy.type.__module__ == "numpy":
        return dtype.numpy, dtype.bits
    return dtype.numpy, dtype.bits, np.dtype(f"<i{dtype.itemsize}")


def _from_buffer(name: str, data: object) -> npt.NDArray[Any]:
    try:
        return np.asarray(memoryview(data))  # type: ignore[arg-type]  # what is no buffer raises
    except (TypeError, ValueError) as error:
        raise UsageError(
            "neither an array nor a buffer",
            where=name,
            value=type(data).__name__,
            hint="pass a numpy array, or anything with the buffer protocol and dtype=…",
        ) from error


def _from_bytes(name: str, array: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Bytes as elements; elements of another type are never taken for the bytes of this one."""
    if array.dtype not in (np.uint8, np.int8, np.dtype("S1")) or not array.flags.c_contiguous:
        raise LayoutError(
            f"the buffer is not of {dtype.name}",
            where=name,
            value=array.dtype,
            hint="pass little-endian elements of that dtype, or their contiguous bytes",
        )
    if array.nbytes % dtype.itemsize:
        raise LayoutError(
            f"{array.nbytes} bytes are not a whole number of {dtype.name} elements", where=name
        )
    return array.reshape(-1).view(dtype.bits)
