"""Which bytes of which packs fill some boxes, by which requests they are read, and the reading:
exact ranges, coalesced, checked, by a few threads into the caller's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.workers import Pace, Progress
from ckptkit.model import Box
from ckptkit.model.grid import I64
from ckptkit.plan.read import Piece, Pieces, coalesce, join_runs, side_by_side
from ckptkit.storage import Source, default_pool
from ckptkit.storage.base.buffers import PAGE, address_of, copy_bytes, copy_elements

BAND_BYTES = 4 << 20

# Whether the page cache has what is to be read is asked at so many places, of so much or more.
_LOOKS = 8
_LEAST_COLD = 16 << 20
_KEPT_PIECES = 4096
# Copies between addresses that are alike modulo a page, or differ modulo 32, run at half speed.
_AHEAD = 256
# Addresses that do not differ modulo so much are copied fast by the system itself.
_ALIKE = 32
# Asking whether the system has a file in memory, and for how long, takes as long as copying less.
_LEAST_LENT = 128 << 10
# Copied, and then checked, at a time. Less would stay in the cache of one core, but threads wait
# for each other between the two, which takes longer than that saves.
_COPY_BYTES = 4 << 20
# To let other threads go on takes longer than to copy so much.
_SHORT = 32 << 10
# So many bytes between two pieces are read along everywhere: headers are no longer.
WIDEST_GAP = 4 << 10
# Where nothing is compared and as many lie between two rows of a chunk, it takes no longer to ask
# for each row, and up to twice as long where fewer do (measured, 2 to 8 rows of 2 to 128 KiB).
_ROW_GAP = 16 << 10
_NEEDED_BY_NOBODY = memoryview(bytearray(WIDEST_GAP))


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """One box of one array, and the memory it goes to, if any: raw elements in the box's shape."""

    array: int
    box: Box
    target: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0))


Staged: TypeAlias = tuple[int, tuple[slice, ...], npt.NDArray[Any]]
"""Which of the wanted boxes some elements are of, where in it they belong, and they themselves."""


def plan_read(
    packs: OpenPacks,
    wanted: Sequence[Wanted],
    pace: Pace,
    *,
    verify: bool,
    progress: Progress | None = None,
    alone: bool = False,
    staged: bool = False,
) -> ReadPlan:
    """Which bytes to read to fill all that is wanted. With `verify` always whole chunks, so that
    each can be checked, where there are checksums to check them by. `alone` says that nobody else
    reads them: what a device has is then read past the page cache. The runs of a `staged` plan are
    for `stage`, and not for `read`.
    """
    # Layers are alike: what is said of pieces is found once for each kind of box.
    manifest = packs.manifest
    verify = verify and manifest.is_checked
    pieces, sizes = list[Pieces](), list[int]()
    known: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []
    for each in wanted:
        kind, box = manifest.table.kinds[each.array], each.box
        # Arrays that are alike share their kind, which is long to compare.
        found = known.setdefault((id(kind), box.offset, box.shape), len(pieces))
        if found == len(pieces):
            pieces.append(Pieces(kind.grid, box))
            sizes.append(kind.dtype.itemsize)
        numbers.append(found)
    # A row for each piece of each box: which box (`number`), which of its pieces (`place`), and
    # where the kinds' columns, joined, say what holds for it (`at`).
    filled_by = np.array(numbers, np.int64)
    lengths = np.array([len(each) for each in pieces], np.int64)
    counts = lengths[filled_by]
    number = np.repeat(np.arange(len(wanted)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = (np.cumsum(lengths) - lengths)[filled_by][number] + place
    # Which chunk that is (its row in the manifest), and where what is needed of it lies and lands.
    firsts = manifest.starts[np.array([each.array for each in wanted], np.int64)]
    rows = _joined([each.chunks() for each in pieces])[at] + firsts[number]
    start = manifest.offset[rows].astype(np.int64)
    stop = start + manifest.length[rows].astype(np.int64)
    begins = [each.begins(parts=not verify) for each in pieces]
    pairs = zip(begins, sizes, strict=True)
    lands = _joined([np.where(begin < 0, -1, begin * size) for begin, size in pairs])[at]
    if not verify:
        spans = [each.element_spans() for each in pieces]
        first = _joined([span[0] * size for span, size in zip(spans, sizes, strict=True)])
        last = _joined([span[1] * size for span, size in zip(spans, sizes, strict=True)])
        start, stop = start + first[at], start + last[at]
    # In the order of the packs: which rows are read together.
    pack = manifest.pack[rows]
    order = np.lexsort((start, pack))
    pack, start, stop = pack[order], start[order], stop[order]
    number, place = number[order], place[order]
    if alone and not pace.by_request and _are_cold(packs, pack, start, stop):
        pace = pace.past_cache()
    gap, limit = min(WIDEST_GAP, pace.gap_bytes), pace.request_bytes
    if pace.by_request:
        runs = coalesce(pack, start, stop, gap=gap, limit=limit)
        runs = join_runs(runs, pack, start, stop, gap=pace.gap_bytes, limit=limit)
        # A band is brought to the target by strides over the memory of one box: within one run, at
        # equal distances.
        apart = np.zeros(max(0, len(start) - 1), np.bool_)
        apart[[first - 1 for first, _ in runs[1:]]] = True
        bands = side_by_side(pieces, filled_by[number], number, place, pack, apart)
        steps = np.diff(start)
        bands = [(i, j) for i, j in bands if len(set(steps[i : j - 1].tolist())) == 1]
    else:
        # Together in a run of any length: the rows of a target are to be written whole.
        bands = side_by_side(pieces, filled_by[number], number, place, pack) if not staged else []
        runs = coalesce(pack, start, stop, gap=gap, limit=limit, together=bands)
    return ReadPlan(
        packs=packs,
        pace=pace,
        verify=verify,
        progress=progress,
        wanted=wanted,
        pieces=pieces,
        filled_by=filled_by,
        number=number,
        place=place,
        pack=pack,
        start=start,
        stop=stop,
        crc32=manifest.crc32[rows][order],
        lands=lands[order],
        runs=runs,
        piece_of=lru_cache(_KEPT_PIECES)(Pieces.__getitem__),
        bands=dict(bands),
    )


def _are_cold(packs: OpenPacks, pack: npt.NDArray[np.uint32], start: I64, stop: I64) -> bool:
    """Whether the system does not have most of some extents in memory, by a look at a few that are
    spread evenly over their bytes; not of so little that the page cache brings it as soon.
    """
    reach = np.cumsum(stop - start)
    if not len(reach) or reach[-1] < _LEAST_COLD:
        return False
    found = 0
    for number in range(_LOOKS):
        place = int(reach[-1]) * (2 * number + 1) // (2 * _LOOKS)
        row = int(np.searchsorted(reach, place, side="right"))
        with packs.use(int(pack[row])) as source:
            # Not where the extent begins: several of these places may lie in a long one.
            found += source.is_at_hand(int(stop[row] - reach[row]) + place)
    return 2 * found < _LOOKS


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """All pieces that fill some wanted boxes, sorted by where they lie; columns with one row a
    piece. `read` is for any thread, `pace.requests` of them are fast at a time.
    """

    packs: OpenPacks
    pace: Pace
    verify: bool
    progress: Progress | None
    wanted: Sequence[Wanted]
    pieces: Sequence[Pieces]
    filled_by: npt.NDArray[np.int64]
    """Of each wanted box which of the `pieces` fill it: layers are alike, and share theirs."""
    number: npt.NDArray[np.int64]
    """Which of the wanted boxes it is for."""
    place: npt.NDArray[np.int64]
    """Which of its box's pieces it is."""
    pack: npt.NDArray[np.uint32]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.uint32]
    lands: npt.NDArray[np.int64]
    """The byte of the wanted memory where the piece begins, if it lands there without a gap: a
    whole chunk, or one run of it where nothing is compared. -1 for the others.
    """
    runs: list[tuple[int, int]]
    piece_of: Callable[[Pieces, int], Piece]
    """Keeps some pieces: those of arrays that are cut alike are the same."""
    bands: Mapping[int, int]
    """Which runs are chunks side by side along the last dim, so that each row of the target comes
    from all of them: first row to last. In a file system that is all of a run, elsewhere the chunks
    lie at equal distances.
    """

    def piece(self, row: int) -> tuple[Wanted, Piece]:
        """One piece, and what it is for."""
        number = int(self.number[row])
        pieces = self.pieces[int(self.filled_by[number])]
        return self.wanted[number], self.piece_of(pieces, int(self.place[row]))

    def lands_in(self, row: int) -> memoryview | None:
        """The caller's memory, where what is read of a chunk lands there without a gap."""
        begin, target = int(self.lands[row]), self.wanted[int(self.number[row])].target
        if begin < 0 or not target.flags.c_contiguous:
            return None
        flat = target.reshape(-1).view(np.uint8).data
        return flat[begin : begin + int(self.stop[row] - self.start[row])]

    def read(self, run: tuple[int, int]) -> None:
        """Read one run, from any thread; CorruptionError names the first chunk that is not as it
        was written.
        """
        first, last = run
        start = int(self.start[first])
        size = int(self.stop[first:last].max()) - start
        with self.packs.use(int(self.pack[first])) as source:
            if self.pace.by_request:
                self._request(run, source, size)
            # From the page cache: into the caller's memory where that has the shape of chunks,
            # since every other way is a copy more.
            elif first in self.bands:
                self._read_band(run, source)
            elif not (
                self._copy_cached(run, source, size)
                or self._read_in_place(run, source)
                or self._read_rows(run, source)
            ):
                with default_pool().take(max(size, BAND_BYTES + PAGE)) as memory:
                    source.read_into(start, memory[:size])
                    self._scatter(run, memory[:size])
        if self.progress:
            self.progress(size)

    def _request(self, run: tuple[int, int], source: Source, size: int) -> None:
        """Read a run over a network, or past the page cache: what a request brings is in memory of
        its own, and is copied from there in any case. Only a chunk that is larger than a request
        takes several.
        """
        first, last = run
        start = int(self.start[first])
        if size <= self.pace.request_bytes:
            with source.lend(start, size, past_cache=True) as memory:
                self._scatter(run, source.fetch(start, size) if memory is None else memory)
                del memory  # or it would still be looked at when the block ends
        elif last == first + 1 and (own := self.lands_in(first)) is not None:
            crc = self._fetch(source, start, own, verify=self.verify)
            if self.verify:
                self._compare(first, crc)
        else:
            with default_pool().take(size) as memory:
                self._fetch(source, start, memory, verify=False)
                self._scatter(run, memory)

    @property
    def longest(self) -> int:
        """The memory that `stage` needs for any of the runs."""
        sizes = [int(self.stop[i:j].max() - self.start[i]) for i, j in self.runs]
        return max(sizes, default=0) + PAGE

    def stage(self, run: tuple[int, int], memory: memoryview) -> Iterator[Staged]:
        """Read one run into memory as its pack has it, from any thread, and yield what is wanted of
        each chunk, once it was compared. For targets that only the caller can copy to.
        """
        first, last = run
        starts, stops = self.start[first:last].tolist(), self.stop[first:last].tolist()
        begin, size = starts[0], max(stops) - starts[0]
        ahead = (begin + _AHEAD - address_of(memory)) % PAGE
        data = memory[ahead : ahead + size]
        with self.packs.use(int(self.pack[first])) as source:
            if self.pace.by_request:
                self._fetch(source, begin, data, verify=False)
            else:
                source.read_into(begin, data)
        for row, start, stop in zip(range(first, last), starts, stops, strict=True):
            chunk = data[start - begin : stop - begin]
            if self.verify:
                self._compare(row, int(isal_zlib.crc32(chunk)))
            wanted, piece = self.piece(row)
            bits = self.packs.manifest.table.kinds[wanted.array].dtype.bits
            yield int(self.number[row]), piece.target, self._elements(piece, bits, chunk)
        if self.progress:
            self.progress(size)

    def _copy_cached(self, run: tuple[int, int], source: Source, size: int) -> bool:
        """Copy from where the system has the file in memory, if it has; False too where it copies
        as fast itself: a chunk for the caller's memory, at an address that suits its offset.
        """
        if not self.pace.borrows or size < _LEAST_LENT:
            return False
        start, own = int(self.start[run[0]]), self.lands_in(run[0])
        if own and (address_of(own) - start) % _ALIKE == 0:
            return False
        with source.lend(start, size) as memory:
            if memory is None:
                return False
            self._scatter(run, memory)
            del memory  # or it would still be looked at when the block ends
        return True

    def _read_in_place(self, run: tuple[int, int], source: Source) -> bool:
        """Read whole chunks straight into the caller's memory, all by one request; False where one
        of them does not land there without a gap, or is needed twice.
        """
        first, last = run
        starts, stops = self.start[first:last].tolist(), self.stop[first:last].tolist()
        targets: list[memoryview] = []
        buffers: list[memoryview] = []
        reach = starts[0]
        for row, start, stop in zip(range(first, last), starts, stops, strict=True):
            target = self.lands_in(row)
            if target is None or start < reach:
                return False
            if start > reach:
                buffers.append(_NEEDED_BY_NOBODY[: start - reach])
            targets.append(target)
            buffers.append(target)
            reach = stop
        source.read_into(starts[0], *buffers)
        if self.verify:
            written = self.crc32[first:last].tolist()
            for row, target, crc in zip(range(first, last), targets, written, strict=True):
                if (actual := isal_zlib.crc32(target)) != crc:
                    self._compare(row, int(actual))
        return True

    def _read_rows(self, run: tuple[int, int], source: Source) -> bool:
        """Read what is needed of one chunk row by row straight into the caller's memory; False
        where that is all of it, its rows lie near each other, or do not lie together there.
        """
        row, last = run
        wanted, piece = self.piece(row)
        target, size = _view(wanted.target, piece.target), wanted.target.dtype.itemsize
        is_apart = not self.verify and last == row + 1 and target.flags.c_contiguous
        if not is_apart or self.packs.is_put_together(int(self.pack[row])):
            return False
        strides = _strides(piece.stored_shape, size)
        # From here on the dims lie together.
        dim = target.ndim
        while dim and (dim == target.ndim or target.shape[dim] * strides[dim] == strides[dim - 1]):
            dim -= 1
        nbytes = math.prod(target.shape[dim:]) * size
        if not dim or strides[dim - 1] - nbytes < _ROW_GAP:
            return False
        flat = target.reshape(-1).view(np.uint8).data
        places: Any = np.zeros(1, np.int64)
        for count, stride in zip(target.shape[:dim], strides, strict=False):
            places = (places[:, None] + np.arange(count) * stride).reshape(-1)
        places += int(self.start[row])
        for place, begin in zip(places.tolist(), range(0, len(flat), nbytes), strict=True):
            source.read_into(place, flat[begin : begin + nbytes])
        return True

    def _fetch(self, source: Source, start: int, memory: memoryview, *, verify: bool) -> int:
        """Fill memory by requests that are not too large, since each is in memory besides; its
        checksum, with `verify`.
        """
        crc, step = 0, self.pace.request_bytes
        for begin in range(0, len(memory), step):
            target = memory[begin : begin + step]
            with source.lend(start + begin, len(target), past_cache=True) as lent:
                data = source.fetch(start + begin, len(target)) if lent is None else lent
                crc = _copied(data, target, crc, verify=verify)
                del data, lent  # or they would still be looked at when the block ends
        return crc

    def _scatter(self, run: tuple[int, int], memory: memoryview) -> None:
        """Check what was read, and bring it where it belongs."""
        row, last = run
        # As lists: of tens of thousands of small chunks each is asked for several numbers.
        first, starts = row, self.start[row:last].tolist()
        stops, base = self.stop[row:last].tolist(), starts[0]
        while row < last:
            end = self.bands.get(row, row + 1)
            data = memory[starts[row - first] - base : stops[end - 1 - first] - base]
            if end > row + 1:
                # Chunks side by side at once, so that the target's rows are written whole.
                size = int(self.stop[row] - self.start[row])
                apart = int(self.start[row + 1] - self.start[row])
                if self.verify:
                    for number in range(row, end):
                        chunk = data[(number - row) * apart :][:size]
                        self._compare(number, int(isal_zlib.crc32(chunk)))
                target, shape = self._across((row, end))
                bits = target.dtype
                *rows, column = _strides(shape, bits.itemsize)
                strides = (*rows, apart, column)
                copy_elements(np.ndarray(target.shape, bits, data, 0, strides), target)
            elif (own := self.lands_in(row)) is not None:
                crc = _copied(data, own, 0, verify=self.verify)
                if self.verify:
                    self._compare(row, crc)
            else:
                if self.verify:
                    self._compare(row, int(isal_zlib.crc32(data)))
                wanted, piece = self.piece(row)
                target = _view(wanted.target, piece.target)
                copy_elements(self._elements(piece, target.dtype, data), target)
            row = end

    def _read_band(self, run: tuple[int, int], source: Source) -> None:
        """Some rows of all chunks at a time, so that the target's rows are written whole: more than
        twice as fast as the short rows of one chunk, with gaps between them.
        """
        first, last = run
        count = last - first
        target, shape = self._across(run)
        bits = target.dtype
        row_bytes = math.prod(shape[1:]) * bits.itemsize
        rows = max(1, min(shape[0], BAND_BYTES // (count * row_bytes)))
        slot = rows * row_bytes
        starts, crcs = self.start[first:last].tolist(), [0] * count
        ahead = (target.__array_interface__["data"][0] + _AHEAD) % PAGE
        # Always as much, so that loans find each other again.
        with default_pool().take(max(count * slot, BAND_BYTES) + PAGE) as scratch:
            memory = data = scratch[ahead : ahead + count * slot]
            stored = np.frombuffer(memory, bits).reshape(count, rows, *shape[1:])
            stored = np.moveaxis(stored, 0, -2)
            for begin in range(0, shape[0], rows):
                here = min(rows, shape[0] - begin)
                for number, place in enumerate(starts):
                    data = memory[number * slot : number * slot + here * row_bytes]
                    source.read_into(place + begin * row_bytes, data)
                    if self.verify:
                        crcs[number] = isal_zlib.crc32(data, crcs[number])
                target[begin : begin + here] = stored[:here]
            # The pool keeps no memory that somebody still looks at.
            del data, stored, memory
        if self.verify:
            for number, crc in enumerate(crcs):
                self._compare(first + number, int(crc))

    def _elements(self, piece: Piece, bits: np.dtype[Any], data: memoryview) -> npt.NDArray[Any]:
        """What is needed of a chunk, of which `data` is what was read."""
        strides = _strides(piece.stored_shape, bits.itemsize)
        if self.verify:
            return _view(np.ndarray(piece.stored_shape, bits, data, 0, strides), piece.source)
        # Only their span was read, so the first one is at 0.
        return np.ndarray([s.stop - s.start for s in piece.source], bits, data, 0, strides)

    def _across(self, band: tuple[int, int]) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
        """Where chunks side by side belong, with a dim for them before the last one; and the shape
        of each.
        """
        first, last = band
        wanted, piece = self.piece(first)
        shape = piece.stored_shape
        along = slice(piece.target[-1].start, self.piece(last - 1)[1].target[-1].stop)
        target = _view(wanted.target, (*piece.target[:-1], along))
        return target.reshape(*shape[:-1], last - first, shape[-1]), shape

    def _compare(self, row: int, actual: int) -> None:
        if actual == int(self.crc32[row]):
            return
        wanted, piece = self.piece(row)
        manifest = self.packs.manifest
        key = manifest.chunk_key(int(manifest.starts[wanted.array]) + piece.chunk)
        pack, start = int(self.pack[row]), int(self.start[row])
        raise self.packs.corrupt(key, actual, int(self.crc32[row]), pack, start)


def _copied(source: memoryview, target: memoryview, crc: int, *, verify: bool) -> int:
    """Copy bytes, some at a time, and go on with a checksum of them, which it returns."""
    if len(source) <= _SHORT:
        target[:] = source
        return int(isal_zlib.crc32(source, crc)) if verify else crc
    step = _COPY_BYTES if verify else max(1, len(source))
    for begin in range(0, len(source), step):
        block = source[begin : begin + step]
        copy_bytes(block, target[begin : begin + step])
        if verify:
            crc = int(isal_zlib.crc32(block, crc))
    return crc


def _view(array: npt.NDArray[Any], part: tuple[slice, ...]) -> npt.NDArray[Any]:
    """A part as a view, also of an array without dims, which plain indexing would copy."""
    index: Any = (*part, ...)
    view: npt.NDArray[Any] = array[index]
    return view


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
