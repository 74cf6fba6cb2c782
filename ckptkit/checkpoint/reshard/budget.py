"""How much is in memory at a time, given how much may be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckptkit.checkpoint.budget import Pace
from ckptkit.checkpoint.read.reader import BAND_BYTES
from ckptkit.errors import UsageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.storage import Store

DEFAULT_MEMORY = 1 << 30

_MIB = 1 << 20
_LARGEST_BATCH, _SMALLEST_BATCH = 64 * _MIB, 4 * _MIB
_LARGEST_CHUNK = 16 * _MIB
# Threads, buffers of the storage, and what allocators keep.
_PER_WORKER = 6 * _MIB
_SPARE = 24 * _MIB
# Of all memory, what may be on its way from a store that is asked over a network, and to one.
_SHARE = 4
# Of all memory, what may be kept of chunks that several packs need, where reading costs more.
_SHARED = 16
# A sink that holds fewer parts waits for each.
_LEAST_PARTS = 2
# Parts of very large packs are larger, since servers take only so many.
_MOST_PARTS = 9000


@dataclass(frozen=True, slots=True)
class Ends:
    """What the two ends of a reshard keep in memory besides what the workers do."""

    pace: Pace
    """How the source is read by all workers together."""
    sink_bytes: int | None
    """What the sink of one pack may keep; None where it keeps nothing."""
    packs: int
    """How many packs are written at a time."""
    shared_bytes: int = 0
    """What may be kept of chunks of the source that several of these need a part of."""

    @classmethod
    def of(
        cls, source: Store, destination: Store, memory: int, packs: int, pack_bytes: int = 0
    ) -> Ends:
        """As much as is fast, within a share of the memory; `pack_bytes` is about how large the
        largest pack will be.
        """
        share, can = memory // _SHARE, destination.abilities
        is_far = not source.abilities.is_file_system
        kept = memory // _SHARED if is_far else 0
        pace = Pace.of(source, share - kept)
        if can.is_file_system:
            return cls(pace, None, packs, kept if packs > 1 else 0)
        part = max(can.part_size, -(-pack_bytes // _MOST_PARTS))
        least, most = _LEAST_PARTS * part, (can.concurrency + 2) * part
        packs = max(1, min(packs, share // least))
        sink_bytes = max(least, min(most, share // packs))
        return cls(pace, sink_bytes, packs, kept if packs > 1 else 0)

    @property
    def nbytes(self) -> int:
        """The most of it."""
        return self.pace.nbytes + (self.sink_bytes or 0) * self.packs + self.shared_bytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What each of some workers may hold: a batch of the target's chunks, and the chunks of the
    source that it is filled from, one at a time.
    """

    workers: int
    batch_bytes: int
    chunk_bytes: int
    ends: Ends

    @classmethod
    def of(
        cls, memory: int, workers: int, largest: int, ends: Ends, fixed: int, each: int = 0
    ) -> Budget:
        """The largest batches with which `memory` is never exceeded; `largest` is the largest
        chunk of the target, `fixed` what is in use besides, and `each` by every worker.
        """
        fixed += ends.nbytes
        for count in range(workers, 0, -1):
            free = (memory - fixed - _SPARE) // count - _PER_WORKER - each
            # A batch, one chunk of the source, and as much again where values are converted.
            batch = min(_LARGEST_BATCH, (free - BAND_BYTES) // 3)
            if batch >= max(_SMALLEST_BATCH, largest):
                return cls(count, batch, max(BAND_BYTES, min(_LARGEST_CHUNK, batch)), ends)
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
    def pace(self) -> Pace:
        """How each worker reads the source."""
        return self.ends.pace.shared(self.workers)

    def alone(self) -> Budget:
        """That of one of the workers, who writes one pack in a process of its own."""
        ends = Ends(self.pace, self.ends.sink_bytes, 1)
        return Budget(1, self.batch_bytes, self.chunk_bytes, ends)

    @property
    def peak(self) -> int:
        """The most that the workers hold."""
        each = 3 * self.batch_bytes + max(BAND_BYTES, self.chunk_bytes) + _PER_WORKER
        return self.workers * each + _SPARE + self.ends.nbytes


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
