"""Arrays from their first element to their last, in bounded memory, whatever their chunks."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import crc_of
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.reader import BAND_BYTES
from ckptkit.checkpoint.workers import Pace, Progress, copy_threads, cores, share_out
from ckptkit.errors import UsageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box, DType, Grid
from ckptkit.plan.read import Pieces, pieces_within
from ckptkit.storage import BufferPool, Store, default_pool

STREAM_MEMORY = 256 << 20

_MIB = 1 << 20
LEAST_MEMORY = 16 * _MIB
# With less each, rows of chunks do not fit, and chunks are read twice: fewer threads are faster.
_SHARE = 64 * _MIB
# Larger bands only where a row of chunks is larger: what is in the cache is used from there.
_WANTED = 8 * _MIB
_NOTHING = np.empty(0, np.uint8)
# How often two grids are asked for a border that both have.
_TRIES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Readable:
    """What can be streamed: a box of values at a time, compared with checksums as it is read."""

    shape: tuple[int, ...]
    dtype: DType
    grid: Grid
    """The chunks that are read whole at best."""
    read_into: Callable[[Box, npt.NDArray[Any]], None]
    """Fills memory of the box's shape and of the type `dtype.bits`; from any thread."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Limits:
    """How many threads stream, how much of an array each of them holds, and up to what size it
    reads chunks whole.
    """

    workers: int
    band_bytes: int
    chunk_bytes: int
    wanted_bytes: int = _WANTED
    """About how much of an array is read at a time, where its chunks allow it."""
    in_flight: int = 0
    """What may be on its way from stores that are asked over a network."""

    @classmethod
    def of(
        cls,
        memory: int,
        threads: int | None,
        *,
        sides: int = 1,
        spare: int = _MIB,
        stores: Sequence[Store] = (),
    ) -> Limits:
        """Those with which `memory` is not exceeded; a thread holds a band of each of the `sides`,
        and `spare` bytes besides.
        """
        if threads is not None and threads < 1:
            raise UsageError("at least one thread is needed", value=threads)
        is_remote = any(store.abilities.waits_for_answers for store in stores)
        least = 2 * LEAST_MEMORY if is_remote else LEAST_MEMORY
        if memory < least:
            raise UsageError(
                f"that is too little memory: {least // _MIB} MiB are needed at least",
                value=memory,
            )
        in_flight = memory // 2 if is_remote else 0
        memory -= in_flight
        workers = min(threads or copy_threads(), max(1, memory // _SHARE))
        # A chunk, or a row of many, waits where it is checked while its band is filled.
        free = memory // workers - BAND_BYTES - spare - _MIB
        band = free // (sides + 1)
        # Over a network some requests for each band are under way at a time.
        wanted = min(band, max(_WANTED, in_flight // workers // 2)) if is_remote else _WANTED
        return cls(workers, band, max(BAND_BYTES, band * 7 // 8), wanted, in_flight)

    def pace(self, store: Store) -> Pace:
        """How each of the threads reads a store."""
        return Pace.of(store, self.in_flight).shared(self.workers)

    @property
    def kept_bytes(self) -> int:
        """What buffers that are used again may take."""
        return self.workers * (self.chunk_bytes + BAND_BYTES) + self.in_flight // 2


@dataclass(frozen=True, slots=True)
class Band:
    """A run of the elements of one item, as a box."""

    item: int
    number: int
    """How many bands of the item come before it."""
    start: int
    """How many elements come before it."""
    box: Box


Use = Callable[[Band, Sequence[npt.NDArray[Any]]], None]


def stream(
    items: Sequence[Sequence[Readable]],
    use: Use,
    limits: Limits,
    *,
    ordered: bool = False,
    progress: Progress | None = None,
) -> None:
    """Read the arrays of each item side by side, and call `use` with each band and the elements
    that they have there, from several threads.

    The arrays of one item have one shape. Where it matters, the bands of an item come in order;
    what `use` gets is overwritten once it has returned.
    """
    turns = _Turns(len(items))
    sides = max(map(len, items), default=0)
    # As many as there are threads; each band takes one, and leaves it to the next.
    memories = [[_NOTHING] * sides for _ in range(limits.workers)]

    def read(band: Band) -> None:
        memory = memories.pop()
        try:
            arrays = []
            for side, readable in enumerate(items[band.item]):
                nbytes = band.box.size * readable.dtype.itemsize
                if memory[side].nbytes < nbytes:
                    # First the old one goes: both together may be too much.
                    memory[side] = _NOTHING
                    # Not numpy's own: what is freed of that need not go back to the system.
                    taken = BufferPool(limit=0).take(nbytes)
                    memory[side] = np.frombuffer(taken.view, np.uint8)
                raw = memory[side][:nbytes].view(readable.dtype.bits)
                arrays.append(raw.reshape(band.box.shape))
                readable.read_into(band.box, arrays[-1])
            if ordered and not turns.wait(band):
                return
            use(band, arrays)
            turns.done(band)
            if progress:
                progress(sum(array.nbytes for array in arrays))
            _forget(limits.kept_bytes)
        except BaseException:
            turns.stop()
            raise
        finally:
            memories.append(memory)

    # What was kept of another size before is no use now, and what is kept now is none later.
    _forget(limits.workers * BAND_BYTES)
    try:
        share_out(_all_bands(items, limits), read, limits.workers)
    finally:
        _forget(limits.workers * 2 * BAND_BYTES)


def bands(grids: Sequence[Grid], wanted: int, most: int) -> Iterator[Box]:
    """An array as boxes that follow each other in C order, each of about `wanted` elements, and
    never more than `most`.

    They end where all grids have a border if that is possible, else where one has.
    """
    shape = grids[0].shape
    if 0 in shape:
        return
    if not shape:
        yield Box((), ())
        return
    dim = next(d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most)
    row = math.prod(shape[dim + 1 :])
    inner = shape[dim + 1 :]
    for above in np.ndindex(*shape[:dim]):
        low = 0
        while low < shape[dim]:
            high = _end(grids, dim, low, (max(1, wanted // row), max(1, most // row)))
            offset = (*above, low, *(0,) * len(inner))
            yield Box(offset, (*(1,) * dim, high - low, *inner))
            low = high


def _all_bands(items: Sequence[Sequence[Readable]], limits: Limits) -> Iterator[Band]:
    for item, readables in enumerate(items):
        grids = list(dict.fromkeys(readable.grid for readable in readables))
        itemsize = max(readable.dtype.itemsize for readable in readables)
        most = max(1, limits.band_bytes // itemsize)
        start = 0
        for number, box in enumerate(
            bands(grids, min(most, limits.wanted_bytes // itemsize), most)
        ):
            yield Band(item, number, start, box)
            start += box.size


def _end(grids: Sequence[Grid], dim: int, low: int, rows: tuple[int, int]) -> int:
    extent = grids[0].shape[dim]
    for high in (low + rows[0], low + rows[1]):
        if high >= extent:
            return extent
        # Downwards to the last place where a chunk of every grid begins.
        at = high
        for _ in range(_TRIES):
            last = min(_last_border(grid, dim, at) for grid in grids)
            if last == at:
                return at
            if last <= low:
                break
            at = last
    for high in (low + rows[0], low + rows[1]):
        last = max(_last_border(grid, dim, high) for grid in grids)
        if last > low:
            return last
    # Chunks are cut in any case: the fewer pieces the better.
    return low + rows[1]


def _last_border(grid: Grid, dim: int, at: int) -> int:
    if grid.is_regular:
        return at // grid.chunk_shape[dim] * grid.chunk_shape[dim]
    edges = grid.edges[dim]
    place = bisect_right(edges, at)
    return edges[place - 1] if place else 0


class _Turns:
    """Lets the bands of each item through in their order.

    Threads take bands in order, so the one with the earliest never waits for another.
    """

    def __init__(self, items: int) -> None:
        self._next = [0] * items
        self._changed = threading.Condition()
        self._stopped = False

    def wait(self, band: Band) -> bool:
        """Wait until all bands before this one are done; False when they never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._next[band.item] == band.number)
            return not self._stopped

    def done(self, band: Band) -> None:
        """The next one may go on."""
        with self._changed:
            self._next[band.item] += 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Nobody has to wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def _forget(most: int) -> None:
    # The pool keeps what it has lent, of every size that chunks have had.
    if default_pool().kept_bytes > most:
        default_pool().clear()


# Reading whole chunks, more than once, is worth it up to here: to check them first takes twice.
_MOST_TIMES = 2


def stored_arrays(
    checkpoint: Checkpoint, chunk_bytes: int, pace: Pace | None = None
) -> dict[str, Readable]:
    """The arrays of a step by name, sorted; chunks above `chunk_bytes` are never in memory whole.
    Two names of one array have the same object.
    """
    pace = pace or Pace.of(checkpoint.store).shared(cores())
    manifest = checkpoint.manifest
    found = {
        array.name: _stored(checkpoint, array, int(first), chunk_bytes, pace)
        for array, first in zip(manifest.arrays, manifest.starts, strict=False)
    }
    found |= {alias.name: found[alias.alias_of] for alias in manifest.aliases}
    return dict(sorted(found.items()))


def _stored(
    checkpoint: Checkpoint, info: ArrayInfo, first_row: int, chunk_bytes: int, pace: Pace
) -> Readable:
    grid, itemsize = info.grid, info.dtype.itemsize
    lock = threading.Lock()
    checked: npt.NDArray[np.bool_] | None = None

    def read_into(box: Box, out: npt.NDArray[Any]) -> None:
        """Fill `out` with elements as they were written; CorruptionError where they are not.

        What would be read whole too often, or is too large for that, is compared with its checksum
        first, a little at a time, and then read exactly.
        """
        nonlocal checked
        largest = touched = 1
        for dim, span in enumerate(grid.span(box)):
            lengths = [grid.interval(dim, index)[2] for index in span]
            largest *= max(lengths, default=0)
            touched *= sum(lengths)
        worth_it = max(BAND_BYTES, _MOST_TIMES * box.size * itemsize)
        if largest * itemsize <= chunk_bytes and touched * itemsize <= worth_it:
            checkpoint.read_many([(info.name, box, out)], pace=pace)
            return
        chunks = Pieces(grid, box).chunks()
        with lock:
            if checked is None:
                checked = np.zeros(grid.chunk_count, np.bool_)
            # Marked before it is checked: a thread that finds it marked goes on, and the one that
            # checks raises for both.
            chunks = chunks[~checked[chunks]]
            checked[chunks] = True
        for chunk in chunks:
            check_chunk(checkpoint, first_row + int(chunk))
        for piece in pieces_within(grid, box, itemsize, min(BAND_BYTES, chunk_bytes)):
            inside: Any = (*piece.within(box), ...)
            checkpoint.read_many([(info.name, piece, out[inside])], verify=False, pace=pace)

    return Readable(info.shape, info.dtype, grid, read_into)


def check_chunk(checkpoint: Checkpoint, row: int) -> None:
    """Compare the chunk of a row of the manifest with its checksum, where there is one, a little of
    it at a time.
    """
    manifest, packs = checkpoint.manifest, checkpoint.packs
    if not manifest.is_checked:
        return
    pack, start, length = (
        int(column[row]) for column in (manifest.pack, manifest.offset, manifest.length)
    )
    with packs.use(pack) as source:
        found = crc_of(source, start, length)
    if found != manifest.crc32[row]:
        raise packs.corrupt(manifest.chunk_key(row), found, int(manifest.crc32[row]), pack, start)
