"""A target's pack: its chunks are filled straight from the source's, some neighbours at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.content import PackContent, PackedArray
from ckptkit.checkpoint.image import ImageWriting
from ckptkit.checkpoint.pack_writer import Pack, documents_of
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.read.reader import Reader, Request
from ckptkit.checkpoint.reshard.budget import Budget
from ckptkit.checkpoint.reshard.casting import cast
from ckptkit.checkpoint.reshard.objects import objects_of
from ckptkit.checkpoint.reshard.sharing import PartsOfChunks, SharedChunks
from ckptkit.checkpoint.reshard.target import Target, TargetArray
from ckptkit.errors import AlreadyExistsError, PeerError
from ckptkit.model import Grid
from ckptkit.plan.read import batches, pieces_within
from ckptkit.storage import Store

# As the parts of local files are when a job writes them: larger ones are no faster to write, and
# leave less for other threads to take over.
_USUAL = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where packs come from and go to, and how much may be on its way at a time."""

    checkpoint: Checkpoint
    sources: OpenPacks
    store: Store
    prefix: str
    budget: Budget
    shared: SharedChunks | None = None


def begin_pack(target: Target, rank: int, route: Route) -> ImageWriting:
    """Begin the pack of a rank; every segment of it can be written by any thread."""
    writes = target.chunks_of(rank)
    known = list(zip(target.held, (array.info for array in target.arrays), strict=True))
    by_name = {held.name: chunks for held, chunks in zip(target.held, writes, strict=True)}
    mine = [(a, chunks) for a, chunks in zip(target.arrays, writes, strict=True) if len(chunks)]
    content = CopiedContent(documents_of(known, by_name, rank), mine, route)
    objects = objects_of(target.objects, rank, target.world_size)
    pack = Pack(content, target.table, rank, objects)
    segments = pack.image.segments_at(_lasts(content, [array for array, _ in mine], route.budget))
    try:
        return pack.begin(
            route.store,
            route.prefix,
            target.save,
            segments,
            refers=rank > 0,
            memory=route.budget.ends.sink_bytes,
        )
    except AlreadyExistsError as error:
        raise PeerError(
            "another reshard of the same step has begun this pack",
            where=error.where,
            hint="wait for it; the same command again goes on with what it leaves, should it fail",
        ) from error


class CopiedContent(PackContent):
    """What a pack of the target holds, read from the packs of the source when it is needed."""

    def __init__(
        self,
        documents: Sequence[tuple[str, bytes]],
        arrays: Sequence[tuple[TargetArray, npt.NDArray[np.int64]]],
        route: Route,
    ) -> None:
        super().__init__(documents, [PackedArray(a.info, chunks) for a, chunks in arrays])
        self._origins = [array for array, _ in arrays]
        self._reader = Reader(route.checkpoint.manifest, route.sources, route.budget.pace)
        self._budget = route.budget
        self._shared = route.shared

    def filled_chunks(self, targets: Mapping[int, memoryview]) -> Iterator[int]:
        """Read for all of them at once: each chunk of the source is read, and checked, once."""
        checked: list[Request] = []
        exact: list[Request] = []
        casts: list[tuple[TargetArray, npt.NDArray[Any], npt.NDArray[Any]]] = []
        with PartsOfChunks(self._shared) as parts:
            for index, memory in targets.items():
                place, chunk = self.at(index)
                array = self._origins[place]
                box, stored = self.arrays[place].opened(chunk, memory)
                source = array.chosen.source
                values = stored
                if array.chosen.is_cast:
                    values = np.empty(box.shape, source.dtype.bits)
                    casts.append((array, values, stored))
                request = Request(array.chosen.number, box, values)
                if self._budget.is_huge(source):
                    exact += _in_bands(request, source.grid, self._budget.chunk_bytes)
                else:
                    checked += parts.requests(request, source)
            self._read(checked, verify=True)
            self._read(parts.copied(), verify=True)
            self._read(exact, verify=False)
        for array, values, stored in casts:
            dtypes = (array.chosen.source.dtype, array.chosen.dtype)
            cast(array.info.name, values, stored, dtypes)
        yield from targets

    def _read(self, requests: list[Request], *, verify: bool) -> None:
        if requests:
            self._reader.read(requests, verify=verify)


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


def _in_bands(request: Request, grid: Grid, limit: int) -> Iterator[Request]:
    """A request for chunks that are too large to be read whole, as some whose bytes lie close."""
    for piece in pieces_within(grid, request.box, request.target.itemsize, limit):
        inside: Any = (*piece.within(request.box), ...)
        yield Request(request.array, piece, request.target[inside])
