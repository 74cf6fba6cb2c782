"""Chunks that lie in files compressed, as one file in which they are not.

Nothing of a chunk can be read before all of it is decoded. So it is decoded when first needed, and
a few are kept: what is read of one is mostly read soon after each other, by several threads.
"""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.errors import CorruptionError
from ckptkit.foreign.folder import Folder
from ckptkit.storage import Source
from ckptkit.storage.base.store import LendsNothing

DECODED = ".decoded"
_KEPT_BYTES = 64 << 20
# Of zstd: what a frame begins with, and its blocks: a header, at least one byte, and what that
# becomes at most.
_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK_HEADER = 3
_BLOCK_BYTES = 128 << 10
_REPEATED, _COMPRESSED = 1, 2

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where some bytes are: in a file, or in metadata that was read."""

    file: str
    offset: int
    length: int
    inside: bytes | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A chunk of elements: where it is, and how large."""

    name: str
    """What the format calls it, for messages."""
    nbytes: int
    place: Place | None
    """None for one that was not stored, because all of it is zeros."""
    is_compressed: bool = True

    @property
    def making_bytes(self) -> int:
        """What is in memory while it is decoded: what it was, and what it becomes."""
        place = self.place
        return self.nbytes + (place.length if place is not None and place.inside is None else 0)


def kept_bytes(chunks: Sequence[Encoded]) -> int:
    """The most that a `DecodedSource` has in memory, however many threads read."""
    sizes = [chunk.making_bytes for chunk in chunks]
    return max(min(_KEPT_BYTES, sum(sizes)), max(sizes, default=0))


def read_places(folder: Folder, places: Sequence[Place]) -> list[bytes]:
    """Some metadata, with few requests of each file."""
    found: list[bytes] = [place.inside or b"" for place in places]
    by_file: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        if place.inside is None:
            by_file.setdefault(place.file, []).append(number)
    for file, numbers in sorted(by_file.items()):
        numbers.sort(key=lambda number: places[number].offset)
        ranges = [(places[number].offset, places[number].length) for number in numbers]
        for number, data in zip(numbers, folder.read_many(file, ranges), strict=True):
            if len(data) < places[number].length:
                raise CorruptionError(
                    f"the file has {folder.size(file)} bytes, and more are needed",
                    where=folder.where(file),
                    value=(places[number].offset, places[number].length),
                    hint="it was cut short; copy it again",
                )
            found[number] = data
    return found


def inflated(data: bytes, where: str, *, nbytes: int | None = None, most: int = 0) -> Bytes:
    """What a frame of zstd becomes: exactly `nbytes`, or at most `most`."""
    # With zarr it is there anyway; it takes longer to import than most commands may.
    from numcodecs.zstd import decompress  # noqa: PLC0415

    said, bound = _frame_bytes(data)
    # Before memory is asked for: what a frame says of itself may be a lie, or a bomb.
    if nbytes is None:
        fits = 0 <= bound <= most
    else:
        fits = said in (nbytes, None) and nbytes <= bound
    if not fits:
        raise _damaged(where, f"a frame of {said or bound} bytes")
    target = None if nbytes is None else np.empty(nbytes, np.uint8)
    try:
        return np.frombuffer(decompress(data, target), np.uint8)
    except (RuntimeError, ValueError) as error:
        raise _damaged(where, str(error)) from error


def _damaged(where: str, value: str) -> CorruptionError:
    return CorruptionError(
        "compressed bytes that are damaged",
        where=where,
        value=value,
        hint="the file was changed, or cut short; copy it again",
    )


def _frame_bytes(data: bytes) -> tuple[int | None, int]:
    """The bytes that a frame of zstd says it becomes, None where it does not say; and how many its
    blocks become at most, -1 for what is no frame.
    """
    flags = data[4] if len(data) > _BLOCK_HEADER + 4 else 0b1000
    if data[:4] != _MAGIC or flags & 0b1011:  # of a dictionary, or of another version
        return None, -1
    is_single, width = bool(flags & 0b100000), (0, 2, 4, 8)[flags >> 6]
    at, width = (5, width or 1) if is_single else (6, width)
    said = int.from_bytes(data[at : at + width], "little") + 256 * (width == 2)
    at, bound, is_last = at + width, 0, False
    while not is_last and at + _BLOCK_HEADER <= len(data):
        header = int.from_bytes(data[at : at + _BLOCK_HEADER], "little")
        is_last, kind, size = bool(header & 1), header >> 1 & 0b11, header >> 3
        bound += _BLOCK_BYTES if kind == _COMPRESSED else size
        at += _BLOCK_HEADER + (1 if kind == _REPEATED else size)
    return said if width else None, bound


class MadeSource(LendsNothing, ABC):
    """A file that nobody has written, open for reading: parts, one after the other, each of which
    is made as a whole. No file is held: those that the parts are made of are the others' packs.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._stops = [*accumulate(sizes)]
        self.size = self._stops[-1] if self._stops else 0

    @abstractmethod
    def part(self, number: int) -> AbstractContextManager[Bytes]:
        """Lends the bytes of a part."""

    def read_into(self, offset: int, *buffers: memoryview) -> None:
        at = offset
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                number = bisect.bisect_right(self._stops, at)
                with self.part(number) as data:
                    begin = at - self._stops[number] + len(data)
                    count = min(len(data) - begin, len(buffer) - done)
                    buffer[done : done + count] = data[begin : begin + count].data
                    del data  # or it would still be in memory when the block ends
                done, at = done + count, at + count

    def fetch(self, offset: int, length: int) -> memoryview:
        memory = memoryview(bytearray(length))
        self.read_into(offset, memory)
        return memory

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Kept:
    """A chunk, once it is decoded, and how many threads need it now."""

    data: Future[Bytes] = field(default_factory=Future)
    users: int = 0


class DecodedSource(MadeSource):
    """The file of decoded chunks. A thread waits where its chunk and those that others are using
    would be too much, so that memory is bounded.
    """

    def __init__(
        self,
        chunks: Sequence[Encoded],
        use: Callable[[str], AbstractContextManager[Source]],
        where: Callable[[str], str],
    ) -> None:
        """`use` lends a file of the checkpoint, open; `where` is its place, for messages."""
        super().__init__(chunk.nbytes for chunk in chunks)
        self._chunks = chunks
        self._use, self._where = use, where
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._kept_bytes = 0
        self._changed = threading.Condition()

    def close(self) -> None:
        self._kept.clear()

    @contextmanager
    def part(self, number: int) -> Iterator[Bytes]:
        """One chunk, as long as the block lasts. Of threads that need it, the first decodes it, and
        the others wait.
        """
        chunk, is_mine = self._chunks[number], False
        with self._changed:
            # Nobody waits for room who holds a chunk, so those who do will leave some.
            while number not in self._kept and not self._has_room(chunk.making_bytes):
                self._changed.wait()
            if number not in self._kept:
                self._kept[number], is_mine = _Kept(), True
                self._kept_bytes += chunk.making_bytes
            kept = self._kept[number]
            kept.users += 1
            self._kept.move_to_end(number)
        try:
            if is_mine:
                self._decode(number, kept)
            yield kept.data.result()
        finally:
            with self._changed:
                kept.users -= 1
                self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        """Whether so much may be added, once some of what nobody uses is gone."""
        for number in [number for number, kept in self._kept.items() if not kept.users]:
            if self._kept_bytes + nbytes <= _KEPT_BYTES:
                break
            del self._kept[number]
            self._kept_bytes -= self._chunks[number].nbytes
        return not self._kept or self._kept_bytes + nbytes <= _KEPT_BYTES

    def _decode(self, number: int, kept: _Kept) -> None:
        chunk = self._chunks[number]
        try:
            kept.data.set_result(self._made(chunk))
        except BaseException as error:  # noqa: BLE001 — the result raises it, for all who wait
            with self._changed:
                del self._kept[number]
                self._kept_bytes -= chunk.making_bytes
            kept.data.set_exception(error)
        else:
            with self._changed:
                self._kept_bytes -= chunk.making_bytes - chunk.nbytes
                self._changed.notify_all()

    def _made(self, chunk: Encoded) -> Bytes:
        place = chunk.place
        if place is None:
            return np.zeros(chunk.nbytes, np.uint8)
        data: Any = place.inside
        if data is None:
            with self._use(place.file) as source:
                data = source.fetch(place.offset, place.length)
        where = f"{self._where(place.file)} at byte {place.offset}: {chunk.name}"
        return decoded(data, chunk, where)


def decoded(data: Any, chunk: Encoded, where: str) -> Bytes:
    """The elements of a chunk, of what is stored of it."""
    if chunk.is_compressed:
        return inflated(data, where, nbytes=chunk.nbytes)
    if len(data) != chunk.nbytes:
        raise _damaged(where, f"{len(data)} bytes for {chunk.nbytes}")
    return np.frombuffer(data, np.uint8)
