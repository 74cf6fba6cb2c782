"""What the machine can do at all: the same number of bytes, without a format."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import numpy as np

from benchmarks.contender import make_durable
from benchmarks.state import Memory
from ckptkit.format.manifest import pack_name

BLOCK = 4096

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Floor:
    """Parallel direct writes, one file per rank, out of aligned memory; parallel reads."""

    held: Memory
    threads: int
    segment: int
    preallocate: bool = False
    is_direct: bool = False
    """Whether reads go around the page cache, of a pack, into memory of the floor's own."""

    def save(self, folder: Path) -> None:
        """`pwrite` with O_DIRECT, then fsync of the file and the folder."""
        size = -(-self.held.nbytes // BLOCK) * BLOCK
        flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT
        descriptor = os.open(self._path(folder), flags, 0o644)
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for number in range(self.threads):
            buffers.put(_random_memory(self.segment, number))

        def write(at: int) -> None:
            memory = buffers.get()
            done, length = 0, min(self.segment, size - at)
            while done < length:
                done += os.pwrite(descriptor, memory[done:length], at + done)
            buffers.put(memory)

        try:
            if self.preallocate:
                os.posix_fallocate(descriptor, 0, size)
            self._run(write, range(0, size, self.segment))
            os.ftruncate(descriptor, self.held.nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        make_durable(folder)

    def load(self, folder: Path) -> None:
        """`preadv` of the file, in order, into the existing buffers."""
        if self.is_direct:
            self._load_directly(folder)
            return
        pieces: list[tuple[int, memoryview]] = []
        start = 0
        for flat in self.held.flat():
            for begin in range(0, len(flat), self.segment):
                view = flat[begin : begin + self.segment].data
                pieces.append((start + begin, view))
            start += len(flat)
        descriptor = os.open(self._path(folder), os.O_RDONLY)

        def read(piece: tuple[int, memoryview]) -> None:
            at, target = piece
            done = 0
            while done < target.nbytes:
                done += os.preadv(descriptor, [target[done:]], at + done)

        try:
            self._run(read, pieces)
        finally:
            os.close(descriptor)

    def _load_directly(self, folder: Path) -> None:
        (path,) = folder.rglob(pack_name(self.held.rank))
        descriptor, size = os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size
        buffers: SimpleQueue[memoryview] = SimpleQueue()
        for number in range(self.threads):
            buffers.put(_random_memory(self.segment, number, in_huge_pages=True))

        def read(at: int) -> None:
            memory = buffers.get()
            done, length = 0, min(self.segment, size - at)
            while done < length:
                done += os.preadv(descriptor, [memory[done:]], at + done)
            buffers.put(memory)

        try:
            self._run(read, range(0, size, self.segment))
        finally:
            os.close(descriptor)

    def _run(self, work: Callable[[Item], None], items: Sequence[Item]) -> None:
        with ThreadPoolExecutor(self.threads) as executor:
            for _ in executor.map(work, items):
                pass

    def _path(self, folder: Path) -> Path:
        return folder / f"rank-{self.held.rank}.bin"


@cache
def _random_memory(size: int, number: int, *, in_huge_pages: bool = False) -> memoryview:
    """Page-aligned memory that has been touched: fresh pages would be made in the measured time.

    A device fills memory that lies together by larger requests, here more than twice as fast.
    """
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if in_huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(mapped)
    memory[:] = np.random.default_rng(number).bytes(size)
    return memory
