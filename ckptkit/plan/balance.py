"""How the bytes of an array spread over the ranks of a strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from ckptkit.model import Box, Grid, Layout, Replicas
from ckptkit.plan.regrid import Reading, reading_of, stored_sizes
from ckptkit.plan.save import chunks_in


@dataclass(frozen=True, slots=True, eq=False)
class Spread:
    """What each rank's pack has of an array, and what is read for all of them together."""

    nbytes: npt.NDArray[np.float64]
    reading: Reading


@lru_cache(maxsize=16384)
def spread(
    layout: Layout, source: Grid, target: Grid, itemsizes: tuple[int, int], limit: int
) -> Spread:
    """How an array goes from one grid into the packs of a layout; itemsizes are the source's and
    the target's. What ranks hold alike is in equal shares.
    """
    nbytes = np.zeros(layout.strategy.world_size)
    requests = read = 0
    # Parts that overlap have holders of each stretch of their own: no part stands for others then.
    every = range(len(nbytes)) if layout.is_tangled else layout.distinct_ranks()
    for rank in every:
        first: tuple[Box, ...] = ()
        for share in layout.shares(rank):
            stored = sum(
                int(stored_sizes(target, chunks_in(target, box), itemsizes[1]).sum())
                for box in share.boxes
            )
            ranks = [rank] if layout.is_tangled else _members(layout, share.replicas)
            nbytes[ranks] += stored / share.replicas.count
            # What ranks hold alike is read once, by whichever of them writes it.
            first += share.boxes if share.replicas.index == 0 else ()
        reading = reading_of(source, target, first, itemsizes, limit)
        requests, read = requests + reading.requests, read + reading.nbytes
    return Spread(nbytes, Reading(requests, read))


def _members(layout: Layout, replicas: Replicas) -> list[int]:
    """The ranks that hold the same: along each axis some, in all combinations."""
    sizes = layout.strategy.mesh.sizes
    ranks = np.zeros(1, dtype=np.int64)
    for axis, along in enumerate(replicas.key):
        members = np.array(list(cast("Iterable[int]", along)), dtype=np.int64)
        stride = math.prod(sizes[axis + 1 :])
        ranks = (ranks[:, None] + stride * members[None, :]).reshape(-1)
    found: list[int] = ranks.tolist()
    return found
