"""Arrays from their first element to their last, in bounded memory, whatever their chunks."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import crc_of
from ckptkit.checkpoint.read.checkpoint import Checkpoint, NamedBox, ReadMany
from ckptkit.checkpoint.read.reader import BAND_BYTES
from ckptkit.checkpoint.workers import Pace, Progress, copy_threads, cores, share_out
from ckptkit.errors import UsageError
from ckptkit.format.arrays import ArrayKind
from ckptkit.model import Box, DType, Grid
from ckptkit.plan.chunks import chunks_in
from ckptkit.plan.read import pieces_within
from ckptkit.storage import BufferPool, Store, default_pool

STREAM_MEMORY = 256 << 20

_MIB = 1 << 20
LEAST_MEMORY = 16 * _MIB
# With less each, rows of chunks do not fit, and chunks are read twice: fewer threads are faster.
_SHARE = 64 * _MIB
# Larger bands only where a row of chunks is larger: what is in the cache is used from there.
_WANTED = 8 * _MIB
_NOTHING = np.empty(0, np.uint8)
# Where each band begins that is read together with others.
_ALIGNMENT = 64
# How often two grids are asked for a border that both have.
_TRIES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Readable:
    """An array that can be streamed."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    grid: Grid
    """The chunks that are read whole at best."""
    fill: ReadMany
    """One function for all arrays of a step, as small ones are read together."""

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
        sources: Sequence[Checkpoint] = (),
    ) -> Limits:
        """Those with which `memory` is not exceeded; a thread holds a band of each of the `sides`,
        and `spare` bytes besides, and each of the `sources` what it keeps.
        """
        if threads is not None and threads < 1:
            raise UsageError("at least one thread is needed", value=threads)
        is_remote = any(source.store.abilities.waits_for_answers for source in sources)
        kept = sum(source.packs.kept_bytes for source in sources)
        least = kept + (2 * LEAST_MEMORY if is_remote else LEAST_MEMORY)
        if memory < least:
            raise UsageError(
                f"that is too little memory: {-(-least // _MIB)} MiB are needed at least",
                value=memory,
            )
        memory -= kept
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

    The arrays of one item have one shape, and each item has as many of them. Where it matters, the
    bands of an item come in order; what `use` gets is overwritten once it has returned.
    """
    turns = _Turns(len(items))
    sides = max(map(len, items), default=0)
    # As many as there are threads; each band takes one, and leaves it to the next.
    memories = [[_NOTHING] * sides for _ in range(limits.workers)]

    def read(together: Sequence[Band]) -> None:
        memory = memories.pop()
        try:
            found: list[list[npt.NDArray[Any]]] = [[] for _ in together]
            for side in range(sides):
                there = [items[band.item][side] for band in together]
                sizes = [
                    band.box.size * readable.dtype.itemsize
                    for band, readable in zip(together, there, strict=True)
                ]
                begins = [0, *accumulate(map(_rounded, sizes))]
                if memory[side].nbytes < begins[-1]:
                    # First the old one goes: both together may be too much.
                    memory[side] = _NOTHING
                    # Not numpy's own: what is freed of that need not go back to the system.
                    taken = BufferPool(limit=0).take(begins[-1])
                    memory[side] = np.frombuffer(taken.view, np.uint8)
                wanted: dict[ReadMany, list[NamedBox]] = {}
                for arrays, band, readable, begin, size in zip(
                    found, together, there, begins, sizes, strict=False
                ):
                    raw = memory[side][begin : begin + size].view(readable.dtype.bits)
                    arrays.append(raw.reshape(band.box.shape))
                    boxes = wanted.setdefault(readable.fill, [])
                    boxes.append((readable.name, band.box, arrays[-1]))
                for fill, boxes in wanted.items():
                    fill(boxes)
            for band, arrays in zip(together, found, strict=True):
                if ordered and not turns.wait(band):
                    return
                use(band, arrays)
                turns.done(band)
            if progress:
                progress(sum(array.nbytes for arrays in found for array in arrays))
            _forget(limits.kept_bytes)
        except BaseException:
            turns.stop()
            raise
        finally:
            memories.append(memory)

    # What was kept of another size before is no use now, and what is kept now is none later.
    _forget(limits.workers * BAND_BYTES)
    try:
        share_out(_together(items, limits), read, limits.workers)
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


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _together(items: Sequence[Sequence[Readable]], limits: Limits) -> Iterator[list[Band]]:
    """All bands in order; small ones several at a time, which takes less than to read each."""
    some, held = list[Band](), 0
    whole = cache(Box.whole)  # arrays are alike
    for item, readables in enumerate(items):
        itemsize = max([readable.dtype.itemsize for readable in readables])
        most = max(1, limits.band_bytes // itemsize)
        wanted = min(most, limits.wanted_bytes // itemsize)
        if 0 < readables[0].size <= wanted:
            boxes: Iterable[Box] = [whole(readables[0].shape)]
        else:
            grids = list(dict.fromkeys(readable.grid for readable in readables))
            boxes = bands(grids, wanted, most)
        start = 0
        for number, box in enumerate(boxes):
            nbytes = _rounded(box.size * itemsize)
            if some and held + nbytes > min(limits.band_bytes, limits.wanted_bytes):
                yield some
                some, held = [], 0
            some.append(Band(item, number, start, box))
            held += nbytes
            start += box.size
    if some:
        yield some


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
    aliases = checkpoint.manifest.aliases
    kinds = dict(zip(checkpoint.manifest.table.names, checkpoint.manifest.table.kinds, strict=True))
    lock = threading.Lock()
    checked: dict[str, npt.NDArray[np.bool_]] = {}
    known: dict[tuple[Any, ...], bool] = {}  # arrays are alike

    def fill(wanted: Sequence[NamedBox]) -> None:
        """Fill memory with elements as they were written; CorruptionError where they are not."""
        together: list[NamedBox] = []
        for name, box, out in wanted:
            kind = kinds[name]
            what = id(kind), box.offset, box.shape
            if what not in known:
                known[what] = _is_read_whole(kind, box, chunk_bytes)
            if known[what]:
                together.append((name, box, out))
                continue
            # What would be read whole too often, or is too large for that, is compared with its
            # checksum first, a little at a time, and then read exactly.
            grid, first_row = kind.grid, checkpoint.first_row(name)
            chunks = chunks_in(grid, box)
            with lock:
                marks = checked.setdefault(name, np.zeros(grid.chunk_count, np.bool_))
                # Marked before it is checked: a thread that finds it marked goes on, and the one
                # that checks raises for both.
                chunks = chunks[~marks[chunks]]
                marks[chunks] = True
            for chunk in chunks:
                check_chunk(checkpoint, first_row + int(chunk))
            limit = min(BAND_BYTES, chunk_bytes)
            for piece in pieces_within(grid, box, kind.dtype.itemsize, limit):
                inside: Any = (*piece.within(box), ...)
                checkpoint.read_many([(name, piece, out[inside])], verify=False, pace=pace)
        checkpoint.read_many(together, pace=pace)

    found = {
        name: Readable(name, kind.shape, kind.dtype, kind.grid, fill)
        for name, kind in kinds.items()
    }
    found |= {alias.name: found[alias.alias_of] for alias in aliases}
    return dict(sorted(found.items()))


def _is_read_whole(kind: ArrayKind, box: Box, chunk_bytes: int) -> bool:
    """Whether the chunks of a box are not too large to be read whole, and that not too much."""
    largest = touched = kind.dtype.itemsize
    for dim, span in enumerate(kind.grid.span(box)):
        lengths = [kind.grid.interval(dim, index)[2] for index in span]
        largest *= max(lengths, default=0)
        touched *= sum(lengths)
    worth_it = max(BAND_BYTES, _MOST_TIMES * box.size * kind.dtype.itemsize)
    return largest <= chunk_bytes and touched <= worth_it


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
