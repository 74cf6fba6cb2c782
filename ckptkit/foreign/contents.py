"""A foreign checkpoint as our own steps are: a manifest, and packs that its chunks lie in.

Where a chunk is one run of bytes of a file, that file is its pack. All others are in two more packs
that nobody has written: what is read of them is made of what the files have. One is of strided
chunks, and of those that several files have a piece of; these are put together. The other is of
compressed ones. Nothing of such a chunk can be read before all of it is decoded. So it is decoded
when first needed, and a few are kept: what is read of one is mostly read soon after each other, by
several threads.
"""

from __future__ import annotations

import bisect
import hashlib
import math
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ckptkit.errors import CorruptionError, FormatError
from ckptkit.foreign.extents import (
    DECODED,
    Cells,
    Encoded,
    Extent,
    ForeignArray,
    ForeignStep,
    Stretch,
    cells_of,
    span_of,
)
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import MAX_DIMS, TOO_LARGE, Alias, ArrayInfo, ArrayKind, is_addressable
from ckptkit.format.manifest import Manifest, PackInfo, SaveInfo
from ckptkit.model import Strategy
from ckptkit.storage import Source
from ckptkit.storage.base.store import LendsNothing

SAVE_ID_PREFIX = "foreign-"
# A file is read along where elements are so near each other; farther apart they are read one row
# after the other.
_DENSE = 4
_GATHERED = ".gathered"
_KEPT_BYTES = 64 << 20
# Of zstd: what a frame begins with, and its blocks: a header, at least one byte, and what that
# becomes at most.
_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK_HEADER = 3
_BLOCK_BYTES = 128 << 10
_REPEATED, _COMPRESSED = 1, 2

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class ForeignManifest(Manifest):
    """What is in a foreign checkpoint. Nobody has written checksums of its chunks, and tensors may
    share their bytes.
    """

    is_checked: ClassVar[bool] = False

    foreign: ForeignStep
    gathered: Sequence[Gathered]
    """The chunks of the last pack, in order."""

    def __post_init__(self) -> None:
        sizes = np.array([pack.size for pack in self.packs], dtype=np.uint64)[self.pack]
        outside = (self.offset > sizes) | (self.length > sizes - np.minimum(self.offset, sizes))
        if outside.any():
            row = int(outside.argmax())
            number = int(np.searchsorted(self.starts, row, side="right")) - 1
            pack = self.packs[int(self.pack[row])]
            raise FormatError(
                f"{self.arrays[number].name} reaches past the end of {pack.name}, "
                f"which has {pack.size} bytes",
                where=pack.name,
                value=(int(self.offset[row]), int(self.length[row])),
                hint="the file was cut short, or is another one; copy it again",
            )

    @property
    def sizes(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self.foreign.sizes

    def to_bytes(self) -> bytes:
        raise FormatError("a foreign checkpoint has no manifest of ours", where=self.foreign.format)


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """One chunk that is put together, and of what it is made."""

    nbytes: int
    itemsize: int
    stretches: tuple[Stretch, ...]
    extents: tuple[Extent, ...]


def manifest_of(found: ForeignStep, fingerprint: bytes) -> ForeignManifest:
    """The manifest of what a reader has found, checked: every array whole, every byte inside of its
    file. `fingerprint` is what the files looked like when they were read.
    """
    arrays = sorted(found.arrays, key=attrgetter("name"))
    strategy = found.strategy or Strategy.of("single")
    sizes = {key: found.files[key] for key in sorted(found.files)}
    if found.encoded:
        sizes[DECODED] = sum(chunk.nbytes for chunk in found.encoded)
    number_of = {key: number for number, key in enumerate(sizes)}
    infos: list[ArrayInfo] = []
    # Layers are alike, so there are few kinds; each with the lengths of its chunks.
    kinds: dict[ArrayKind, tuple[ArrayKind, Any]] = {}
    gathered: list[Gathered] = []
    columns: list[tuple[Any, Any, Any]] = []
    end = 0
    for array in arrays:
        if len(array.shape) > MAX_DIMS:
            count = len(array.shape)
            raise FormatError(f"more than {MAX_DIMS} dims", where=array.name, value=count)
        if not is_addressable(array.shape, array.dtype):
            raise FormatError(TOO_LARGE, where=array.name, value=array.shape)
        cells = cells_of(array)
        kind = ArrayKind(array.shape, array.dtype, cells.grid, array.role, array.placements)
        if kind not in kinds:
            stored = cells.grid.stored_elements().astype(np.uint64)
            kinds[kind] = kind, stored * array.dtype.itemsize
        kind, lengths = kinds[kind]
        infos.append(ArrayInfo(array.name, kind, array.of))
        pack, offset = _placed(array, cells, number_of)
        for chunk, stretches in cells.gathered.items():
            nbytes = int(lengths[chunk])
            entry = Gathered(nbytes, array.dtype.itemsize, stretches, array.extents)
            _check_inside(entry, sizes, array.name)
            gathered.append(entry)
            pack[chunk], offset[chunk] = len(sizes), end
            end += nbytes
        columns.append((pack, offset, lengths))
    packs = [PackInfo(key, size, None) for key, size in sizes.items()]
    if gathered:
        packs.append(PackInfo(_GATHERED, end, None))
    aliases = [Alias(name, of) for name, of in sorted(found.aliases.items())]
    table = ArrayTable.of(infos, aliases)
    # Where a file is another one, or what was found, so is what stands for the id of the save.
    digest = hashlib.sha256(fingerprint)
    for part in (found.format.encode(), *table.packed):
        digest.update(len(part).to_bytes(8, "little") + part)
    joined = [
        np.concatenate([np.zeros(0, dtype), *(row[place] for row in columns)]).astype(dtype)
        for place, dtype in enumerate(("<u4", "<u8", "<u8"))
    ]
    return ForeignManifest(
        save=SaveInfo(
            save_id=SAVE_ID_PREFIX + digest.hexdigest()[:40],
            step=found.step,
            time=found.time,
            writer=found.format,
            world_size=strategy.world_size,
            strategy=strategy,
            details=dict(found.details),
        ),
        packs=tuple(packs),
        table=table,
        pack=joined[0],
        offset=joined[1],
        length=joined[2],
        crc32=np.zeros(len(joined[0]), dtype=np.uint32),
        objects=tuple(found.objects),
        foreign=found,
        gathered=gathered,
    )


def _placed(array: ForeignArray, cells: Cells, number_of: dict[str, int]) -> tuple[Any, Any]:
    """The columns `pack` and `offset` of an array's chunks that are runs of bytes of a file."""
    for extent in array.extents:
        if extent.file not in number_of:
            raise FormatError("a file of it is missing", where=array.name, value=extent.file)
    if not array.extents:
        nothing = np.zeros(len(cells.owner), dtype=np.int64)
        return nothing, nothing.copy()
    pack = np.array([number_of[extent.file] for extent in array.extents])[cells.owner]
    return pack, np.array([e.offset for e in array.extents])[cells.owner] + cells.offset


def _check_inside(entry: Gathered, sizes: Mapping[str, int], name: str) -> None:
    for stretch in entry.stretches:
        extent = entry.extents[stretch.extent]
        begin = extent.offset + stretch.offset
        end = begin + span_of(stretch.shape, stretch.strides) * entry.itemsize
        if begin < 0 or end > sizes[extent.file]:
            raise FormatError(
                f"{name} reaches past the end of a file of {sizes[extent.file]} bytes",
                where=extent.file,
                value=(begin, end),
                hint="the file was cut short, or is another one; copy it again",
            )


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


class GatheredSource(MadeSource):
    """The pack of gathered chunks."""

    def __init__(
        self,
        manifest: ForeignManifest,
        use: Callable[[str], AbstractContextManager[Source]],
    ) -> None:
        """`use` lends a file of the checkpoint, open."""
        super().__init__(chunk.nbytes for chunk in manifest.gathered)
        self._chunks, self._use = manifest.gathered, use

    @contextmanager
    def part(self, number: int) -> Iterator[Bytes]:
        chunk = self._chunks[number]
        whole, size = np.zeros(chunk.nbytes, np.uint8), chunk.itemsize
        for stretch in chunk.stretches:
            extent, shape = chunk.extents[stretch.extent], stretch.shape
            there = slice(stretch.begin, stretch.begin + math.prod(shape) * size)
            target = whole[there].reshape(*shape, size)
            with self._use(extent.file) as source:
                start = extent.offset + stretch.offset
                _read_strided(source, start, shape, stretch.strides, target)
        yield whole


def _read_strided(
    source: Source, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], target: Any
) -> None:
    """Read elements that may lie apart; the last dim of the target are the bytes of one."""
    size = target.shape[-1]
    span = span_of(shape, strides) * size
    if span <= _DENSE * target.nbytes:
        data = np.frombuffer(source.fetch(offset, span), dtype=np.uint8)
        steps = (*(step * size for step in strides), 1)
        target[...] = np.ndarray((*shape, size), np.uint8, data, 0, steps)
        return
    # Along the dim whose neighbours lie farthest apart.
    dim = max(range(len(shape)), key=lambda d: strides[d] if shape[d] > 1 else -1)
    rest = tuple(n for d, n in enumerate(shape) if d != dim)
    steps = tuple(s for d, s in enumerate(strides) if d != dim)
    for index in range(shape[dim]):
        row = target[(*(slice(None),) * dim, index)]
        _read_strided(source, offset + index * strides[dim] * size, rest, steps, row)


def kept_bytes(chunks: Sequence[Encoded]) -> int:
    """The most that a `DecodedSource` has in memory, however many threads read."""
    sizes = [chunk.making_bytes for chunk in chunks]
    return max(min(_KEPT_BYTES, sum(sizes)), max(sizes, default=0))


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
