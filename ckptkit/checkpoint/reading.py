"""The data plane of loading: exact ranges, coalesced, checked, by a few threads into the
caller's memory (DESIGN section 6).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

from ckptkit.checkpoint.budget import Pace
from ckptkit.checkpoint.job import Job, Request, plan_job
from ckptkit.checkpoint.sources import Sources
from ckptkit.checkpoint.workers import Progress, cores, run_threads
from ckptkit.errors import CorruptionError
from ckptkit.format.arrays import chunk_key
from ckptkit.format.manifest import Manifest
from ckptkit.plan.read import Piece
from ckptkit.storage import Source, default_pool
from ckptkit.storage.buffers import copy_bytes, copy_elements

BAND_BYTES = 4 << 20
PAGE = 4096

# Copies between addresses that are alike modulo a page, or differ modulo 32, run at half speed.
_AHEAD = 256

# Copied and checked at a time: so much stays in the cache of a core.
_CACHED = 256 << 10


def default_threads() -> int:
    """As many as the processor has cores, within reason: reading is copying."""
    return min(8, cores())


class Reader:
    """Runs jobs over the packs of one step, at the pace of their store or at another."""

    def __init__(self, manifest: Manifest, sources: Sources, pace: Pace | None = None) -> None:
        self._manifest = manifest
        self._sources = sources
        self._pace = pace or sources.pace

    def read(
        self,
        requests: Sequence[Request],
        *,
        verify: bool,
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Fill the targets of all requests."""
        job = plan_job(self._manifest, requests, self._pace, verify=verify)
        self.run(job, verify=verify, threads=threads, progress=progress)

    def run(
        self, job: Job, *, verify: bool, threads: int | None, progress: Progress | None = None
    ) -> None:
        """Fill the targets of all requests; CorruptionError names the first chunk that is not as
        it was written.
        """
        pending = iter(job.runs)
        lock = threading.Lock()
        stopped = threading.Event()

        def work() -> None:
            # Always as much, so that loans find each other again.
            with default_pool().take(BAND_BYTES + PAGE if self._pace.by_rows else 0) as scratch:
                while not stopped.is_set():
                    with lock:
                        run = next(pending, None)
                    if run is None:
                        return
                    self._read(job, run, scratch, verify=verify)
                    if progress:
                        progress(int(job.stop[run[1] - 1] - job.start[run[0]]))

        run_threads(work, min(threads or self._pace.requests, len(job.runs)), stopped)

    def _read(self, job: Job, run: tuple[int, int], scratch: memoryview, *, verify: bool) -> None:
        first, last = run
        start = int(job.start[first])
        size = int(job.stop[first:last].max()) - start
        with ExitStack() as stack:
            source = stack.enter_context(self._sources.use(int(job.pack[first])))
            if self._pace.by_rows and first in job.bands:
                self._read_band(job, run, source, scratch, verify=verify)
            elif not self._pace.by_rows and size <= self._pace.request_bytes:
                self._scatter(job, run, source.fetch(start, size), verify=verify)
            elif last == first + 1 and (direct := job.direct(first)) is not None:
                crc = self._fill(source, start, direct, verify=verify)
                if verify:
                    self._compare(job, first, crc)
            else:
                if size > len(scratch):
                    scratch = stack.enter_context(default_pool().take(size))
                self._fill(source, start, scratch[:size], verify=False)
                self._scatter(job, run, scratch[:size], verify=verify)

    def _fill(self, source: Source, start: int, memory: memoryview, *, verify: bool) -> int:
        """Fill memory, by requests that are not too large where each is in memory besides; its
        checksum, with `verify`.
        """
        if self._pace.by_rows:
            source.read_into(start, memory)
            return int(isal_zlib.crc32(memory)) if verify else 0
        crc, step = 0, self._pace.request_bytes
        for begin in range(0, len(memory), step):
            target = memory[begin : begin + step]
            crc = _copied(source.fetch(start + begin, len(target)), target, crc, verify=verify)
        return crc

    def _scatter(self, job: Job, run: tuple[int, int], memory: memoryview, *, verify: bool) -> None:
        """Check what was read, and bring it where it belongs."""
        row, last = run
        base = int(job.start[row])
        while row < last:
            end = job.bands.get(row, row + 1)
            data = memory[int(job.start[row]) - base : int(job.stop[end - 1]) - base]
            if end > row + 1:
                self._scatter_band(job, (row, end), data, verify=verify)
            elif (direct := job.direct(row)) is not None:
                crc = _copied(data, direct, 0, verify=verify)
                if verify:
                    self._compare(job, row, crc)
            else:
                if verify:
                    self._compare(job, row, int(isal_zlib.crc32(data)))
                request, piece = job.piece(row)
                _place(piece, data, _view(request.target, piece.target), partial=not verify)
            row = end

    def _scatter_band(
        self, job: Job, band: tuple[int, int], data: memoryview, *, verify: bool
    ) -> None:
        """Chunks side by side at once, so that the target's rows are written whole."""
        first, last = band
        size = int(job.stop[first] - job.start[first])
        step = int(job.start[first + 1] - job.start[first])
        if verify:
            for row in range(first, last):
                here = data[(row - first) * step :][:size]
                self._compare(job, row, int(isal_zlib.crc32(here)))
        target, shape = _across(job, band)
        bits = target.dtype
        *rows, column = _steps(shape, bits.itemsize)
        copy_elements(np.ndarray(target.shape, bits, data, 0, (*rows, step, column)), target)

    def _read_band(
        self, job: Job, run: tuple[int, int], source: Source, scratch: memoryview, *, verify: bool
    ) -> None:
        """Some rows of all chunks at a time, so that the target's rows are written whole: more than
        twice as fast as the short rows of one chunk, with gaps between them.
        """
        first, last = run
        count = last - first
        target, shape = _across(job, run)
        bits = target.dtype
        row_bytes = math.prod(shape[1:]) * bits.itemsize
        rows = max(1, min(shape[0], (len(scratch) - PAGE) // (count * row_bytes)))
        slot = rows * row_bytes
        starts, crcs = job.start[first:last].tolist(), [0] * count
        ahead = (target.__array_interface__["data"][0] + _AHEAD) % PAGE
        with ExitStack() as stack:
            if count * slot + PAGE > len(scratch):
                scratch = stack.enter_context(default_pool().take(count * slot + PAGE))
            memory = scratch[ahead : ahead + count * slot]
            stored = np.frombuffer(memory, bits).reshape(count, rows, *shape[1:])
            stored = np.moveaxis(stored, 0, -2)
            for begin in range(0, shape[0], rows):
                here = min(rows, shape[0] - begin)
                for number, place in enumerate(starts):
                    data = memory[number * slot : number * slot + here * row_bytes]
                    source.read_into(place + begin * row_bytes, data)
                    if verify:
                        crcs[number] = isal_zlib.crc32(data, crcs[number])
                target[begin : begin + here] = stored[:here]
        if verify:
            for number, crc in enumerate(crcs):
                self._compare(job, first + number, int(crc))

    def _compare(self, job: Job, row: int, actual: int) -> None:
        if actual == int(job.crc32[row]):
            return
        request, piece = job.piece(row)
        array = self._manifest.arrays[request.array]
        raise CorruptionError(
            f"chunk {chunk_key(array.name, array.grid.index(piece.chunk))} has the checksum "
            f"{actual:08x}, written was {int(job.crc32[row]):08x}",
            where=f"{self._sources.where(int(job.pack[row]))} at byte {int(job.start[row])}",
            hint="`ckpt verify` lists all damage of a step; `ckpt ls RUN` shows the other steps",
        )


def _across(job: Job, band: tuple[int, int]) -> tuple[npt.NDArray[Any], tuple[int, ...]]:
    """Where chunks side by side belong, with a dim for them before the last one; and the shape
    of each.
    """
    first, last = band
    request, piece = job.piece(first)
    shape = piece.stored_shape
    along = slice(piece.target[-1].start, job.piece(last - 1)[1].target[-1].stop)
    target = _view(request.target, (*piece.target[:-1], along))
    return target.reshape(*shape[:-1], last - first, shape[-1]), shape


def _copied(source: memoryview, target: memoryview, crc: int, *, verify: bool) -> int:
    """Copy bytes, and go on with a checksum of them while they are in the cache."""
    step = _CACHED if verify else max(1, len(source))
    for begin in range(0, len(source), step):
        block = source[begin : begin + step]
        copy_bytes(block, target[begin : begin + step])
        if verify:
            crc = int(isal_zlib.crc32(block, crc))
    return crc


def _place(
    piece: Piece,
    data: memoryview,
    target: npt.NDArray[Any],
    *,
    partial: bool,
) -> None:
    """Copy the needed elements out of a chunk, or out of the span of it that holds them."""
    bits = target.dtype
    if not partial:
        elements = np.frombuffer(data, dtype=bits).reshape(piece.stored_shape)
        copy_elements(elements[piece.source], target)
        return
    # Only the span from the first to the last needed element was read, so the first one is at 0.
    shape = tuple(s.stop - s.start for s in piece.source)
    copy_elements(
        np.ndarray(shape, bits, data, 0, _steps(piece.stored_shape, bits.itemsize)), target
    )


def _view(array: npt.NDArray[Any], part: tuple[slice, ...]) -> npt.NDArray[Any]:
    """A part as a view, also of an array without dims, which plain indexing would copy."""
    index: Any = (*part, ...)
    view: npt.NDArray[Any] = array[index]
    return view


def _steps(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    steps = [itemsize]
    for extent in reversed(shape[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps)) if shape else ()
