"""How much is in memory at a time, given how much may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoint.reading import BAND_BYTES
from ckptkit.errors import UsageError
from ckptkit.format.arrays import ArrayInfo

DEFAULT_MEMORY = 1 << 30

_MIB = 1 << 20
_LARGEST_BATCH, _SMALLEST_BATCH = 64 * _MIB, 4 * _MIB
_LARGEST_CHUNK = 16 * _MIB
# Threads, buffers of the storage, and what allocators keep.
_PER_WORKER = 6 * _MIB
_SPARE = 24 * _MIB


@dataclass(frozen=True, slots=True)
class Budget:
    """What each of some workers may hold: a batch of the target's chunks, and the chunks of the
    source that it is filled from, one at a time.
    """

    workers: int
    batch_bytes: int
    chunk_bytes: int

    @classmethod
    def of(cls, memory: int, workers: int, largest: int, fixed: int, each: int = 0) -> Budget:
        """The largest batches with which `memory` is never exceeded; `largest` is the largest
        chunk of the target, `fixed` what is in use besides, and `each` by every worker.
        """
        for count in range(workers, 0, -1):
            free = (memory - fixed - _SPARE) // count - _PER_WORKER - each
            # A batch, one chunk of the source, and as much again where values are converted.
            batch = min(_LARGEST_BATCH, (free - BAND_BYTES) // 3)
            if batch >= max(_SMALLEST_BATCH, largest):
                return cls(count, batch, max(BAND_BYTES, min(_LARGEST_CHUNK, batch)))
        least = fixed + _SPARE + _PER_WORKER + each + BAND_BYTES + 3 * max(_SMALLEST_BATCH, largest)
        raise UsageError(
            f"that is too little memory: this checkpoint takes {-(-least // _MIB)} MiB at least",
            value=memory,
            hint="most of it is for the list of chunks and for one chunk at a time",
        )

    def is_huge(self, array: ArrayInfo) -> bool:
        """Whether the chunks of an array of the source are too large to be read whole."""
        size = array.grid.chunk_elements * array.dtype.itemsize
        return array.grid.chunk_count > 0 and size > self.chunk_bytes

    @property
    def peak(self) -> int:
        """The most that the workers hold."""
        each = 3 * self.batch_bytes + max(BAND_BYTES, self.chunk_bytes) + _PER_WORKER
        return self.workers * each + _SPARE


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
