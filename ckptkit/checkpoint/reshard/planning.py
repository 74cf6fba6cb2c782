"""What a reshard will do, before anything moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ckptkit.checkpoint.reshard.target import Target, TargetArray
from ckptkit.format.arrays import ArrayInfo
from ckptkit.plan.regrid import spread

# What a chunk adds to a manifest, and about what an array does.
_CHUNK_BYTES, _ARRAY_BYTES = 24, 160


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """One array: what it is called and stored as, how it is cut, and what decided that."""

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    source_dtype: str
    placements: tuple[str, ...]
    why: str
    nbytes: int
    is_kept: bool
    """Whether its chunks go over byte for byte."""


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """What a reshard reads, writes and holds; `seconds` comes from a short measured probe."""

    source: str
    destination: str
    step: int
    from_strategy: str
    to_strategy: str
    save_id: str | None
    """None where a digest is still to become part of it."""
    arrays: tuple[PlannedArray, ...]
    aliases: tuple[str, ...]
    """Second names of tied arrays."""
    left_out: tuple[str, ...]
    """Names in the source that do not go over."""
    bytes_needed: int
    """The bytes of the chunks of the source, each once."""
    bytes_read: int
    """The bytes that will be read of them."""
    bytes_written: int
    requests: int
    """Of chunks of the source, at most: neighbours are read together."""
    chunks: int
    bytes_by_rank: tuple[int, ...]
    manifest_bytes: int
    memory: int
    workers: int
    finished: tuple[int, ...]
    """Ranks whose packs an earlier run has completed."""
    seconds: float | None

    @property
    def files(self) -> int:
        """The packs and the manifest."""
        return len(self.bytes_by_rank) + 1

    @property
    def read_amplification(self) -> float:
        """How often a byte is read."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def imbalance(self) -> float:
        """The largest pack, by the mean of all."""
        mean = sum(self.bytes_by_rank) / len(self.bytes_by_rank)
        return max(self.bytes_by_rank) / mean if mean else 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The sums over all arrays."""

    bytes_needed: int
    bytes_read: int
    bytes_written: int
    requests: int
    chunks: int
    bytes_by_rank: tuple[int, ...]


def cost_of(target: Target, batch_bytes: int) -> Cost:
    """Add up what all arrays take; those of one shape and layout are looked at once."""
    by_rank = np.zeros(target.world_size)
    needed = read = requests = chunks = 0
    for array in target.arrays:
        source, grid = array.chosen.source, array.info.grid
        itemsizes = source.dtype.itemsize, array.info.dtype.itemsize
        found = spread(array.layout, source.grid, grid, itemsizes, batch_bytes)
        by_rank += found.nbytes
        needed += stored_bytes(source)
        read, requests = read + found.reading.nbytes, requests + found.reading.requests
        chunks += grid.chunk_count
    rounded = tuple(np.rint(by_rank).astype(np.int64).tolist())
    return Cost(needed, read, round(float(by_rank.sum())), requests, chunks, rounded)


def plan_of(
    target: Target,
    places: tuple[str, str],
    cost: Cost,
    *,
    memory: int,
    workers: int,
    finished: tuple[int, ...],
    seconds: float | None,
    save_id: str | None,
) -> ReshardPlan:
    """The plan of a target; places are the step's and the one where it will be."""
    outline, choice = target.outline, target.choice
    return ReshardPlan(
        source=places[0],
        destination=places[1],
        step=outline.save.step,
        from_strategy=str(outline.save.strategy),
        to_strategy=str(target.recipe.strategy),
        save_id=save_id,
        arrays=tuple(map(_planned, target.arrays)),
        aliases=tuple(alias.name for alias in choice.aliases),
        left_out=tuple(sorted(choice.left_out)),
        bytes_needed=cost.bytes_needed,
        bytes_read=cost.bytes_read,
        bytes_written=cost.bytes_written,
        requests=cost.requests,
        chunks=cost.chunks,
        bytes_by_rank=cost.bytes_by_rank,
        manifest_bytes=_CHUNK_BYTES * cost.chunks + _ARRAY_BYTES * len(target.arrays),
        memory=memory,
        workers=workers,
        finished=finished,
        seconds=seconds,
    )


def stored_bytes(array: ArrayInfo) -> int:
    """The bytes of all chunks of an array."""
    grid = array.grid
    # What a rectilinear grid stores is not padded.
    padded = grid.chunk_count * grid.chunk_elements if grid.is_regular else math.prod(array.shape)
    return padded * array.dtype.itemsize


def _planned(array: TargetArray) -> PlannedArray:
    source = array.chosen.source
    return PlannedArray(
        array.info.name,
        source.name,
        array.info.shape,
        array.info.dtype.name,
        source.dtype.name,
        tuple(map(str, array.info.placements)),
        array.why,
        array.info.nbytes,
        array.is_kept,
    )
