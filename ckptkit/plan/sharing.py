"""Which of several ranks reads what all of them need alike: a pure function, so that every rank
computes the same without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptkit.model import Box, Grid


def readable_pieces(grid: Grid, box: Box, itemsize: int, limit: int) -> Iterator[Box]:
    """A box as some of at most `limit` bytes, cut where chunks end, so that no chunk is in two of
    them; one chunk may have more.
    """
    if box.is_empty:
        return
    spans = grid.span(box)
    # Along the first dim of several chunks, for pieces that lie together in memory.
    dim = next((dim for dim, span in enumerate(spans) if len(span) > 1), None)
    if dim is None or box.size * itemsize <= limit:
        yield box
        return
    middle = grid.interval(dim, spans[dim][len(spans[dim]) // 2])[0]
    for half in box.split(dim, middle):
        yield from readable_pieces(grid, half, itemsize, limit)


def readers_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Which of some ranks reads each piece: about the same number of bytes each, and neighbours,
    which one request may read, together.
    """
    total = max(1, sum(sizes))
    readers, before = [], 0
    for size in sizes:
        readers.append(min(ranks - 1, (2 * before + size) * ranks // (2 * total)))
        before += size
    return readers


def in_batches(sizes: Sequence[int], limit: int) -> list[range]:
    """Neighbours in batches of at most `limit` bytes; a larger one is a batch of its own."""
    batches: list[range] = []
    first = held = 0
    for place, size in enumerate(sizes):
        if place > first and held + size > limit:
            batches.append(range(first, place))
            first, held = place, 0
        held += size
    return [*batches, range(first, len(sizes))] if sizes else []
