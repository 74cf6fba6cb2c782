"""A target's pack: its chunks are filled straight from the source's, some neighbours at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.read.reader import Reader, Request
from ckptkit.checkpoint.reshard.budget import Budget
from ckptkit.checkpoint.reshard.casting import cast
from ckptkit.checkpoint.reshard.objects import objects_of
from ckptkit.checkpoint.reshard.sharing import PartsOfChunks, SharedChunks
from ckptkit.checkpoint.reshard.target import Target, TargetArray
from ckptkit.checkpoint.write.pack import (
    Pack,
    PackedArray,
    Slot,
    chunk_view,
    documents_of,
)
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


def begin_pack(target: Target, rank: int, route: Route) -> Pack:
    """Begin the pack of a rank; every segment of it can be written by any thread."""
    writes = target.chunks_of(rank)
    known = list(zip(target.held, (array.info for array in target.arrays), strict=True))
    by_name = {held.name: chunks for held, chunks in zip(target.held, writes, strict=True)}
    mine = [(a, chunks) for a, chunks in zip(target.arrays, writes, strict=True) if len(chunks)]
    origins = [array for array, _ in mine]
    pack = Pack(
        rank,
        target.table,
        objects_of(target.objects, rank, target.world_size),
        documents_of(known, by_name, rank),
        [PackedArray(array.info, chunks) for array, chunks in mine],
        Copied(origins, route).fill,
    )
    try:
        pack.begin(
            route.store,
            route.prefix,
            target.save,
            pack.segments_at(_lasts(pack, origins, route.budget)),
            refers=rank > 0,
            memory=route.budget.ends.sink_bytes,
        )
    except AlreadyExistsError as error:
        raise PeerError(
            "another reshard of the same step has begun this pack",
            where=error.where,
            hint="wait for it; the same command again goes on with what it leaves, should it fail",
        ) from error
    return pack


class Copied:
    """What a pack of the target holds, read from the packs of the source when it is needed."""

    def __init__(self, origins: Sequence[TargetArray], route: Route) -> None:
        self._origins = origins
        self._reader = Reader(route.checkpoint.manifest, route.sources, route.budget.pace)
        self._budget = route.budget
        self._shared = route.shared

    def fill(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Read for all of them at once: each chunk of the source is read, and checked, once."""
        checked: list[Request] = []
        exact: list[Request] = []
        casts: list[tuple[TargetArray, npt.NDArray[Any], npt.NDArray[Any]]] = []
        with PartsOfChunks(self._shared) as parts:
            for slot in slots:
                array = self._origins[slot.array]
                box, stored = chunk_view(array.info, slot.chunk, slot.memory)
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
        return slots

    def _read(self, requests: list[Request], *, verify: bool) -> None:
        if requests:
            self._reader.read(requests, verify=verify)


def _lasts(pack: Pack, origins: Sequence[TargetArray], budget: Budget) -> list[int]:
    """Where segments end: each array's chunks in batches as the plan has them, small ones together.

    The batches of chunks that go over as they are need not be large: no chunk of the source is
    needed by two.
    """
    end = len(pack.documents)
    lasts: list[int] = []
    usual = min(_USUAL, budget.batch_bytes)
    held = sum(len(data) for _, data in pack.documents)
    for array, origin in zip(pack.arrays, origins, strict=True):
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
