"""Which bytes of which packs go to which ranks when a step is resharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.reshard.plan import ReshardPlan
from ckptkit.checkpoint.reshard.target import TargetArray
from ckptkit.model import Box, Grid
from ckptkit.plan.read import writers

_GROUPS = 16
# What takes longer than a look is worth is not counted.
_MOST_PARTS = 50_000

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def flows_of(plan: ReshardPlan, most_parts: int = _MOST_PARTS) -> dict[str, Any] | None:
    """The bytes of elements, and the chunks touched, from each pack to each rank, packs and ranks
    in at most 16 groups that follow each other; None where there are too many parts to look at.

    What ranks will hold alike is in equal shares, as they write it.
    """
    manifest, ranks = plan.checkpoint.manifest, plan.target.world_size
    packs = max(len(manifest.packs), 1)
    sources, targets = min(packs, _GROUPS), min(ranks, _GROUPS)
    group_of_pack = np.arange(packs) * sources // packs
    group_of_rank = np.arange(ranks) * targets // ranks
    alike: dict[tuple[int, int], list[TargetArray]] = defaultdict(list)
    for array in plan.arrays:
        alike[id(array.source.kind), id(array.info.kind)].append(array)
    parts = 0
    for arrays in alike.values():
        layout = arrays[0].layout
        parts += ranks if layout.is_tangled else sum(1 for _ in layout.distinct_ranks())
        if parts > most_parts:
            return None
    nbytes, touched = np.zeros((2, sources, targets))
    in_place = 0.0
    for arrays in alike.values():
        first, layout = arrays[0], arrays[0].layout
        grid, itemsize = first.source.grid, first.source.dtype.itemsize
        if not grid.chunk_count:
            continue
        starts = [plan.checkpoint.first_row(array.source.name) for array in arrays]
        held = np.stack([manifest.pack[at : at + grid.chunk_count] for at in starts])
        # How many of the arrays have each chunk in each group of packs.
        counts = np.zeros((grid.chunk_count, sources))
        for row in held:
            counts[np.arange(grid.chunk_count), group_of_pack[row]] += 1
        borders = [grid.borders(dim) for dim in range(len(grid.shape))]
        for share, writing in chain.from_iterable(writers(layout)):
            part = 1 / share.replicas.count
            shares = np.bincount(group_of_rank[writing], minlength=targets) * part
            for box in share.boxes:
                chunks, elements = _overlaps(grid, borders, box)
                nbytes += np.outer(elements * itemsize @ counts[chunks], shares)
                touched += np.outer(counts[chunks].sum(axis=0), shares)
                stays = np.isin(held[:, chunks], writing).sum(axis=0)
                in_place += float(elements @ stays) * itemsize * part
    return {
        "sources": np.bincount(group_of_pack).tolist(),
        "targets": np.bincount(group_of_rank).tolist(),
        "bytes": np.rint(nbytes).astype(np.int64).tolist(),
        "chunks": np.ceil(touched).astype(np.int64).tolist(),
        # A file of another program belongs to no rank.
        "in_place": round(in_place) if plan.checkpoint.foreign is None else None,
    }


def _overlaps(grid: Grid, borders: Sequence[I64], box: Box) -> tuple[I64, F64]:
    """The chunks that a box touches, and how many elements it has of each."""
    chunks, elements = np.zeros(1, np.int64), np.ones(1)
    for dim, span in enumerate(grid.span(box)):
        low, high = box.offset[dim], box.offset[dim] + box.shape[dim]
        met = borders[dim][span.start : span.stop + 1]
        lengths = np.diff(np.clip(met, low, high)).astype(np.float64)
        index = np.arange(span.start, span.stop)
        chunks = (chunks[:, None] * grid.counts[dim] + index).reshape(-1)
        elements = (elements[:, None] * lengths).reshape(-1)
    return chunks, elements
