"""A foreign checkpoint as our own steps are: a manifest, and packs that its chunks lie in.

Where a chunk is one run of bytes of a file, that file is its pack. All other chunks, strided ones
and those that several files have a piece of, are in one more pack that nobody has written: what is
read of it is put together from the files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.foreign.decoded import DECODED, Bytes, MadeSource
from ckptkit.foreign.extents import (
    Cells,
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

SAVE_ID_PREFIX = "foreign-"
# A file is read along where elements are so near each other; farther apart they are read one row
# after the other.
_DENSE = 4
_NOWHERE = ".gathered"


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
        packs.append(PackInfo(_NOWHERE, end, None))
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
