"""What is to be read for some requests, and where it belongs, before a byte is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.budget import Pace
from ckptkit.format.manifest import Manifest
from ckptkit.model import Box
from ckptkit.plan.read import Piece, Pieces, coalesce, join_runs, pieces_of, side_by_side

# So many bytes between two pieces are read along everywhere: headers are no longer.
GAP_BYTES = 4 << 10
_KEPT_PIECES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One box of one array, and the memory it goes to: raw elements in the box's shape."""

    array: int
    box: Box
    target: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """All pieces of some requests, sorted by where they lie; columns with one row a piece."""

    requests: Sequence[Request]
    pieces: Sequence[Pieces]
    request: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    pack: npt.NDArray[np.uint32]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    crc32: npt.NDArray[np.uint32]
    begin: npt.NDArray[np.int64]
    """The byte at which a piece begins that is a whole chunk, in one piece in its request's memory,
    where that has no gaps; -1 for the others.
    """
    flat: Sequence[memoryview | None]
    """The memory of each request as bytes; None where it has gaps."""
    runs: list[tuple[int, int]]
    piece_of: Callable[[Pieces, np.int64], Piece]
    """Keeps some pieces: those of arrays that are cut alike are the same."""
    bands: Mapping[int, int]
    """Rows [i, j) of one run that are chunks side by side along the last dim: in a file system
    all of the run, elsewhere at equal distances.
    """

    def piece(self, row: int) -> tuple[Request, Piece]:
        """One piece and the request it is for."""
        number = self.request[row]
        return self.requests[number], self.piece_of(self.pieces[number], self.place[row])

    def direct(self, row: int) -> memoryview | None:
        """The caller's memory, where a whole chunk lands there without a gap."""
        begin, flat = int(self.begin[row]), self.flat[int(self.request[row])]
        if begin < 0 or flat is None:
            return None
        return flat[begin : begin + int(self.stop[row] - self.start[row])]


def plan_job(manifest: Manifest, requests: Sequence[Request], pace: Pace, *, verify: bool) -> Job:
    """Which bytes to read for the requests. With `verify` always whole chunks, so that each can be
    checked.
    """
    # Layers are alike: what one has found out holds for all.
    cut, chunks, begins = cache(pieces_of), cache(Pieces.chunks), cache(Pieces.begins)
    pieces = [cut(manifest.arrays[r.array].grid, r.box) for r in requests]
    counts = [len(each) for each in pieces]
    rows = _joined(
        [chunks(p) + manifest.starts[r.array] for p, r in zip(pieces, requests, strict=True)]
    )
    start = manifest.offset[rows].astype(np.int64)
    stop = start + manifest.length[rows].astype(np.int64)
    sizes = [manifest.arrays[r.array].dtype.itemsize for r in requests]
    begin = _joined([begins(p) for p in pieces])
    begin = np.where(begin < 0, -1, begin * np.repeat(np.array(sizes, np.int64), counts))
    if not verify:
        spans = [p.element_spans() for p in pieces]
        first = _joined([span[0] * size for span, size in zip(spans, sizes, strict=True)])
        last = _joined([span[1] * size for span, size in zip(spans, sizes, strict=True)])
        start, stop = start + first, start + last
    pack = manifest.pack[rows]
    order = np.lexsort((start, pack))
    pack, start, stop = pack[order], start[order], stop[order]
    request = np.repeat(np.arange(len(requests)), counts)[order]
    place = _joined([np.arange(count) for count in counts])[order]
    gap, limit = min(GAP_BYTES, pace.gap_bytes), pace.request_bytes
    if pace.by_rows:
        bands = side_by_side(pieces, request, place, pack)
        runs = coalesce(pack, start, stop, gap=gap, limit=limit, together=bands)
    else:
        runs = coalesce(pack, start, stop, gap=gap, limit=limit)
        runs = join_runs(runs, pack, start, stop, gap=pace.gap_bytes, limit=limit)
        apart = np.zeros(max(0, len(start) - 1), np.bool_)
        apart[[first - 1 for first, _ in runs[1:]]] = True
        bands = side_by_side(pieces, request, place, pack, apart)
        steps = np.diff(start)
        bands = [(i, j) for i, j in bands if len(set(steps[i : j - 1].tolist())) == 1]
    return Job(
        requests,
        pieces,
        request,
        place,
        pack,
        start,
        stop,
        manifest.crc32[rows][order],
        begin[order],
        [_flat(request.target) for request in requests],
        runs,
        lru_cache(_KEPT_PIECES)(_piece_of),
        dict(bands),
    )


def _flat(target: npt.NDArray[Any]) -> memoryview | None:
    if not target.flags.c_contiguous:
        return None
    flat: npt.NDArray[np.uint8] = target.reshape(-1).view(np.uint8)
    return flat.data


def _piece_of(pieces: Pieces, place: np.int64) -> Piece:
    return pieces[int(place)]


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
