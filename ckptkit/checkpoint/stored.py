"""The arrays of a step as streams of checked values, whatever the size of their chunks."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.budget import Pace
from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.reading import BAND_BYTES
from ckptkit.checkpoint.sources import Sources
from ckptkit.checkpoint.workers import cores
from ckptkit.errors import CorruptionError
from ckptkit.format.arrays import ArrayInfo, chunk_key
from ckptkit.format.manifest import Manifest
from ckptkit.model import Box, DType, Grid
from ckptkit.plan.read import pieces_of, pieces_within
from ckptkit.storage import default_pool
from ckptkit.storage.closing import Closing

# Reading whole chunks, more than once, is worth it up to here: to check them first takes twice.
_MOST_TIMES = 2


class StoredArrays(Mapping[str, "StoredArray"], Closing):
    """The arrays of a step by name; chunks above `chunk_bytes` are never in memory whole."""

    def __init__(self, checkpoint: Checkpoint, chunk_bytes: int, pace: Pace | None = None) -> None:
        self._checkpoint = checkpoint
        self._chunk_bytes = chunk_bytes
        self._pace = pace or Pace.of(checkpoint.store).shared(cores())
        self._sources = Sources(checkpoint.store, checkpoint.prefix, checkpoint.manifest)
        numbers = enumerate(checkpoint.manifest.arrays)
        self._known = {array.name: self._array(array, number) for number, array in numbers}
        for alias in checkpoint.manifest.aliases:
            self._known[alias.name] = self._known[alias.alias_of]

    def __getitem__(self, name: str) -> StoredArray:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known))

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Close the packs."""
        self._sources.close()

    def _array(self, info: ArrayInfo, number: int) -> StoredArray:
        first = int(self._checkpoint.manifest.starts[number])
        means = self._sources, self._pace, self._chunk_bytes
        return StoredArray(self._checkpoint, info, first, *means)


class StoredArray:
    """One array of a step; two names of one array have the same object."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        info: ArrayInfo,
        first_row: int,
        sources: Sources,
        pace: Pace,
        chunk_bytes: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._info = info
        self._first_row = first_row
        self._sources = sources
        self._pace = pace
        self._chunk_bytes = chunk_bytes
        self._lock = threading.Lock()
        self._checked: npt.NDArray[np.bool_] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._info.shape

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._info.dtype

    @property
    def grid(self) -> Grid:
        """How it is cut into chunks."""
        return self._info.grid

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self._info.nbytes

    def read_into(self, box: Box, out: npt.NDArray[Any]) -> None:
        """Fill `out` with elements as they were written; CorruptionError where they are not.

        What would be read whole too often, or is too large for that, is compared with its checksum
        first, a little at a time, and then read exactly.
        """
        if self._is_read_whole(box):
            self._read(box, out, verify=True)
            return
        self._check(box)
        limit = min(BAND_BYTES, self._chunk_bytes)
        for piece in pieces_within(self.grid, box, self.dtype.itemsize, limit):
            inside: Any = (*piece.within(box), ...)
            self._read(piece, out[inside], verify=False)

    def _read(self, box: Box, out: npt.NDArray[Any], *, verify: bool) -> None:
        self._checkpoint.read_many([(self._info.name, box, out)], verify=verify, pace=self._pace)

    def _is_read_whole(self, box: Box) -> bool:
        itemsize, largest, touched = self.dtype.itemsize, 1, 1
        for dim, span in enumerate(self.grid.span(box)):
            lengths = [self.grid.interval(dim, index)[2] for index in span]
            largest *= max(lengths, default=0)
            touched *= sum(lengths)
        if largest * itemsize > self._chunk_bytes:
            return False
        return touched * itemsize <= max(BAND_BYTES, _MOST_TIMES * box.size * itemsize)

    def _check(self, box: Box) -> None:
        """Compare the chunks that a box needs with their checksums, each once."""
        chunks = pieces_of(self.grid, box).chunks()
        with self._lock:
            if self._checked is None:
                self._checked = np.zeros(self.grid.chunk_count, np.bool_)
            # Of a chunk that another thread is just looking at it will say what is wrong.
            chunks = chunks[~self._checked[chunks]]
            self._checked[chunks] = True
        for chunk in chunks:
            check_chunk(self._checkpoint.manifest, self._first_row + int(chunk), self._sources)


def check_chunk(manifest: Manifest, row: int, sources: Sources) -> None:
    """Compare the chunk of a row of the manifest with its checksum, a little of it at a time."""
    pack, start = int(manifest.pack[row]), int(manifest.offset[row])
    length, written, found = int(manifest.length[row]), int(manifest.crc32[row]), 0
    with sources.use(pack) as source, default_pool().take(BAND_BYTES) as memory:
        for begin in range(0, length, BAND_BYTES):
            with memory[: min(BAND_BYTES, length - begin)] as data:
                source.read_into(start + begin, data)
                found = int(isal_zlib.crc32(data, found))
    if found == written:
        return
    number = int(np.searchsorted(manifest.starts, row, side="right")) - 1
    array = manifest.arrays[number]
    key = chunk_key(array.name, array.grid.index(row - int(manifest.starts[number])))
    raise CorruptionError(
        f"chunk {key} has the checksum {found:08x}, written was {written:08x}",
        where=f"{sources.where(pack)} at byte {start}",
        hint="`ckpt verify` lists all damage of a step; `ckpt ls RUN` shows the other steps",
    )
