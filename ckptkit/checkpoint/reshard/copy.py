"""Copying packs: each chunk of the target is filled straight from the source's, some neighbours at
a time, within a budget of memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.content import PackContent, PackedArray
from ckptkit.checkpoint.image import ImageWriting
from ckptkit.checkpoint.pace import Pace
from ckptkit.checkpoint.pack_writer import Pack, documents_of
from ckptkit.checkpoint.places import step_name
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.reader import BAND_BYTES, Reader, Request
from ckptkit.checkpoint.read.stream import check_chunk
from ckptkit.checkpoint.reshard.selection import objects_of
from ckptkit.checkpoint.reshard.target import ReshardTarget, TargetArray
from ckptkit.checkpoint.threads import Progress, share_out
from ckptkit.errors import AlreadyExistsError, CkptkitError, PeerError, UsageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box, DType
from ckptkit.plan.read import Piece, batches, pieces_of, pieces_within
from ckptkit.storage import Store
from ckptkit.storage.buffers import copy_elements

# Writers of one file wait for each other, where it is not written past the page cache; of many, few
# would be complete when a run is cut off.
PACKS_AT_ONCE = 2
# As the parts of local files are when a job writes them: larger ones are no faster to write, and
# leave less for other threads to take over.
_USUAL = 8 << 20

_MIB = 1 << 20
_LARGEST_BATCH, _SMALLEST_BATCH = 64 * _MIB, 4 * _MIB
_LARGEST_CHUNK = 16 * _MIB
# Threads, buffers of the storage, and what allocators keep.
_PER_WORKER = 6 * _MIB
_SPARE = 24 * _MIB
# What a worker in a process of its own has in memory before it does anything.
_PROCESS_BYTES = 96 * _MIB
# Of all memory, what may be on its way from a store that is asked over a network, and to one.
_SHARE = 4
# Of all memory, what may be kept of chunks that several packs need, where reading costs more.
_SHARED = 16
# A sink that holds fewer parts waits for each.
_LEAST_PARTS = 2
# Parts of very large packs are larger, since servers take only so many.
_MOST_PARTS = 9000


def copy_packs(
    target: ReshardTarget,
    ranks: Iterable[int],
    source: Checkpoint,
    destination: Store,
    budget: Budget,
    progress: Progress | None = None,
) -> None:
    """Write the packs of some ranks by the threads of this process: each takes the next segment, of
    whichever pack. Where one fails, those that are not finished are removed, and those that are
    stay.
    """
    reader = Reader(source.manifest, source.packs, budget.pace)
    left: dict[ImageWriting, int] = {}
    lock = threading.Lock()
    shared = SharedChunks(budget.shared_bytes) if budget.shared_bytes else None

    def segments_of(rank: int) -> Iterator[tuple[ImageWriting, int]]:
        writing = _begin_pack(target, rank, destination, reader, budget, shared)
        left[writing] = len(writing.segments)
        if not writing.segments:
            writing.finish()
            del left[writing]
        for number in range(len(writing.segments)):
            yield writing, number

    def segments() -> Iterator[tuple[ImageWriting, int]]:
        """By turns from a few packs, which are begun as threads ask for work."""
        waiting = iter(ranks)
        begun: deque[Iterator[tuple[ImageWriting, int]]] = deque()
        while True:
            begun.extend(map(segments_of, islice(waiting, budget.packs - len(begun))))
            if not begun:
                return
            turn = begun.popleft()
            segment = next(turn, None)
            if segment is not None:
                begun.append(turn)
                yield segment

    def write(segment: tuple[ImageWriting, int]) -> None:
        writing, number = segment
        size = writing.write(number)
        with lock:
            left[writing] -= 1
            is_last = not left[writing]
        if is_last:
            # While it is made durable the other threads go on with the next pack.
            writing.finish()
            with lock:
                del left[writing]
        if progress:
            progress(size)

    try:
        share_out(segments(), write, budget.workers)
    except BaseException:
        for writing in left:
            with suppress(CkptkitError):
                writing.abort()
        raise


def check_huge_chunks(target: ReshardTarget, source: Checkpoint, budget: Budget) -> None:
    """Compare the chunks that are too large to be read whole with their checksums, a little of each
    at a time: when they are copied they are only read, some bytes here and there.
    """
    starts, rows = source.manifest.starts, list[int]()
    for array in target.arrays:
        if budget.is_huge(array.source):
            rows += range(*starts[array.number :][:2].tolist())
    share_out(rows, partial(check_chunk, source), min(budget.workers, len(rows)))


def _begin_pack(
    target: ReshardTarget,
    rank: int,
    destination: Store,
    reader: Reader,
    budget: Budget,
    shared: SharedChunks | None,
) -> ImageWriting:
    """Begin the pack of a rank; every segment of it can be written by any thread."""
    writes = target.chunks_of(rank)
    known = [(owned, a.info) for owned, a in zip(target.owned, target.arrays, strict=True)]
    by_name = {array.name: chunks for array, chunks in zip(target.arrays, writes, strict=True)}
    mine = [(a, chunks) for a, chunks in zip(target.arrays, writes, strict=True) if len(chunks)]
    content = CopiedContent(documents_of(known, by_name, rank), mine, reader, budget, shared)
    objects = objects_of(target.choice.objects, rank, target.world_size)
    pack = Pack(content, target.table, rank, objects)
    try:
        return pack.begin(
            destination,
            step_name(target.save.step),
            target.save,
            pack.image.segments_at(_lasts(content, [array for array, _ in mine], budget)),
            refers=rank > 0,
            memory=budget.sink_bytes,
        )
    except AlreadyExistsError as error:
        raise PeerError(
            "another reshard of the same step has begun this pack",
            where=error.where,
            hint="wait for it; the same command again goes on with what it leaves, should it fail",
        ) from error


def _lasts(content: PackContent, origins: Sequence[TargetArray], budget: Budget) -> list[int]:
    """Where segments end: each array's chunks in batches as the plan has them, small ones together.

    The batches of chunks that go over as they are need not be large: no chunk of the source is
    needed by two.
    """
    end = len(content.documents)
    lasts: list[int] = []
    usual = min(_USUAL, budget.batch_bytes)
    held = sum(map(content.length, range(end)))
    for array, origin in zip(content.arrays, origins, strict=True):
        sizes = array.info.grid.stored_elements(array.chunks) * origin.itemsize
        for first, last in batches(sizes, usual if origin.is_kept else budget.batch_bytes):
            nbytes = int(sizes[first:last].sum())
            if held and held + nbytes > usual:
                lasts.append(end)
                held = 0
            end, held = end + last - first, held + nbytes
    return [*lasts, end] if end else []


class CopiedContent(PackContent):
    """What a pack of the target holds, read from the packs of the source when it is needed."""

    def __init__(
        self,
        documents: Sequence[tuple[str, bytes]],
        arrays: Sequence[tuple[TargetArray, npt.NDArray[np.int64]]],
        reader: Reader,
        budget: Budget,
        shared: SharedChunks | None,
    ) -> None:
        super().__init__(documents, [PackedArray(a.info, chunks) for a, chunks in arrays])
        self._origins = [array for array, _ in arrays]
        self._reader = reader
        self._budget = budget
        self._shared = shared

    def filled_chunks(self, targets: Mapping[int, memoryview]) -> Iterator[int]:
        """Read for all of them at once: each chunk of the source is read, and checked, once."""
        limit = self._budget.chunk_bytes
        checked: list[Request] = []
        exact: list[Request] = []
        casts: list[tuple[TargetArray, npt.NDArray[Any], npt.NDArray[Any]]] = []
        with PartsOfChunks(self._shared) as parts:
            for index, memory in targets.items():
                place, chunk = self.at(index)
                array = self._origins[place]
                box, stored = self.arrays[place].opened(chunk, memory)
                source, values = array.source, stored
                if array.is_cast:
                    values = np.empty(box.shape, source.dtype.bits)
                    casts.append((array, values, stored))
                request = Request(array.number, box, values)
                if self._budget.is_huge(source):
                    # Some at a time whose bytes lie close: the chunk is not in memory whole.
                    some = pieces_within(source.grid, box, source.dtype.itemsize, limit)
                    exact += [_part(request, each.within(box), each) for each in some]
                else:
                    checked += parts.requests(request, source)
            if checked:
                self._reader.read(checked, verify=True)
            if others := parts.copied():
                self._reader.read(others, verify=True)
            if exact:
                self._reader.read(exact, verify=False)
        for array, values, stored in casts:
            cast(array.name, values, stored, (array.source.dtype, array.info.dtype))
        yield from targets


def _part(request: Request, inside: tuple[slice, ...], box: Box) -> Request:
    index: Any = (*inside, ...)
    return Request(request.array, box, request.target[index])


def cast(
    name: str, values: npt.NDArray[Any], stored: npt.NDArray[Any], dtypes: tuple[DType, DType]
) -> None:
    """Convert raw elements from the first type to the second; numbers that it lacks are refused."""
    source, target = dtypes
    given = values.view(source.numpy)
    with np.errstate(all="ignore"):
        found = given.astype(target.numpy)
        lost = ~np.isfinite(found) & np.isfinite(given)
        # Some types have no infinity, and make it a NaN.
        lost |= np.isinf(given) & ~np.isinf(found)
    if lost.any():
        raise UsageError(
            f"{int(lost.sum())} values of one chunk are beyond {target.name}",
            where=name,
            value=float(given[lost][0]),
            hint="leave the array out of --cast, or cast to a type with a larger range",
        )
    stored[...] = found.view(target.bits)


@dataclass(slots=True, eq=False)
class SharedChunk:
    """The elements of a chunk, once it is `there`, and how many work with it now."""

    values: npt.NDArray[Any]
    there: threading.Event = field(default_factory=threading.Event)
    users: int = 0
    failed: bool = False


class SharedChunks:
    """Chunks of the source of which several packs need a part: read once, by whoever comes first,
    and kept within `nbytes`, those that were used last.
    """

    def __init__(self, nbytes: int) -> None:
        self._room = nbytes
        # By the number of an array of the source, and that of a chunk.
        self._kept: OrderedDict[tuple[int, int], SharedChunk] = OrderedDict()
        self._lock = threading.Lock()

    def use(self, array: int, info: ArrayInfo, chunk: int) -> tuple[SharedChunk | None, bool]:
        """A chunk to `release` again, and whether the caller is to read it and say `read`; None
        where there is no room for it.
        """
        with self._lock:
            key = array, chunk
            if found := self._kept.get(key):
                self._kept.move_to_end(key)
                found.users += 1
                return found, False
            shape = info.grid.box(info.grid.index(chunk)).shape
            nbytes = math.prod(shape) * info.dtype.itemsize
            for idle in [key for key, it in self._kept.items() if not it.users]:
                if self._room >= nbytes:
                    break
                self._forget(idle)
            if self._room < nbytes:
                return None, False
            made = self._kept[key] = SharedChunk(np.empty(shape, info.dtype.bits), users=1)
            self._room -= nbytes
            return made, True

    def read(self, chunks: Iterable[SharedChunk], *, failed: bool = False) -> None:
        """The chunks are there now, or could not be read: then whoever waits reads for himself."""
        for chunk in chunks:
            chunk.failed = failed
            chunk.there.set()

    def release(self, chunks: Iterable[SharedChunk]) -> None:
        """Nobody here works with the chunks any more."""
        with self._lock:
            for chunk in chunks:
                chunk.users -= 1
            for key in [key for key, it in self._kept.items() if it.failed and not it.users]:
                self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        self._room += self._kept.pop(key).values.nbytes


class PartsOfChunks:
    """What one thread needs of shared chunks: it reads those that nobody has read yet, then waits
    for the others, whose readers wait for nobody meanwhile.
    """

    def __init__(self, chunks: SharedChunks | None) -> None:
        self._chunks = chunks
        self._parts: list[tuple[SharedChunk, Piece, Request]] = []
        self._mine: list[SharedChunk] = []

    def requests(self, request: Request, source: ArrayInfo) -> Iterator[Request]:
        """What there is to read for a request; `copied` brings the rest."""
        pieces = pieces_of(source.grid, request.box)
        if self._chunks is None or all(piece.is_whole for piece in pieces):
            yield request
            return
        for piece in pieces:
            offset = zip(request.box.offset, piece.target, strict=True)
            shape = tuple(each.stop - each.start for each in piece.target)
            box = Box(tuple(at + each.start for at, each in offset), shape)
            part = _part(request, piece.target, box)
            chunk, is_mine = None, False
            if not piece.is_whole:
                chunk, is_mine = self._chunks.use(request.array, source, piece.chunk)
            if chunk is None:
                yield part
                continue
            self._parts.append((chunk, piece, part))
            if is_mine:
                self._mine.append(chunk)
                whole = source.grid.box(source.grid.index(piece.chunk))
                yield Request(request.array, whole, chunk.values)

    def copied(self) -> list[Request]:
        """Once all requests are read: copy the parts, and say what others failed to read."""
        if self._chunks is not None:
            self._chunks.read(self._mine)
        self._mine = []
        left = []
        for chunk, piece, part in self._parts:
            chunk.there.wait()
            if chunk.failed:
                left.append(part)
            else:
                copy_elements(chunk.values[piece.source], part.target)
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._chunks is not None:
            self._chunks.read(self._mine, failed=True)
            self._chunks.release(chunk for chunk, _, _ in self._parts)


@dataclass(frozen=True, slots=True)
class Budget:
    """What each of some workers may hold: a batch of the target's chunks, and the chunks of the
    source that it is filled from, one at a time; and what is under way to and from the stores.
    """

    workers: int
    batch_bytes: int
    chunk_bytes: int
    source: Pace
    """How the source is read by all workers together."""
    sink_bytes: int | None
    """What the sink of one pack may keep; None where it keeps nothing."""
    packs: int
    """How many packs are written at a time."""
    shared_bytes: int
    """What may be kept of chunks of the source that several of these need a part of."""

    @classmethod
    def of(
        cls,
        memory: int,
        workers: int,
        source: Store,
        destination: Store,
        *,
        largest: int,
        pack_bytes: int = 0,
        fixed: int = 0,
        is_here: bool = True,
    ) -> Budget:
        """The largest batches with which `memory` is never exceeded; `largest` is the largest
        chunk of the target, `pack_bytes` about how large the largest pack will be, and `fixed`
        what is in use besides. Unless it is here, each worker has a process and a pack of its own.
        """
        share, can = memory // _SHARE, destination.abilities
        is_far = source.abilities.waits_for_answers
        kept = memory // _SHARED if is_far and is_here else 0
        sink_bytes, packs = None, PACKS_AT_ONCE if is_here else workers
        if can.waits_for_answers:
            part = max(can.part_size, -(-pack_bytes // _MOST_PARTS))
            least, most = _LEAST_PARTS * part, (can.concurrency + 2) * part
            packs = max(1, min(packs, share // least))
            sink_bytes = max(least, min(most, share // packs))
        if not is_here:
            workers = packs
        pace, shared = Pace.of(source, share - kept), kept if packs > 1 else 0
        found = cls(workers, 0, 0, pace, sink_bytes, packs, shared)
        fixed += found.under_way + _SPARE
        each = _PER_WORKER + (0 if is_here else _PROCESS_BYTES)
        for count in range(workers, 0, -1):
            # A batch, one chunk of the source, and as much again where values are converted.
            batch = min(_LARGEST_BATCH, ((memory - fixed) // count - each - BAND_BYTES) // 3)
            if batch >= max(_SMALLEST_BATCH, largest):
                chunk_bytes = max(BAND_BYTES, min(_LARGEST_CHUNK, batch))
                return replace(found, workers=count, batch_bytes=batch, chunk_bytes=chunk_bytes)
        least = fixed + each + BAND_BYTES + 3 * max(_SMALLEST_BATCH, largest)
        raise UsageError(
            f"that is too little memory: this checkpoint takes {-(-least // _MIB)} MiB at least",
            value=memory,
            hint="most of it is for the list of chunks and for one chunk at a time",
        )

    @property
    def under_way(self) -> int:
        """The most that is kept besides what the workers hold."""
        return self.source.nbytes + (self.sink_bytes or 0) * self.packs + self.shared_bytes

    @property
    def peak(self) -> int:
        """The most that is in memory."""
        each = 3 * self.batch_bytes + max(BAND_BYTES, self.chunk_bytes) + _PER_WORKER
        return self.workers * each + _SPARE + self.under_way

    @property
    def pace(self) -> Pace:
        """How each worker reads the source."""
        return self.source.shared(self.workers)

    def alone(self) -> Budget:
        """That of one of the workers, who writes one pack in a process of its own."""
        return replace(self, workers=1, source=self.pace, packs=1, shared_bytes=0)

    def is_huge(self, array: ArrayInfo) -> bool:
        """Whether the chunks of an array of the source are too large to be read whole."""
        size = array.grid.chunk_elements * array.dtype.itemsize
        return array.grid.chunk_count > 0 and size > self.chunk_bytes


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
