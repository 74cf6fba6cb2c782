"""Which pieces of which chunks fill a box, and in which requests they are read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from ckptkit.model import Box, Grid, Layout, Share
from ckptkit.model.grid import I64
from ckptkit.plan.chunks import chunks_in


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk gives to a box: slices of the stored chunk, and of an array that holds
    exactly the box.
    """

    chunk: int
    stored_shape: tuple[int, ...]
    source: tuple[slice, ...]
    target: tuple[slice, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the box takes every stored element of the chunk."""
        slices = zip(self.source, self.stored_shape, strict=True)
        return all(s.start == 0 and s.stop == n for s, n in slices)


@dataclass(frozen=True, slots=True)
class _Along:
    """What one chunk index means along one dim."""

    index: int
    stored: int
    source: slice
    target: slice


class Pieces(Sequence[Piece]):
    """The pieces that fill a box, in chunk order; each is made when asked for, so that a plan over
    many chunks is arrays and not objects.
    """

    __slots__ = ("_box", "_dims", "_grid", "_length")

    def __init__(self, grid: Grid, box: Box) -> None:
        self._grid = grid
        self._box = box
        self._dims: list[list[_Along]] = []
        for dim, span in enumerate(grid.span(box)):
            low, high = box.offset[dim], box.offset[dim] + box.shape[dim]
            along = []
            for index in span:
                start, stop, stored = grid.interval(dim, index)
                begin, end = max(start, low), min(stop, high)
                source, target = slice(begin - start, end - start), slice(begin - low, end - low)
                along.append(_Along(index, stored, source, target))
            self._dims.append(along)
        self._length = math.prod(map(len, self._dims))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> Piece: ...
    @overload
    def __getitem__(self, at: slice) -> list[Piece]: ...
    def __getitem__(self, at: int | slice) -> Piece | list[Piece]:
        if isinstance(at, slice):
            return [self[i] for i in range(self._length)[at]]
        rest = range(self._length)[at]
        steps = []
        for along in reversed(self._dims):
            rest, place = divmod(rest, len(along))
            steps.append(along[place])
        steps.reverse()
        return Piece(
            self._grid.flat(tuple([step.index for step in steps])),
            tuple([step.stored for step in steps]),
            tuple([step.source for step in steps]),
            tuple([step.target for step in steps]),
        )

    @property
    def across(self) -> int:
        """How many of them lie side by side along the last dim."""
        return len(self._dims[-1]) if self._dims else 1

    def alike(self) -> npt.NDArray[np.bool_]:
        """For each piece whether it is a whole chunk, stored in the shape of its neighbours along
        the last dim.
        """
        uniform = len(self._dims) > 1 and len({step.stored for step in self._dims[-1]}) == 1
        whole = np.ones(1, np.bool_)
        for along in self._dims:
            here = [s.source.start == 0 and s.source.stop == s.stored for s in along]
            whole = (whole[:, None] & np.array(here, np.bool_)[None, :]).reshape(-1)
        return whole & uniform

    def begins(self, *, parts: bool = False) -> I64:
        """For each piece the element at which it begins in an array that holds exactly the box, if
        it is a whole chunk, or with `parts` one run of the elements of a chunk, and lies there
        without a gap; -1 if not.
        """
        begins, elements = np.zeros(1, dtype=np.int64), 1
        gapless = full = np.ones(1, np.bool_)
        is_run = is_full = np.ones(1, np.bool_)
        for along in reversed(self._dims):
            start = np.array([step.target.start for step in along], dtype=np.int64)
            count = np.array([step.target.stop for step in along], dtype=np.int64) - start
            stored = np.array([step.stored for step in along], dtype=np.int64)
            extent = int(count.sum())
            begins = ((start * elements)[:, None] + begins[None, :]).reshape(-1)
            gapless, full = _one_run(gapless, full, count, count == extent)
            is_run, is_full = _one_run(is_run, is_full, count, count == stored)
            elements *= extent
        return np.where(gapless & (is_run if parts else is_full), begins, -1)

    def chunks(self) -> I64:
        """The number of each piece's chunk."""
        return chunks_in(self._grid, self._box)

    def element_spans(self) -> tuple[I64, I64]:
        """For each piece the first element needed and the one after the last, in stored order."""
        first = last = np.zeros(1, dtype=np.int64)
        for along in self._dims:
            stored = np.array([step.stored for step in along], dtype=np.int64)
            start = np.array([step.source.start for step in along], dtype=np.int64)
            stop = np.array([step.source.stop for step in along], dtype=np.int64)
            first = (first[:, None] * stored[None, :] + start[None, :]).reshape(-1)
            last = (last[:, None] * stored[None, :] + (stop - 1)[None, :]).reshape(-1)
        return first, last + 1

    def reach(self, *, parts: bool = False) -> int:
        """How many elements are read for them: whole chunks, or with `parts` their spans."""
        if parts:
            first, last = self.element_spans()
            return int((last - first).sum())
        return math.prod(sum(step.stored for step in along) for along in self._dims)


Mask: TypeAlias = npt.NDArray[np.bool_]


def _one_run(is_run: Mask, is_all: Mask, count: I64, takes_all: Mask) -> tuple[Mask, Mask]:
    """Whether elements are still neighbours, and still all that there are, with one dim more."""
    is_run = (((count == 1)[:, None] | is_all[None, :]) & is_run[None, :]).reshape(-1)
    return is_run, (takes_all[:, None] & is_all[None, :]).reshape(-1)


def pieces_within(grid: Grid, box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """A box as some, in C order, whose bytes lie within `limit` of each other in any one chunk; an
    element at least.
    """
    spans = enumerate(grid.span(box))
    longest = [max((grid.interval(dim, i)[2] for i in span), default=0) for dim, span in spans]
    steps = [math.prod(longest[dim + 1 :]) for dim in range(box.ndim)]
    apart = sum((n - 1) * step for n, step in zip(box.shape, steps, strict=True))
    dim = next((dim for dim, extent in enumerate(box.shape) if extent > 1), None)
    if dim is None or (1 + apart) * itemsize <= limit:
        yield box
        return
    for half in box.split(dim, box.offset[dim] + box.shape[dim] // 2):
        yield from pieces_within(grid, half, itemsize, limit)


def side_by_side(
    pieces: Sequence[Pieces],
    kind: I64,
    number: I64,
    place: I64,
    pack: npt.NDArray[np.uint32],
    apart: npt.NDArray[np.bool_] | None = None,
) -> list[tuple[int, int]]:
    """Runs [i, j) of two or more whole chunks of one pack that are neighbours along the last dim,
    among pieces given as (which `Pieces`, number of their box, place in it); where `apart` says so
    of a piece and the next one, another run begins.
    """
    if all(each.across == 1 for each in pieces):
        return []
    across = np.array([each.across for each in pieces], np.int64)[kind]
    counts = np.array([len(each) for each in pieces], np.int64)
    starts = np.cumsum(counts) - counts
    is_alike = np.concatenate([each.alike() for each in pieces])[starts[kind] + place]
    beside = (number[1:] == number[:-1]) & (pack[1:] == pack[:-1])
    beside &= (place[1:] == place[:-1] + 1) & (place[1:] % across[1:] > 0)
    beside &= is_alike[1:] & is_alike[:-1]
    if apart is not None:
        beside &= ~apart
    borders = [0, *(np.flatnonzero(~beside) + 1).tolist(), len(place)]
    return [(first, last) for first, last in pairwise(borders) if last - first > 1]


def coalesce(
    pack: npt.NDArray[np.uint32],
    start: I64,
    stop: I64,
    *,
    gap: int,
    limit: int,
    together: Sequence[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Cut extents that are sorted by (pack, start) into runs [i, j) that one request reads.

    Neighbours join when at most `gap` bytes lie between them and the request stays within
    `limit`. The runs `together` are runs of their own, whatever their size.
    """
    if not len(pack):
        return []
    other = pack[1:] != pack[:-1]
    # How far the extents so far reach: one may lie inside of an earlier one.
    reach = stop.copy()
    for first, end in pairwise([0, *(np.flatnonzero(other) + 1).tolist(), len(pack)]):
        np.maximum.accumulate(stop[first:end], out=reach[first:end])
    apart = other | (start[1:] - reach[:-1] > gap)
    # One chunk may be needed by several boxes: it is read once.
    repeated = ~other & (start[1:] == start[:-1]) & (stop[1:] == stop[:-1])
    for first, end in together:
        apart[first : end - 1] = False
        apart[max(0, first - 1) : first] = True
        apart[end - 1 : end] = True
    kept = {first for first, _ in together}
    # As lists: each of many runs asks for a few numbers.
    reaches, starts, again = reach.tolist(), start.tolist(), repeated.tolist()
    runs = []
    for begin, end in pairwise([0, *(np.flatnonzero(apart) + 1).tolist(), len(pack)]):
        if begin in kept:
            runs.append((begin, end))
            continue
        first = begin
        while first < end:
            last = max(first + 1, bisect_right(reaches, starts[first] + limit, first, end))
            while last < end and again[last - 1]:
                last += 1
            runs.append((first, last))
            first = last
    return runs


def join_runs(
    runs: Sequence[tuple[int, int]],
    pack: npt.NDArray[np.uint32],
    start: I64,
    stop: I64,
    *,
    gap: int,
    limit: int,
) -> list[tuple[int, int]]:
    """Join runs of `coalesce` further, for stores where a request costs more than some bytes.

    At most `gap` bytes are read for nothing at a place, and in a request as large a share of its
    bytes as `gap` is of `limit`.
    """
    found: list[tuple[int, int]] = []
    begin = reach = waste = 0
    for first, last in runs:
        low, high = int(start[first]), int(stop[first:last].max())
        if found and pack[found[-1][0]] == pack[first]:
            apart, size = max(0, low - reach), max(reach, high) - begin
            # waste / size <= gap / limit, in whole numbers.
            if apart <= gap and size <= limit and (waste + apart) * limit <= gap * size:
                found[-1] = (found[-1][0], last)
                reach, waste = max(reach, high), waste + apart
                continue
        found.append((first, last))
        begin, reach, waste = low, high, 0
    return found


def readable_pieces(grid: Grid, box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """A box as some of at most `limit` bytes, cut where chunks end, so that no chunk is in two of
    them; one chunk may have more.
    """
    if box.is_empty:
        return
    spans = grid.span(box)
    # Along the first dim of several chunks, for pieces that lie together in memory.
    dim = next((dim for dim, span in enumerate(spans) if len(span) > 1), None)
    if dim is None or box.size * itemsize <= limit:
        yield box
        return
    middle = grid.interval(dim, spans[dim][len(spans[dim]) // 2])[0]
    for half in box.split(dim, middle):
        yield from readable_pieces(grid, half, itemsize, limit)


def readers_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which of some ranks reads each piece: about the same number of bytes each, and neighbours,
    which one request may read, together.
    """
    total = max(1, sum(sizes))
    middles = (2 * end - size for size, end in zip(sizes, accumulate(sizes), strict=True))
    return [min(ranks - 1, middle * ranks // (2 * total)) for middle in middles]


def batches(sizes: Sequence[int] | I64, limit: int) -> list[tuple[int, int]]:
    """Runs [i, j) of neighbours that have at most `limit` bytes together, or are one alone."""
    ends = np.cumsum(sizes)
    found, first, begin = list[tuple[int, int]](), 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, begin + limit, side="right")))
        found.append((first, last))
        first, begin = last, int(ends[last - 1])
    return found


@dataclass(frozen=True, slots=True)
class Reading:
    """What is read to fill some chunks: at most so many requests, and so many bytes."""

    requests: int
    nbytes: int


@lru_cache(maxsize=65536)
def reading_of(
    source: Grid, target: Grid, boxes: tuple[Box, ...], itemsizes: tuple[int, int], limit: int
) -> Reading:
    """What is read, chunks of the source whole, to fill the target's chunks of some boxes in
    batches of at most `limit` bytes, of whichever item is larger; itemsizes are the source's and
    the target's.
    """
    parts = [np.zeros(0, dtype=np.int64), *(chunks_in(target, box) for box in boxes)]
    chunks = np.concatenate(parts)
    if source == target:
        return Reading(len(chunks), int(source.stored_elements(chunks).sum()) * itemsizes[0])
    sizes = target.stored_elements(chunks) * max(itemsizes)
    runs = batches(sizes, limit)
    batch = np.repeat(np.arange(len(runs)), [last - first for first, last in runs])
    needed, owner = _overlapping(source, target, chunks)
    # Once in a batch, however many of its chunks need it.
    keys = np.unique(batch[owner] * np.int64(source.chunk_count) + needed)  # (batch, chunk) as one
    return Reading(
        len(keys),
        int(source.stored_elements(keys % source.chunk_count).sum()) * itemsizes[0],
    )


def _overlapping(source: Grid, target: Grid, chunks: I64) -> tuple[I64, I64]:
    """For every pair of overlapping chunks: the source's number, and the place of the target's in
    `chunks`.
    """
    number = np.zeros(len(chunks), dtype=np.int64)
    place = np.arange(len(chunks))
    if not source.shape:
        return number, place
    index = np.unravel_index(chunks, target.counts)
    for dim, at in enumerate(index):
        inner, outer = source.borders(dim), target.borders(dim)
        # The first source index that overlaps each of the target's, and the one after the last.
        first = np.searchsorted(inner, outer[:-1], side="right") - 1
        last = np.searchsorted(inner, outer[1:], side="left")
        low, count = first[at][place], (last - first)[at][place]
        repeat = np.repeat(np.arange(len(place)), count)
        within = np.arange(len(repeat)) - np.repeat(np.cumsum(count) - count, count)
        number = number[repeat] * source.counts[dim] + low[repeat] + within
        place = place[repeat]
    return number, place


@lru_cache(maxsize=16384)
def spread(
    layout: Layout, source: Grid, target: Grid, itemsizes: tuple[int, int], limit: int
) -> tuple[npt.NDArray[np.float64], Reading]:
    """How many bytes of an array each rank's pack of a layout has, and what is read for all of them
    together; itemsizes are the source's and the target's. What ranks hold alike is in equal shares.
    """
    nbytes = np.zeros(layout.strategy.world_size)
    requests = read = 0
    for shares in writers(layout):
        first: tuple[Box, ...] = ()
        for share, ranks in shares:
            stored = sum(
                int(target.stored_elements(chunks_in(target, box)).sum()) * itemsizes[1]
                for box in share.boxes
            )
            nbytes[ranks] += stored / share.replicas.count
            # What ranks hold alike is read once, by whichever of them writes it.
            first += share.boxes if share.replicas.index == 0 else ()
        reading = reading_of(source, target, first, itemsizes, limit)
        requests, read = requests + reading.requests, read + reading.nbytes
    return nbytes, Reading(requests, read)


def writers(layout: Layout) -> Iterator[list[tuple[Share, list[int]]]]:
    """What ranks hold of a tensor, each distinct part once: its shares, each with ranks that write
    an equal part of it.
    """
    # Parts that overlap have holders of each stretch of their own: no part stands for others then.
    is_tangled, every = layout.is_tangled, range(layout.strategy.world_size)
    for rank in every if is_tangled else layout.distinct_ranks():
        found = []
        for share in layout.shares(rank):
            ranks = [rank]
            if not is_tangled:
                # Who holds the same: along each axis some, in all combinations.
                along = (list(cast("Iterable[int]", some)) for some in share.replicas.key)
                members = np.ravel_multi_index(np.ix_(*along), layout.strategy.mesh.sizes)
                ranks = np.reshape(members, -1).tolist()
            found.append((share, ranks))
        yield found
