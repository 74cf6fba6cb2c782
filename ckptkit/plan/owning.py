"""Which rank keeps the optimizer state of which parameter, where it is not cut but given away."""

from __future__ import annotations

import heapq
from collections.abc import Mapping


def owners_of(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank of each parameter: largest first to the rank with the fewest elements so far, ties
    in their order, as torch's ZeroRedundancyOptimizer does.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners
