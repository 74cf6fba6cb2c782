"""Chunks of the source of which several packs need a part: read once, by whoever comes first."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.read.reader import Request
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box
from ckptkit.plan.read import Piece, pieces_of
from ckptkit.storage.buffers import copy_elements

Key = tuple[int, int]
"""The number of an array of the source, and that of a chunk."""


@dataclass(slots=True, eq=False)
class SharedChunk:
    """The elements of a chunk, once it is `there`, and how many work with it now."""

    values: npt.NDArray[Any]
    there: threading.Event = field(default_factory=threading.Event)
    users: int = 0
    failed: bool = False


class SharedChunks:
    """Keeps chunks within `nbytes`, those that were used last."""

    def __init__(self, nbytes: int) -> None:
        self._room = nbytes
        self._kept: OrderedDict[Key, SharedChunk] = OrderedDict()
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
            if not self._makes_room(math.prod(shape) * info.dtype.itemsize):
                return None, False
            made = self._kept[key] = SharedChunk(np.empty(shape, info.dtype.bits), users=1)
            self._room -= made.values.nbytes
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

    def _makes_room(self, nbytes: int) -> bool:
        idle = [key for key, it in self._kept.items() if not it.users]
        for key in idle:
            if self._room >= nbytes:
                break
            self._forget(key)
        return self._room >= nbytes

    def _forget(self, key: Key) -> None:
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
            part = _part(request, piece)
            chunk, is_mine = None, False
            if not piece.is_whole:
                chunk, is_mine = self._chunks.use(request.array, source, piece.chunk)
            if chunk is None:
                yield part
                continue
            self._parts.append((chunk, piece, part))
            if is_mine:
                self._mine.append(chunk)
                box = source.grid.box(source.grid.index(piece.chunk))
                yield Request(request.array, box, chunk.values)

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


def _part(request: Request, piece: Piece) -> Request:
    offset = tuple(
        at + each.start for at, each in zip(request.box.offset, piece.target, strict=True)
    )
    shape = tuple(each.stop - each.start for each in piece.target)
    inside: Any = (*piece.target, ...)
    return Request(request.array, Box(offset, shape), request.target[inside])
