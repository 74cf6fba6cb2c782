"""How large the chunks of an array are, given the borders its writers need, and perhaps the chunks
that it has already; and who writes which: the same answer on every rank, without a word between
them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from ckptkit.errors import LayoutError
from ckptkit.model import Assigned, Box, Grid, Layout, Replicas
from ckptkit.model.grid import I64

_NOTHING = np.zeros(0, dtype=np.int64)
_NOTHING.flags.writeable = False  # it is handed out for many arrays

DEFAULT_CHUNK_BYTES = 4 << 20

_SMALLEST_SHARE = 16  # chunks below 1/16 of the target cost more to handle than they save
_LARGEST_MULTIPLE = 4  # a regular grid may miss the target by this much before a border is added
_SHORTEST_RUN = 512  # bytes: copying shorter rows is slower than the disk
_SHORT_RUN = 4096  # bytes: copying shorter rows is slower than reading them
_PARTS, _FEWER_PARTS = 8, 4
_MOST_BORDERS = 1 << 16

# What copying chunks unread saves is worth up to this many of them, with a request and a row of the
# manifest each, where a new grid would have one.
_MUCH_SMALLER = 4


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to cut a dim: the longest piece it makes, and the borders where pieces differ."""

    longest: int
    borders: tuple[int, ...] | None = None


# The ways to cut a dim so that all cuts are borders, from the shortest pieces to the longest.
_Ladder: TypeAlias = list[_Choice]


@lru_cache(maxsize=4096)
def choose_grid(
    shape: tuple[int, ...],
    itemsize: int,
    edges: tuple[tuple[int, ...], ...],
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    sliced: tuple[int, ...] | None = None,
) -> Grid:
    """The grid with a border at every edge, and at halves, quarters and eighths of each dim where
    that leaves chunks of a useful size.

    It is regular unless that would make chunks far too small or too large. Where it is known which
    dims other layouts may slice, the others stay whole if nothing cuts them: what is read back
    then lies in memory as it does in the chunk, and need not be copied there row by row.
    """
    if 0 in shape:
        return Grid.regular(shape, tuple(max(1, extent) for extent in shape))
    ladders = []
    for extent, cuts in zip(shape, edges, strict=True):
        others = itemsize * math.prod(shape) // extent
        finest = 64 if sliced is None else max(64, 2 * extent * others // chunk_bytes)
        ladders.append(_ladder(extent, cuts, others, chunk_bytes, min(finest, _MOST_BORDERS)))
    uncut = {dim for dim, cuts in enumerate(edges) if not cuts}
    whole = frozenset[int]() if sliced is None else frozenset(uncut.difference(sliced))
    # Regular first: many readers of Zarr know no other grid.
    chosen = _climb(shape, ladders, itemsize, chunk_bytes, whole)
    size = itemsize * math.prod(choice.longest for choice in chosen)
    too_large = size > _LARGEST_MULTIPLE * chunk_bytes
    if len(shape) > 1 and any(edges) and not edges[-1]:
        # Rows that nobody cuts have become too short, because pieces of another dim, of a length
        # with no small divisor, cannot.
        row = itemsize * chosen[-1].longest
        too_large = too_large or row < min(_SHORTEST_RUN, itemsize * shape[-1])
    if too_large or size * _SMALLEST_SHARE < chunk_bytes:
        free = [
            _irregular_ladder(extent, cuts, itemsize, chunk_bytes)
            if cuts and (too_large or not _fits_regular(extent, cuts))
            else ladder
            for extent, cuts, ladder in zip(shape, edges, ladders, strict=True)
        ]
        chosen = _climb(shape, free, itemsize, chunk_bytes, whole)
    if all(choice.borders is None for choice in chosen):
        return Grid.regular(shape, tuple(choice.longest for choice in chosen))
    borders = [
        tuple(range(choice.longest, extent, choice.longest))
        if choice.borders is None
        else choice.borders
        for extent, choice in zip(shape, chosen, strict=True)
    ]
    return Grid.rectilinear(shape, tuple(borders))


def may_cut(nbytes: int, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> bool:
    """Whether an array of so many bytes may have several chunks where no writer's border asks for
    them.
    """
    return nbytes * _SMALLEST_SHARE >= 2 * chunk_bytes


def target_grid(
    source: Grid,
    itemsize: int,
    edges: tuple[tuple[int, ...], ...],
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Grid:
    """The source's own grid, so that chunks go over as they are, where it has a border at every
    edge and its chunks are neither much smaller nor much larger than a new grid's.

    Of chunks that are much smaller, whole ones are joined.
    """
    chosen = choose_grid(source.shape, itemsize, edges, chunk_bytes)
    # As far as `choose_grid` itself may miss what is asked for, so that a grid it made is kept.
    is_large = source.chunk_elements * itemsize > _LARGEST_MULTIPLE * chunk_bytes
    if source.is_regular:
        dims = zip(edges, source.chunk_shape, strict=True)
        has_borders = not any(cut % length for cuts, length in dims for cut in cuts)
    else:
        pairs = zip(edges, source.edges, strict=True)
        has_borders = all(set(cuts) <= set(own) for cuts, own in pairs)
    if is_large or not has_borders:
        return chosen
    grids = [source]
    if source.is_regular:
        # Whole chunks of the source, as many as come closest to the new grid's, with a border at
        # every edge.
        shape = []
        for dim, own in enumerate(source.chunk_shape):
            count = max(1, _longest(source.shape[dim], chosen.inner_borders(dim)) // own)
            if edges[dim]:
                most = math.gcd(*edges[dim]) // own
                count = next(n for n in range(min(count, most), 0, -1) if most % n == 0)
            shape.append(own * count)
        grids.append(Grid.regular(source.shape, tuple(shape)))
    for grid in grids:
        if grid.chunk_elements * _MUCH_SMALLER >= chosen.chunk_elements:
            return grid
    return chosen


def _climb(
    shape: tuple[int, ...],
    ladders: list[_Ladder],
    itemsize: int,
    chunk_bytes: int,
    whole: frozenset[int],
) -> list[_Choice]:
    """A rung of each dim's ladder, so that the chunk comes close to the target.

    Begin at eighths; lengthen pieces while chunks are too small, shorten while too large, those
    last that are to stay `whole`. Short rows become quarters, very short ones whatever it takes.
    """
    at = [_parts(*each, _PARTS) for each in zip(shape, ladders, strict=True)]
    dims = range(len(shape))

    def size() -> int:
        return itemsize * math.prod(rungs[i].longest for rungs, i in zip(ladders, at, strict=True))

    def run() -> int:
        return itemsize * ladders[-1][at[-1]].longest

    def can_rise(dim: int) -> bool:
        return at[dim] + 1 < len(ladders[dim])

    def lower() -> int | None:
        """The outermost dim with a shorter piece that does not make chunks too small; of those that
        are to stay whole only where no other is left.
        """
        for dim in sorted(dims, key=whole.__contains__):
            if i := at[dim]:
                step = ladders[dim][i - 1].longest / ladders[dim][i].longest
                if size() * step * _SMALLEST_SHARE >= chunk_bytes:
                    return dim
        return None

    if dims and run() < _SHORT_RUN:
        at[-1] = _parts(shape[-1], ladders[-1], _FEWER_PARTS)
    while dims and can_rise(dims[-1]) and run() < _SHORTEST_RUN:
        at[-1] += 1
    for dim in whole:
        at[dim] = len(ladders[dim]) - 1
    dim = 0
    while size() * _SMALLEST_SHARE < chunk_bytes and any(map(can_rise, dims)):
        at[dim] += can_rise(dim)
        dim = (dim + 1) % len(shape)
    while size() > chunk_bytes and (dim_to_cut := lower()) is not None:
        at[dim_to_cut] -= 1
    return [rungs[i] for rungs, i in zip(ladders, at, strict=True)]


def _ladder(
    extent: int, cuts: tuple[int, ...], others: int, chunk_bytes: int, finest: int
) -> _Ladder:
    """The ladder of one dim, down to so many equal pieces between two cuts; `others` are the bytes
    of one index of it.
    """
    if not cuts:
        sizes = {-(-extent // (1 << k)) for k in range(extent.bit_length() + 1)}
        return [_Choice(size) for size in sorted(sizes)]
    common = math.gcd(*cuts)
    if _fits_regular(extent, cuts) or common * others * _SMALLEST_SHARE >= chunk_bytes:
        divisors = {common // k for k in range(1, finest + 1) if common % k == 0}
        return [_Choice(size) for size in sorted(divisors)]
    return _irregular_ladder(extent, cuts, others, chunk_bytes)


def _irregular_ladder(extent: int, cuts: tuple[int, ...], others: int, chunk_bytes: int) -> _Ladder:
    finest = min(_MOST_BORDERS, max(128, 2 * extent * others // chunk_bytes))
    ladder: _Ladder = []
    for halvings in reversed(range(finest.bit_length())):
        size = -(-extent // (1 << halvings))
        borders = tuple(sorted({*cuts, *range(size, extent, size)}))
        choice = _Choice(_longest(extent, borders), borders)
        if not ladder or choice.longest > ladder[-1].longest:
            ladder.append(choice)
    return ladder


def _fits_regular(extent: int, cuts: tuple[int, ...]) -> bool:
    """Whether equal pieces are about as long as the cuts allow; ceil-sized cuts always fit."""
    return 2 * math.gcd(*cuts) > _longest(extent, cuts)


def _longest(extent: int, borders: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise((0, *borders, extent)))


def _parts(extent: int, ladder: _Ladder, count: int) -> int:
    """The longest pieces that have a border at every eighth (`count` is 8); where none do, that are
    no longer.

    A dim of fewer than eight is left whole where nothing cuts it: kernels, heads, pairs.
    """
    if extent < _PARTS:
        return len(ladder) - 1
    share = -(-extent // count)
    short = [i for i, choice in enumerate(ladder) if choice.longest <= share]
    aligned = [i for i in short if share % ladder[i].longest == 0 or ladder[i].borders is not None]
    return (aligned or short or [0])[-1]


# Who writes which chunks.


class Owned(NamedTuple):
    """What has to be known of an array to decide who writes its chunks."""

    name: str
    layout: Layout | Assigned
    grid: Grid
    itemsize: int


@dataclass(frozen=True, slots=True, eq=False)
class _Stretch:
    """Chunks of one array that the same ranks hold; how many elements they are stored as, and
    twice the middle of each among these.
    """

    chunks: I64
    total: int
    middles: I64
    replicas: Replicas
    first: int
    """The first of the middles, and the last; 0 where there are none."""
    last: int


def chunks_to_write(arrays: Sequence[Owned], rank: int) -> list[I64]:
    """For each array the chunks that this rank writes, in file order.

    What several ranks hold is one stream of chunks for each set of such ranks, cut into equal
    shares by bytes. All members of a set know all arrays of it, so they agree; ranks outside of
    it (other pipeline stages) need not know any.
    """
    streams: dict[Hashable, list[tuple[int, _Stretch]]] = {}
    mine: list[I64 | None] = [None] * len(arrays)
    more: dict[int, list[I64]] = {}
    # By layout and grid, which layers that are alike share: 100,000 arrays have a few dozen.
    kinds: dict[tuple[int, int], list[_Stretch]] = {}

    def take(index: int, chunks: I64) -> None:
        known = mine[index]
        if known is None:
            mine[index] = chunks
        else:
            more.setdefault(index, [known]).append(chunks)

    for index, array in enumerate(arrays):
        kind = id(array.layout), id(array.grid)
        if kind not in kinds:
            kinds[kind] = _stretches(array, rank)
        for stretch in kinds[kind]:
            if stretch.replicas.count == 1:  # nobody to share it with
                take(index, stretch.chunks)
            else:
                streams.setdefault(stretch.replicas.key, []).append((index, stretch))
    for stream in streams.values():
        sizes = [arrays[index].itemsize for index, _ in stream]
        total = sum(stretch.total * size for (_, stretch), size in zip(stream, sizes, strict=True))
        begin = 0
        for (index, stretch), size in zip(stream, sizes, strict=True):
            take(index, _share(stretch, size, begin, total))
            begin += stretch.total * size
    for index, parts in more.items():
        mine[index] = np.concatenate(parts)
    return [_NOTHING if chunks is None else chunks for chunks in mine]


def _share(stretch: _Stretch, size: int, begin: int, total: int) -> I64:
    """The chunks of a stretch that a rank writes of a stream of so many bytes, in which it begins
    here.
    """
    count, mine = stretch.replicas.count, stretch.replicas.index

    def writer(middle: int) -> int:
        return (middle * size + 2 * begin) * count // max(1, 2 * total)

    # Mostly all of it is one rank's: the middles rise. Integers, so that all machines decide alike.
    if not len(stretch.chunks):
        return stretch.chunks
    if writer(stretch.first) == writer(stretch.last):
        return stretch.chunks if writer(stretch.first) == mine else _NOTHING
    # Beyond 64 bits those of Python.
    wide = object if total * count >= 1 << 61 else np.int64
    middles = stretch.middles.astype(wide) * size + 2 * begin
    chosen: I64 = stretch.chunks[middles * count // max(1, 2 * total) == mine]
    return chosen


def writes_document(array: Owned, chunks: I64, rank: int) -> bool:
    """Whether this rank writes the array's zarr.json: with chunk 0, or, without chunks, as its
    lowest holder.
    """
    if array.grid.chunk_count:
        return bool(len(chunks)) and int(chunks.min()) == 0
    return array.layout.first_rank == rank


def chunks_in(grid: Grid, box: Box) -> I64:
    """The numbers of the chunks that a box overlaps, in order."""
    numbers = np.zeros(1, dtype=np.int64)
    for span, count in zip(grid.span(box), grid.counts, strict=True):
        along = np.arange(span.start, span.stop, dtype=np.int64)
        numbers = (numbers[:, None] * count + along[None, :]).reshape(-1)
    return numbers


def _stretches(array: Owned, rank: int) -> list[_Stretch]:
    found = []
    for share in array.layout.shares(rank):
        parts = [np.zeros(0, dtype=np.int64)]
        for box in share.boxes:
            if not array.grid.is_whole(box):
                raise LayoutError(
                    "the grid has chunks that reach beyond what one rank holds",
                    where=array.name,
                    value=box,
                )
            parts.append(chunks_in(array.grid, box))
        chunks = np.concatenate(parts)
        chunks.flags.writeable = False  # it is handed out for many arrays
        elements = array.grid.stored_elements(chunks)
        middles = 2 * np.cumsum(elements) - elements
        ends = (int(middles[0]), int(middles[-1])) if len(middles) else (0, 0)
        found.append(_Stretch(chunks, int(elements.sum()), middles, share.replicas, *ends))
    return found


def owners_of(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of each parameter: largest first to the rank with the fewest elements so far, ties
    in their order, as torch's ZeroRedundancyOptimizer does.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners
