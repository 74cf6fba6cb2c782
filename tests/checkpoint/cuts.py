"""Hypothesis strategies: any tensor, and any way to cut it."""

from __future__ import annotations

from hypothesis import strategies as st

from ckptkit.errors import LayoutError
from ckptkit.model import (
    DTYPES,
    Axis,
    Mesh,
    Owner,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    layout_of,
)
from tests.checkpoint.saving import Tensor, random_values

KINDS = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "pp", "ep")
MOST_RANKS = 8

dtypes = st.sampled_from(sorted(DTYPES))
lengths = st.integers(0, 9) | st.sampled_from([12, 16, 24])
shapes = st.lists(lengths, max_size=3).map(tuple)


@st.composite
def parallel(draw: st.DrawFn) -> Strategy:
    """Any strategy of at most eight ranks, its axes named by number."""
    axes: list[Axis] = []
    ranks = MOST_RANKS
    for number in range(draw(st.integers(0, 3))):
        size = draw(st.integers(1, ranks))
        sharded = any(axis.kind in ("fsdp", "zero1", "zero2", "zero3") for axis in axes)
        kinds = ("ddp", "tp", "pp", "ep") if sharded else KINDS
        axes.append(Axis(f"a{number}", draw(st.sampled_from(kinds)), size))
        ranks //= size
    return Strategy(Mesh(tuple(axes)))


@st.composite
def placements(
    draw: st.DrawFn, shape: tuple[int, ...], strategy: Strategy
) -> dict[str, Placement | str]:
    """One placement for each axis; those that mean nothing for the shape become `replicate`."""
    chosen: dict[str, Placement | str] = {}
    row: list[Placement] = [Replicate()] * len(strategy.mesh.axes)
    for number, axis in enumerate(strategy.mesh.axes):
        before = row[number]
        row[number] = draw(_placement(shape, axis.size))
        try:
            layout = layout_of(shape, strategy, row)
            for rank in range(strategy.world_size):
                layout.part(rank)
        except LayoutError:
            row[number] = before
        chosen[axis.name] = row[number]
    return chosen


@st.composite
def tensors(draw: st.DrawFn, strategy: Strategy) -> Tensor:
    """Any tensor of any bits, cut in any way."""
    shape = draw(shapes)
    values = random_values(shape, draw(dtypes), draw(st.integers(0, 1 << 16)))
    return Tensor(values, draw(placements(shape, strategy)))


@st.composite
def _placement(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Placement:
    elsewhere: list[Placement] = [Replicate(), Owner(draw(st.integers(0, ranks - 1)))]
    elsewhere.append(Stage(draw(st.integers(0, ranks - 1))))
    if not shape:
        return draw(st.sampled_from(elsewhere))
    dim = draw(st.integers(0, len(shape) - 1))
    unit = draw(st.sampled_from([1, 1, 2, 3]))
    cuts: list[Placement] = [Shard(dim), Shard(dim, None, unit), Strided(dim, unit)]
    if shape[dim] > 1:
        first = draw(st.integers(1, shape[dim] - 1))
        cuts.append(Shard(dim, (first, shape[dim] - first)))
    return draw(st.sampled_from(cuts * 2 + elsewhere))
