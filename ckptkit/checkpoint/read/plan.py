"""Which bytes of which packs fill some boxes, and by which requests they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.read.reader import WIDEST_GAP, ReadPlan, Wanted
from ckptkit.checkpoint.workers import Pace, Progress
from ckptkit.model.grid import I64
from ckptkit.plan.read import Pieces, coalesce, join_runs, side_by_side

# Whether the page cache has what is to be read is asked at so many places, of so much or more.
_LOOKS = 8
_LEAST_COLD = 16 << 20
_KEPT_PIECES = 4096


def plan_read(
    packs: OpenPacks,
    wanted: Sequence[Wanted],
    pace: Pace,
    *,
    verify: bool,
    progress: Progress | None = None,
    alone: bool = False,
    staged: bool = False,
) -> ReadPlan:
    """Which bytes to read to fill all that is wanted. With `verify` always whole chunks, so that
    each can be checked, where there are checksums to check them by. `alone` says that nobody else
    reads them: what a device has is then read past the page cache. The runs of a `staged` plan are
    for `stage`, and not for `read`.
    """
    # Layers are alike: what one has found out holds for all. So all that is said of each piece is
    # found once for each kind of box, and looked up there: row `at` of what the kinds have, joined.
    manifest = packs.manifest
    verify = verify and manifest.is_checked
    pieces, sizes = list[Pieces](), list[int]()
    known: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []
    for each in wanted:
        kind, box = manifest.table.kinds[each.array], each.box
        # Arrays that are alike share their kind, which is long to compare.
        found = known.setdefault((id(kind), box.offset, box.shape), len(pieces))
        if found == len(pieces):
            pieces.append(Pieces(kind.grid, box))
            sizes.append(kind.dtype.itemsize)
        numbers.append(found)
    filled_by = np.array(numbers, np.int64)
    lengths = np.array([len(each) for each in pieces], np.int64)
    counts = lengths[filled_by]
    number = np.repeat(np.arange(len(wanted)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = (np.cumsum(lengths) - lengths)[filled_by][number] + place
    firsts = manifest.starts[np.array([each.array for each in wanted], np.int64)]
    rows = _joined([each.chunks() for each in pieces])[at] + firsts[number]
    start = manifest.offset[rows].astype(np.int64)
    stop = start + manifest.length[rows].astype(np.int64)
    lands = _joined(
        [
            np.where((begins := each.begins(parts=not verify)) < 0, -1, begins * size)
            for each, size in zip(pieces, sizes, strict=True)
        ]
    )[at]
    if not verify:
        spans = [each.element_spans() for each in pieces]
        first = _joined([span[0] * size for span, size in zip(spans, sizes, strict=True)])
        last = _joined([span[1] * size for span, size in zip(spans, sizes, strict=True)])
        start, stop = start + first[at], start + last[at]
    pack = manifest.pack[rows]
    order = np.lexsort((start, pack))
    pack, start, stop = pack[order], start[order], stop[order]
    number, place = number[order], place[order]
    if alone and not pace.by_request and _are_cold(packs, pack, start, stop):
        pace = pace.past_cache()
    gap, limit = min(WIDEST_GAP, pace.gap_bytes), pace.request_bytes
    if pace.by_request:
        runs = coalesce(pack, start, stop, gap=gap, limit=limit)
        runs = join_runs(runs, pack, start, stop, gap=pace.gap_bytes, limit=limit)
        # A band is brought to the target by strides over the memory of one box: within one run, at
        # equal distances.
        apart = np.zeros(max(0, len(start) - 1), np.bool_)
        apart[[first - 1 for first, _ in runs[1:]]] = True
        bands = side_by_side(pieces, filled_by[number], number, place, pack, apart)
        steps = np.diff(start)
        bands = [(i, j) for i, j in bands if len(set(steps[i : j - 1].tolist())) == 1]
    else:
        # Together in a run of any length: the rows of a target are to be written whole.
        bands = side_by_side(pieces, filled_by[number], number, place, pack) if not staged else []
        runs = coalesce(pack, start, stop, gap=gap, limit=limit, together=bands)
    return ReadPlan(
        packs=packs,
        pace=pace,
        verify=verify,
        progress=progress,
        wanted=wanted,
        pieces=pieces,
        filled_by=filled_by,
        number=number,
        place=place,
        pack=pack,
        start=start,
        stop=stop,
        crc32=manifest.crc32[rows][order],
        lands=lands[order],
        runs=runs,
        piece_of=lru_cache(_KEPT_PIECES)(Pieces.__getitem__),
        bands=dict(bands),
    )


def _are_cold(packs: OpenPacks, pack: npt.NDArray[np.uint32], start: I64, stop: I64) -> bool:
    """Whether the system does not have most of some extents in memory, by a look at a few that are
    spread evenly over their bytes; not of so little that the page cache brings it as soon.
    """
    reach = np.cumsum(stop - start)
    if not len(reach) or reach[-1] < _LEAST_COLD:
        return False
    found = 0
    for number in range(_LOOKS):
        place = int(reach[-1]) * (2 * number + 1) // (2 * _LOOKS)
        row = int(np.searchsorted(reach, place, side="right"))
        with packs.use(int(pack[row])) as source:
            # Not where the extent begins: several of these places may lie in a long one.
            found += source.is_at_hand(int(stop[row] - reach[row]) + place)
    return 2 * found < _LOOKS


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
