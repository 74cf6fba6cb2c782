"""How large the chunks of an array are, given the borders its writers need (DESIGN section 3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ckptkit.model import Grid

DEFAULT_CHUNK_BYTES = 4 << 20

_SMALLEST_SHARE = 16  # chunks below 1/16 of the target cost more to handle than they save
_SHORTEST_RUN = 512  # bytes: copies of shorter rows are slower than the disk
_PARTS = 8
_FINER = (128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One way to cut a dim: the longest piece it makes, and the chunk size or the borders."""

    longest: int
    size: int | None
    borders: tuple[int, ...] = ()


@lru_cache(maxsize=4096)
def choose_grid(
    shape: tuple[int, ...],
    itemsize: int,
    edges: tuple[tuple[int, ...], ...],
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> Grid:
    """The grid with a border at every edge, and at halves, quarters and eighths of each dim
    where that leaves chunks of a useful size.
    """
    if 0 in shape:
        return Grid.regular(shape, tuple(max(1, extent) for extent in shape))
    ladders = [_ladder(extent, cuts) for extent, cuts in zip(shape, edges, strict=True)]
    at = [_start(extent, ladder) for extent, ladder in zip(shape, ladders, strict=True)]

    def size() -> int:
        return itemsize * math.prod(
            ladder[i].longest for ladder, i in zip(ladders, at, strict=True)
        )

    def longer(dim: int) -> bool:
        return at[dim] + 1 < len(ladders[dim])

    inner = len(shape) - 1
    while shape and longer(inner) and ladders[inner][at[inner]].longest * itemsize < _SHORTEST_RUN:
        at[inner] += 1
    dim = 0
    while size() * _SMALLEST_SHARE < chunk_bytes and any(map(longer, range(len(shape)))):
        at[dim] += longer(dim)
        dim = (dim + 1) % len(shape)
    while size() > chunk_bytes and any(at):
        dim = next(d for d, index in enumerate(at) if index)
        at[dim] -= 1
    return _grid(shape, [ladder[i] for ladder, i in zip(ladders, at, strict=True)])


def _ladder(extent: int, cuts: tuple[int, ...]) -> list[_Choice]:
    """The ways to cut a dim so that all cuts are borders, from the shortest pieces to the
    longest.
    """
    longest = max(b - a for a, b in zip((0, *cuts), (*cuts, extent), strict=True))
    common = math.gcd(*cuts) if cuts else extent
    if common * 2 > longest:
        return [_Choice(size, size) for size in _regular_sizes(extent, common if cuts else None)]
    ladder: list[_Choice] = []
    for parts in _FINER:
        choice = _irregular(extent, cuts, -(-extent // parts))
        if not ladder or choice.longest > ladder[-1].longest:
            ladder.append(choice)
    return ladder


def _regular_sizes(extent: int, common: int | None) -> list[int]:
    """Chunk sizes, ascending; of a cut dim those with a border at every multiple of `common`."""
    if common is not None:
        return sorted({common // k for k in range(1, 65) if common % k == 0})
    return sorted({-(-extent // parts) for parts in (1 << k for k in range(32))})


def _irregular(extent: int, cuts: tuple[int, ...], size: int) -> _Choice:
    borders = tuple(sorted({*cuts, *range(size, extent, size)}))
    longest = max(b - a for a, b in zip((0, *borders), (*borders, extent), strict=True))
    return _Choice(longest, None, borders)


def _start(extent: int, ladder: list[_Choice]) -> int:
    """The longest pieces that have a border at every eighth; where none do, that are no longer
    than one.
    """
    eighth = -(-extent // _PARTS)
    short = [i for i, choice in enumerate(ladder) if choice.longest <= eighth]
    aligned = [i for i in short if eighth % ladder[i].longest == 0 or ladder[i].size is None]
    return (aligned or short or [0])[-1]


def _grid(shape: tuple[int, ...], choices: list[_Choice]) -> Grid:
    if all(choice.size is not None for choice in choices):
        return Grid.regular(shape, tuple(choice.longest for choice in choices))
    borders = tuple(
        choice.borders if choice.size is None else tuple(range(choice.size, extent, choice.size))
        for extent, choice in zip(shape, choices, strict=True)
    )
    return Grid.rectilinear(shape, borders)
