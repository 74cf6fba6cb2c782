"""How an array is cut into chunks, as Zarr has it: regular, or between edges of each dim."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.errors import FormatError, LayoutError
from ckptkit.model.box import MAX_COORDINATE, Box
from ckptkit.model.document import Fields, integers

I64 = npt.NDArray[np.int64]

MAX_CHUNKS = 2**40


@dataclass(frozen=True, slots=True)
class Grid:
    """How an array is cut into chunks; made by `Grid.regular` or `Grid.rectilinear`.

    Chunks of a regular grid are all stored in full size, those at the edge padded; chunks of a
    rectilinear grid are stored as they are.
    """

    shape: tuple[int, ...]
    _chunk_shape: tuple[int, ...] | None = None
    _edges: tuple[tuple[int, ...], ...] | None = None
    counts: tuple[int, ...] = field(init=False, compare=False, repr=False)
    chunk_count: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for length in self.shape:
            if not 0 <= length <= MAX_COORDINATE:
                raise LayoutError("a dim of an array is from 0 to 2**62", value=self.shape)
        counts = []
        if self._chunk_shape is not None:
            if len(self._chunk_shape) != len(self.shape):
                what = f"the chunk shape has not the rank of {self.shape}"
                raise LayoutError(what, value=self._chunk_shape)
            for length, chunk in zip(self.shape, self._chunk_shape, strict=True):
                if not 1 <= chunk <= MAX_COORDINATE:
                    raise LayoutError(
                        "a dim of a chunk is from 1 to 2**62", value=self._chunk_shape
                    )
                counts.append(-(-length // chunk))
        elif self._edges is not None:
            if len(self._edges) != len(self.shape):
                raise LayoutError(f"the edges have not the rank of {self.shape}", value=self._edges)
            for length, inner in zip(self.shape, self._edges, strict=True):
                last = 0
                for edge in inner:
                    if not last < edge < length:
                        raise LayoutError(f"edges must rise between 0 and {length}", value=edge)
                    last = edge
                counts.append(len(inner) + 1 if length else 0)
        else:
            raise LayoutError("a grid has either a chunk shape or edges", value=self.shape)
        # Of an empty array too, which has none of them: nobody may walk along its other dims.
        most = math.prod(max(1, count) for count in counts)
        if most > MAX_CHUNKS:
            raise LayoutError("a grid of more than 2**40 chunks", value=most)
        object.__setattr__(self, "counts", tuple(counts))
        object.__setattr__(self, "chunk_count", math.prod(counts))

    @classmethod
    def regular(cls, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Grid:
        """Chunks of one shape, as in Zarr's `regular` grid."""
        return cls(shape, chunk_shape)

    @classmethod
    def rectilinear(cls, shape: tuple[int, ...], edges: tuple[tuple[int, ...], ...]) -> Grid:
        """Chunks between the interior edges given for every dim."""
        return cls(shape, None, edges)

    @property
    def is_regular(self) -> bool:
        return self._chunk_shape is not None

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape every chunk of a regular grid is stored in."""
        if self._chunk_shape is None:
            raise LayoutError("a rectilinear grid has no single chunk shape", value=self.shape)
        return self._chunk_shape

    @property
    def edges(self) -> tuple[tuple[int, ...], ...]:
        """The interior edges of a rectilinear grid, per dim."""
        if self._edges is None:
            raise LayoutError("a regular grid has a chunk shape, not edges", value=self.shape)
        return self._edges

    def box(self, index: tuple[int, ...]) -> Box:
        """The region of a chunk, clipped to the array."""
        self._check(index)
        ends = [self.interval(dim, i) for dim, i in enumerate(index)]
        return Box(tuple([a for a, _, _ in ends]), tuple([b - a for a, b, _ in ends]))

    def stored_shape(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The shape a chunk is stored in: padding included, where the grid is regular."""
        if self._chunk_shape is None:
            return self.box(index).shape
        self._check(index)
        return self._chunk_shape

    @property
    def chunk_elements(self) -> int:
        """The elements a chunk is stored as: of every chunk if regular, of the largest if not."""
        if self._chunk_shape is not None:
            return math.prod(self._chunk_shape)
        return math.prod(max(sizes, default=0) for sizes in self._piece_sizes())

    def stored_elements(self, chunks: I64 | None = None) -> I64:
        """How many elements these chunks, or all in row-major order, are stored as."""
        if self._chunk_shape is not None:
            count = self.chunk_count if chunks is None else len(chunks)
            return np.full(count, self.chunk_elements, dtype=np.int64)
        elements = np.ones(1, dtype=np.int64)
        for sizes in self._piece_sizes():
            along = np.array(sizes, dtype=np.int64)
            elements = (elements[:, None] * along[None, :]).reshape(-1)
        return elements if chunks is None else elements[chunks]

    def interval(self, dim: int, index: int) -> tuple[int, int, int]:
        """Along one dim: where a chunk starts and stops in the array, and its stored length."""
        if self._chunk_shape is not None:
            chunk = self._chunk_shape[dim]
            return index * chunk, min((index + 1) * chunk, self.shape[dim]), chunk
        edges = self.edges[dim]
        start = edges[index - 1] if index else 0
        stop = edges[index] if index < len(edges) else self.shape[dim]
        return start, stop, stop - start

    def inner_borders(self, dim: int) -> Sequence[int]:
        """Where chunks meet along a dim."""
        if self._chunk_shape is not None:
            return range(self._chunk_shape[dim], self.shape[dim], self._chunk_shape[dim])
        return self.edges[dim]

    def borders(self, dim: int) -> I64:
        """Where chunks begin along a dim, and where the last one ends."""
        return np.array([0, *self.inner_borders(dim), self.shape[dim]], np.int64)

    def _piece_sizes(self) -> list[list[int]]:
        borders = [(0, *edges, n) for edges, n in zip(self.edges, self.shape, strict=True)]
        return [[b - a for a, b in pairwise(along) if b > a] for along in borders]

    def flat(self, index: tuple[int, ...]) -> int:
        """The row-major number of a chunk."""
        self._check(index)
        flat = 0
        for i, count in zip(index, self.counts, strict=True):
            flat = flat * count + i
        return flat

    def index(self, flat: int) -> tuple[int, ...]:
        """The index of the chunk of this row-major number."""
        if not 0 <= flat < self.chunk_count:
            raise LayoutError(f"no such chunk in a grid of {self.chunk_count}", value=flat)
        index = []
        for count in reversed(self.counts):
            flat, i = divmod(flat, count)
            index.append(i)
        return tuple(reversed(index))

    def span(self, box: Box) -> tuple[range, ...]:
        """Per dim the indices of the chunks that overlap the box."""
        self._check_inside(box)
        if box.is_empty:
            return (range(0),) * box.ndim
        spans = []
        for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
            stop = start + length
            if self._chunk_shape is not None:
                chunk = self._chunk_shape[dim]
                spans.append(range(start // chunk, -(-stop // chunk)))
            else:
                # An edge belongs to the chunk behind it: what starts there starts with that one,
                # and what stops there has nothing of it.
                edges = self.edges[dim]
                spans.append(range(bisect_right(edges, start), bisect_left(edges, stop) + 1))
        return tuple(spans)

    def is_whole(self, box: Box) -> bool:
        """Whether the box is a whole number of chunks, none included."""
        self._check_inside(box)
        return box.is_empty or all(
            self._is_border(dim, a) and self._is_border(dim, a + n)
            for dim, (a, n) in enumerate(zip(box.offset, box.shape, strict=True))
        )

    def to_doc(self) -> dict[str, Any]:
        """The grid as plain values, without the shape of the array."""
        if self._chunk_shape is not None:
            return {"kind": "regular", "chunk_shape": list(self._chunk_shape)}
        return {"kind": "rectilinear", "edges": [list(edges) for edges in self.edges]}

    @classmethod
    def from_doc(cls, doc: object, shape: tuple[int, ...], *, where: str = "grid") -> Grid:
        """The grid of an untrusted document, for an array of a shape that was checked before."""
        fields, found = Fields(doc, where), None
        kind = fields.form("kind")
        try:
            if kind == "regular":
                found = _regular(shape, fields.integers("chunk_shape"))
            elif kind == "rectilinear":
                edges, at = fields.items("edges"), fields.at("edges")
                found = cls.rectilinear(
                    shape, tuple(integers(each, f"{at}.{dim}") for dim, each in enumerate(edges))
                )
        except LayoutError as error:
            raise FormatError(error.what, where=where, value=doc) from error
        if found is None:
            raise FormatError("must be a regular or a rectilinear grid", where=where, value=doc)
        fields.finish()
        return found

    def _is_border(self, dim: int, at: int) -> bool:
        if at in (0, self.shape[dim]):
            return True
        if self._chunk_shape is not None:
            return at % self._chunk_shape[dim] == 0
        edges = self.edges[dim]
        place = bisect_left(edges, at)
        return place < len(edges) and edges[place] == at

    def _check(self, index: tuple[int, ...]) -> None:
        if len(index) != len(self.counts) or not all(
            0 <= i < count for i, count in zip(index, self.counts, strict=True)
        ):
            raise LayoutError(f"no such chunk in a grid of {self.counts}", value=index)

    def _check_inside(self, box: Box) -> None:
        if box.ndim != len(self.shape) or not all(
            a + n <= length for a, n, length in zip(box.offset, box.shape, self.shape, strict=True)
        ):
            raise LayoutError(f"the box is not inside an array of {self.shape}", value=box)


# Layers are alike: a document of 100,000 arrays has a few dozen grids.
_regular = lru_cache(maxsize=4096)(Grid)
