"""What a format's reader finds: arrays, and where in which file their elements lie. Some of these
are read where nothing else tells which file is whose.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import Any

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.foreign.folder import Folder, Place, read_places
from ckptkit.format.objects import ObjectInfo
from ckptkit.model import Box, DType, Grid, Placement, Strategy
from ckptkit.model.document import located
from ckptkit.model.grid import I64

# Foreign tensors are stored whole: they are looked at in chunks of about so many bytes, so that a
# part of one is read without the rest. With 4 MiB a job that loads half of each row takes longer,
# by a twelfth at best; with 16 MiB it is hardly faster, and what a server sends takes more memory.
_CHUNK_BYTES = 8 << 20
_MOST_CHUNKS = 1 << 22
# Of larger tensors so many runs of so many elements are compared.
_SAMPLES, _SAMPLE = 4, 64
DECODED = ".decoded"


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


@dataclass(frozen=True, slots=True)
class Extent:
    """A box of an array as it lies in a file: `offset` is the byte of its first element, `strides`
    are in elements, None for C order.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ForeignArray:
    """One array of a foreign checkpoint.

    With `is_flat` the extents are boxes of the array as one row of elements: sharded data
    parallelism cuts it anywhere.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    extents: tuple[Extent, ...]
    role: str = "param"
    of: str | None = None
    placements: tuple[Placement, ...] = ()
    is_flat: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForeignStep:
    """A foreign checkpoint: what is in it, and the files that its extents are in."""

    format: str
    """Its name for people, such as `safetensors`."""
    files: Mapping[str, int]
    """Keys of the store, with the bytes of each."""
    arrays: Sequence[ForeignArray]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Second names of arrays."""
    objects: Sequence[ObjectInfo] = ()
    strategy: Strategy | None = None
    """What wrote it, where it says so; the arrays have a placement for each axis then."""
    step: int = 0
    time: float = 0.0
    theirs: Mapping[str, str] = field(default_factory=dict)
    """What the format calls the arrays that have another name here."""
    details: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """The sizes of the model, as `config.json` has them: rules refer to them."""
    encoded: Sequence[Encoded] = ()
    """What lies compressed in the files. Decoded, one after the other, it is the file `DECODED`."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Elements of one extent that lie in C order in a chunk, from its byte `begin` on."""

    begin: int
    extent: int
    offset: int
    """In bytes, from where the extent begins."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """An array as chunks, each of one extent: columns with a row for each chunk."""

    grid: Grid
    owner: I64
    """The number of the extent that it is in; -1 for chunks that are no run of bytes of a file:
    those in `gathered`.
    """
    offset: I64
    """In bytes, from where the extent begins."""
    gathered: Mapping[int, tuple[Stretch, ...]]


def cells_of(array: ForeignArray) -> Cells:
    """How an array is looked at as chunks; FormatError where its extents leave something out."""
    boxes = tuple(extent.box for extent in array.extents)
    strides = tuple(extent.strides for extent in array.extents)
    with located(array.name):
        if array.is_flat:
            return _flat_cells(array.shape, array.dtype.itemsize, boxes, strides)
        return _cells(array.shape, array.dtype.itemsize, boxes, strides)


# Cached, because layers are alike: what one has found out holds for all.
@lru_cache(maxsize=1024)
def _cells(
    shape: tuple[int, ...],
    itemsize: int,
    boxes: tuple[Box, ...],
    strides: tuple[tuple[int, ...] | None, ...],
) -> Cells:
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.shape) != len(shape) or not whole.contains(box):
            raise FormatError(f"a part that is not inside of {shape}", value=box)
    # Before any list is made: the shape may be what only the metadata says.
    covered = sum(box.size for box in boxes)
    if covered < math.prod(shape):
        raise FormatError(
            "no file has this part of the array",
            value=f"{covered} of {math.prod(shape)} elements",
        )
    # Where any part begins or ends there is a border, across the whole array: every chunk lies in
    # one part then. What sharding cuts is a grid already, and gets no more chunks by this.
    borders = [
        sorted({0, n, *(b.offset[dim] for b in boxes), *(b.stop[dim] for b in boxes)})
        for dim, n in enumerate(shape)
    ]
    steps = [s or c_order(b.shape) for b, s in zip(boxes, strides, strict=True)]
    _split(borders, itemsize, steps[0] if steps else c_order(shape))
    counts = [max(0, len(along) - 1) for along in borders]
    grid = Grid.rectilinear(shape, tuple(tuple(along[1:-1]) for along in borders))
    owner = np.full(counts, -1, dtype=np.int64)
    offset = np.zeros(counts, dtype=np.int64)
    gathered: dict[int, tuple[Stretch, ...]] = {}
    for number, (box, step) in enumerate(zip(boxes, steps, strict=True)):
        if box.is_empty:
            continue
        spans = grid.span(box)
        region = tuple(slice(span.start, span.stop) for span in spans)
        if not (owner[region] == -1).any():
            continue  # a replica of what another part has
        at: Any = np.zeros((1,) * len(shape), dtype=np.int64)
        is_run: Any = np.ones((1,) * len(shape), dtype=np.bool_)
        inner: Any = np.ones((1,) * len(shape), dtype=np.int64)
        for dim in reversed(range(len(shape))):
            along = np.array(borders[dim], dtype=np.int64)[region[dim].start : region[dim].stop + 1]
            broad = tuple(-1 if d == dim else 1 for d in range(len(shape)))
            lengths = np.diff(along).reshape(broad)
            at = at + ((along[:-1] - box.offset[dim]) * step[dim]).reshape(broad)
            is_run = is_run & ((lengths == 1) | (inner == step[dim]))
            inner = inner * lengths
        free = owner[region] == -1
        owner[region] = np.where(free, number, owner[region])
        offset[region] = np.where(free, at * itemsize, offset[region])
        # In numbers of the whole grid, for the chunks of this part that are not one run.
        for index in np.argwhere(free & ~np.broadcast_to(is_run, free.shape)).tolist():
            there = tuple(i + span.start for i, span in zip(index, spans, strict=True))
            cell = grid.box(there)
            stretch = Stretch(0, number, int(offset[there]), cell.shape, step)
            gathered[grid.flat(there)] = (stretch,)
    if (owner == -1).any():
        hole = grid.box(tuple(np.argwhere(owner == -1)[0].tolist()))
        raise FormatError("no file has this part of the array", value=hole)
    flat = owner.reshape(-1)
    flat[list(gathered)] = -1
    return Cells(grid, flat, offset.reshape(-1), gathered)


@lru_cache(maxsize=1024)
def _flat_cells(
    shape: tuple[int, ...],
    itemsize: int,
    boxes: tuple[Box, ...],
    strides: tuple[tuple[int, ...] | None, ...],
) -> Cells:
    if any(strides):
        raise FormatError("elements of what is cut as one row lie apart in a file")
    total = math.prod(shape)
    order = sorted(range(len(boxes)), key=lambda number: boxes[number].offset)
    starts: list[int] = []
    reach = 0
    for number in order:
        box = boxes[number]
        if box.ndim != 1 or box.stop[0] > total:
            raise FormatError(f"a run that is not inside of {total} elements", value=box)
        if box.offset[0] != reach:
            what = "no file has these elements" if box.offset[0] > reach else "two runs overlap"
            raise FormatError(what, value=(reach, box.offset[0]))
        starts.append(reach)
        reach = box.stop[0]
    if reach != total:
        raise FormatError("no file has these elements", value=(reach, total))
    borders = [[0, n] if n else [0] for n in shape]
    _split(borders, itemsize, c_order(shape))
    grid = Grid.rectilinear(shape, tuple(tuple(along[1:-1]) for along in borders))
    ends = np.cumsum(grid.stored_elements())
    begins = ends - grid.stored_elements()
    owner = np.full(grid.chunk_count, -1, dtype=np.int64)
    offset = np.zeros(grid.chunk_count, dtype=np.int64)
    gathered: dict[int, tuple[Stretch, ...]] = {}
    for chunk, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        last = int(np.searchsorted(starts, end, side="left"))
        if last - first == 1:
            owner[chunk], offset[chunk] = order[first], (begin - starts[first]) * itemsize
            continue
        parts = []
        for place in range(first, last):
            number = order[place]
            low, high = max(begin, starts[place]), min(end, boxes[number].stop[0])
            if high > low:
                at = (low - starts[place]) * itemsize
                parts.append(Stretch((low - begin) * itemsize, number, at, (high - low,), (1,)))
        gathered[chunk] = tuple(parts)
    return Cells(grid, owner, offset, gathered)


def _split(borders: list[list[int]], itemsize: int, steps: Sequence[int]) -> None:
    """Put more borders between those of some dims, so that no chunk has many more bytes than is
    good: first along the dim whose neighbours lie farthest apart, so that each chunk lies together.
    """
    longest = [max((b - a for a, b in pairwise(along)), default=0) for along in borders]
    counts = [len(along) - 1 for along in borders]
    sizes: dict[int, int] = {}
    for dim in sorted(range(len(borders)), key=lambda dim: -steps[dim]):
        nbytes = math.prod(longest) * itemsize
        if nbytes <= _CHUNK_BYTES:
            break
        sizes[dim] = longest[dim] = max(1, longest[dim] * _CHUNK_BYTES // nbytes)
        counts[dim] = sum(-((a - b) // sizes[dim]) for a, b in pairwise(borders[dim]))
    # Counted before the borders are made: there may be more than fit into memory.
    if math.prod(counts) > _MOST_CHUNKS:
        raise FormatError("the parts are cut into too many chunks", value=math.prod(counts))
    for dim, size in sizes.items():
        along = borders[dim]
        finer = (n for low, high in pairwise(along) for n in range(low, high, size))
        borders[dim] = [*finer, along[-1]]


def c_order(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of an array whose last dim lies together; as torch has them where
    there are no elements.
    """
    steps = [1]
    for length in reversed(shape[1:]):
        steps.append(steps[-1] * max(1, length))
    return tuple(reversed(steps)) if shape else ()


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie between the first and the last of such, both counted."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Elements in the order of a parameter, or of a bucket, in stretches that are each one run of
    bytes in a file.
    """

    dtype: DType
    stretches: tuple[Extent, ...]
    starts: tuple[int, ...]
    """The first element of each, and behind the last the number of all."""

    @classmethod
    def of(cls, dtype: DType, stretches: Sequence[Extent]) -> Stretches:
        starts = accumulate((extent.box.size for extent in stretches), initial=0)
        return cls(dtype, tuple(stretches), tuple(starts))

    @property
    def size(self) -> int:
        return self.starts[-1]

    def between(self, begin: int, end: int) -> Iterator[tuple[Extent, int, int]]:
        """The stretches of some elements, each with those that count, from its own first on."""
        at = bisect.bisect_right(self.starts, begin) - 1
        while at < len(self.stretches) and self.starts[at] < end:
            first, after = self.starts[at : at + 2]
            if max(begin, first) < min(end, after):
                yield self.stretches[at], max(begin, first) - first, min(end, after) - first
            at += 1


def samples(
    folder: Folder, rows: Sequence[tuple[Stretches, int, int]]
) -> list[np.ndarray[tuple[int], np.dtype[np.generic]]]:
    """Some elements of stretches of rows, which are told by where they begin and how many they are;
    of stretches of one length those at the same places.
    """
    places: list[list[Place]] = []
    for row, begin, size in rows:
        mine, width = [], row.dtype.itemsize
        for first, last in sampled(size):
            for extent, low, high in row.between(begin + first, begin + last):
                start = extent.offset + low * width
                mine.append(Place(extent.file, start, (high - low) * width))
        places.append(mine)
    read = iter(read_places(folder, [each for mine in places for each in mine]))
    return [
        np.frombuffer(b"".join(islice(read, len(mine))), dtype=row.dtype.numpy)
        for mine, (row, _, _) in zip(places, rows, strict=True)
    ]


def sampled(size: int) -> list[tuple[int, int]]:
    if size <= _SAMPLES * _SAMPLE:
        return [(0, size)]
    first = [(size - _SAMPLE) * number // (_SAMPLES - 1) for number in range(_SAMPLES)]
    return [(at, at + _SAMPLE) for at in first]
