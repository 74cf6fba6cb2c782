"""One file of another format, filled from a step some bytes at a time, by a few threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from isal import isal_zlib

from ckptkit.checkpoint.export.formats import Checked, NewFile
from ckptkit.checkpoint.read.stream import bands
from ckptkit.checkpoint.reshard.copy import ChunkCopier
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.errors import PeerError
from ckptkit.model import Box
from ckptkit.storage import Store

# As much of a file is filled and written at a time.
_SEGMENT = 8 << 20

_Content: TypeAlias = "bytes | Checked | FileBand"


@dataclass(frozen=True, slots=True)
class FileBand:
    """Elements of a tensor that come next in a file."""

    tensor: int
    start: int
    """How many bytes of the tensor come before them."""
    box: Box
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileSegment:
    """Neighbours in a file that are filled and written together, and where each begins."""

    nbytes: int
    pieces: tuple[tuple[int, _Content], ...]


class _Checksums:
    """The checksums of tensors of a file, of which threads fill some bytes at a time.

    A thread waits only for what comes before its own segment. That was begun before, by threads
    that say what they have filled before they wait themselves.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._left = list(sizes)
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in sizes]
        self._changed = threading.Condition()
        self._stopped = False

    def add(self, band: FileBand, crc: int) -> None:
        """Some bytes of a tensor are there."""
        with self._changed:
            self._parts[band.tensor].append((band.start, band.nbytes, crc))
            self._left[band.tensor] -= band.nbytes
            if not self._left[band.tensor]:
                self._changed.notify_all()

    def of(self, tensor: int) -> int:
        """The checksum of a tensor, once all of its bytes are there."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._left[tensor])
            if self._left[tensor]:
                raise PeerError("another thread could not fill its part of the file")
            parts = sorted(self._parts[tensor])
        return combined([crc for _, _, crc in parts], [nbytes for _, nbytes, _ in parts])

    def stop(self) -> None:
        """Nobody has to wait any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def write_file(
    file: NewFile,
    arrays: Sequence[Chosen],
    copier: ChunkCopier,
    store: Store,
    progress: Progress | None,
) -> tuple[int, int]:
    """Write a file; its size, and its checksum."""
    segments = list(_segments(file, arrays, copier.budget.batch_bytes))
    sizes = [segment.nbytes for segment in segments]
    checksums = None
    if any(isinstance(piece, Checked) for piece in file.pieces):
        checksums = _Checksums([array.info.nbytes for array in arrays])
    sink = store.create(file.key, sizes, memory=copier.budget.sink_bytes)
    crcs = [0] * len(segments)

    def write(number: int) -> None:
        try:
            with sink.filling(number) as memory:
                _fill(segments[number], memory, arrays, copier, checksums)
                crcs[number] = int(isal_zlib.crc32(memory))
        except BaseException:
            if checksums is not None:
                checksums.stop()
            raise
        if progress:
            progress(sizes[number])

    try:
        share_out(range(len(segments)), write, copier.budget.workers)
        sink.finish()
    except BaseException:
        sink.abort()
        raise
    return sum(sizes), combined(crcs, sizes)


def combined(crcs: Sequence[int], sizes: Sequence[int]) -> int:
    """The checksum of bytes that have these, one after the other."""
    whole = 0
    for crc, nbytes in zip(crcs, sizes, strict=True):
        whole = int(isal_zlib.crc32_combine(whole, crc, nbytes))
    return whole


def _segments(file: NewFile, arrays: Sequence[Chosen], most: int) -> Iterator[FileSegment]:
    """The bytes of a file in order, small tensors together, large ones a band at a time."""
    held: list[tuple[int, _Content]] = []
    end = 0
    for piece, nbytes in _contents(file, arrays, most):
        if held and end + nbytes > _SEGMENT:
            yield FileSegment(end, tuple(held))
            held, end = [], 0
        held.append((end, piece))
        end += nbytes
    yield FileSegment(end, tuple(held))


def _contents(file: NewFile, arrays: Sequence[Chosen], most: int) -> Iterator[tuple[_Content, int]]:
    """What comes next in a file, and how many bytes that is."""
    for piece in file.pieces:
        if isinstance(piece, Checked):
            yield piece, piece.nbytes
        elif isinstance(piece, bytes):
            for begin in range(0, len(piece), _SEGMENT):
                data = piece[begin : begin + _SEGMENT]
                yield data, len(data)
        else:
            chosen, start = arrays[piece], 0
            itemsize = chosen.info.dtype.itemsize
            widest = max(itemsize, chosen.source.dtype.itemsize)
            for box in bands([chosen.source.grid], _SEGMENT // widest, most // widest):
                band = FileBand(piece, start, box, box.size * itemsize)
                yield band, band.nbytes
                start += band.nbytes


def _fill(
    segment: FileSegment,
    memory: memoryview,
    arrays: Sequence[Chosen],
    copier: ChunkCopier,
    checksums: _Checksums | None,
) -> None:
    boxes = []
    filled: list[tuple[FileBand, memoryview]] = []
    for begin, piece in segment.pieces:
        if isinstance(piece, bytes):
            memory[begin : begin + len(piece)] = piece
        elif isinstance(piece, FileBand):
            chosen, data = arrays[piece.tensor], memory[begin : begin + piece.nbytes]
            values = np.frombuffer(data, chosen.info.dtype.bits).reshape(piece.box.shape)
            boxes.append((chosen, piece.box, values))
            filled.append((piece, data))
    copier.fill_boxes(boxes)
    if checksums is None:
        return
    # All of this segment before any wait: others may wait for it (see `_Checksums`).
    for band, data in filled:
        checksums.add(band, int(isal_zlib.crc32(data)))
    for begin, piece in segment.pieces:
        if isinstance(piece, Checked):
            memory[begin : begin + piece.nbytes] = piece.make([*map(checksums.of, piece.tensors)])
