"""From the placements of a DTensor on its own mesh to those of a finer mesh of the same ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
from torch.distributed.tensor.placement_types import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from ckptkit.errors import LayoutError
from ckptkit.model import Layout, Placement, Replicate, Shard, Strategy, Strided, layout_of
from ckptkit.model.strategy import Axis, Mesh

Run = tuple[int, ...]
"""The axes that a line of ranks lies along, outermost first."""


def own_layout(name: str, tensor: DTensor) -> Layout:
    """How a DTensor lies on its own mesh, whose dims are the axes."""
    try:
        return _torch_layout(tuple(tensor.shape), tensor.device_mesh.shape, tensor.placements)
    except LayoutError as error:
        error.where = f"{name}: {error.where}" if error.where else name
        raise


@lru_cache(maxsize=4096)
def _torch_layout(
    shape: tuple[int, ...], ranks: tuple[int, ...], placements: tuple[TorchPlacement, ...]
) -> Layout:
    places: list[Placement] = [Replicate() for _ in ranks]
    factors: dict[int, int] = {}
    pieces: dict[int, int] = {}  # by dim of the tensor, how many the axes to the right have made
    for at, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, TorchReplicate):
            continue
        if not isinstance(placement, (TorchShard, _StridedShard)):
            raise LayoutError(
                "a DTensor of partial sums has no values to save yet",
                value=str(placement),
                hint="redistribute it to Replicate() or Shard(…) first",
            )
        dim, before = placement.dim, pieces.get(placement.dim, 1)
        factors[at] = int(getattr(placement, "split_factor", 1))
        is_late = factors[at] == before > 1
        places[at] = Strided(dim) if is_late else Shard(dim)
        pieces[dim] = before * ranks[at]
    # Of what is left for the axes to the right to cut; -1 where that differs between ranks.
    lengths = list(shape)
    cutting = [(at, p) for at, p in enumerate(places) if isinstance(p, (Shard, Strided))]
    for at, place in enumerate(places):
        if not isinstance(place, Shard):
            continue
        dim, length = place.dim, lengths[place.dim]
        if factors[at] > 1:  # of blocks that no axis has made: packed, and each is cut for itself
            strided = [i for i, place in cutting if place.dim == dim and factors[i] > 1]
            if length < 0 or len(strided) > 1:
                raise LayoutError(
                    f"dim {dim} is cut in blocks, and further in a way that has two readings",
                    value=str(placements),
                    hint="cut blocks along one dim of the mesh, or make them tensors of their own",
                )
            places[at] = Shard(dim, _chunked(length, factors[at]))
        lengths[dim] = -1 if length < 0 or length % ranks[at] else length // ranks[at]
    mesh = Mesh(tuple(Axis(f"dim{n}", "tp", size) for n, size in enumerate(ranks)))
    return layout_of(shape, Strategy(mesh), places)


def _chunked(length: int, count: int) -> tuple[int, ...] | None:
    """The lengths of the pieces that torch.chunk makes."""
    step = max(1, -(-length // count))
    return tuple(min(step, length - start) for start in range(0, length, step)) or None


@lru_cache(maxsize=4096)
def refined(
    own: Layout, runs: tuple[Run, ...], strategy: Strategy
) -> tuple[tuple[Placement, ...], bool]:
    """How the axes of a strategy cut a tensor as its own mesh does, each line of which lies along
    some of them; and whether they make exactly its pieces.
    """
    sizes = strategy.mesh.sizes
    row: list[Placement] = [Replicate() for _ in sizes]
    is_sure = True
    for dim, length in enumerate(own.shape):
        steps: list[tuple[Run, Placement]] = []  # in the order in which they cut
        for run, placement in reversed(list(zip(runs, own.placements, strict=True))):
            if isinstance(placement, Shard) and placement.dim == dim:
                steps.insert(0, (run, placement))
            elif isinstance(placement, Strided) and placement.dim == dim:
                steps.append((run, placement))
        order = [axis for run, _ in steps for axis in run]
        is_even = length % math.prod(sizes[axis] for axis in order) == 0
        # Where several axes do what one of their sizes together would, that goes evenly or not.
        cuts = _by_turn(dim, steps) if is_even or all(len(run) < 2 for run, _ in steps) else None
        if cuts is None and is_even and length:
            cuts = _by_blocks(dim, length, steps, sizes)
        is_sure = is_sure and cuts is not None
        for axis in order:
            row[axis] = Shard(dim) if cuts is None else cuts[axis]
    return tuple(row), is_sure or _are_alike(own, layout_of(own.shape, strategy, row), runs)


def _by_turn(dim: int, steps: Sequence[tuple[Run, Placement]]) -> dict[int, Placement] | None:
    """The placements of axes that cut a dim in this order, where no blocks are needed to say it."""
    cuts: dict[int, Placement] = {}
    order = [axis for run, _ in steps for axis in run]
    for run, placement in steps:
        blocks = placement.blocks if isinstance(placement, Shard) else None
        for axis in run:
            turn = [other for other in order if other >= axis]
            if turn[0] == axis and (blocks is None or len(run) == 1):
                cuts[axis] = Shard(dim, blocks)
            elif turn[-1] == axis and blocks is None:
                cuts[axis] = Strided(dim)
            else:
                return None
    return cuts


def _by_blocks(
    dim: int, length: int, steps: Sequence[tuple[Run, Placement]], sizes: Sequence[int]
) -> dict[int, Placement] | None:
    """The same in blocks, where all goes evenly: a place along the dim is then a number of several
    digits, and each axis takes one of them, or every rank has all of its values (None).
    """
    digits: list[tuple[int, int | None]] = [(length, None)]
    for run, placement in steps:
        count = math.prod(sizes[axis] for axis in run)
        lengths = (isinstance(placement, Shard) and placement.blocks) or (0,)
        blocks = len(lengths)
        if len(set(lengths)) > 1:
            return None
        for at, (size, axis) in enumerate(digits):
            if axis is not None:
                continue
            if blocks > 1 and blocks % size == 0:
                blocks //= size
            elif size % (blocks * count) == 0:
                taken = [(sizes[axis], axis) for axis in run]
                left = [(blocks, None)] if blocks > 1 else []
                digits[at : at + 1] = [*left, *taken, (size // blocks // count, None)]
                break
            elif size > 1:
                return None
        else:
            return None
    cuts: dict[int, Placement] = {}
    for at, (_, axis) in enumerate(digits):
        if axis is not None:
            before = [s for s, other in digits[:at] if other is None or other > axis]
            here = length // math.prod(
                s for s, other in digits if other is not None and other < axis
            )
            count = math.prod(before)
            cuts[axis] = Shard(dim, (here // count,) * count if count > 1 else None)
    return cuts


def _are_alike(own: Layout, found: Layout, runs: tuple[Run, ...]) -> bool:
    """Whether every rank of a tensor's own mesh holds what the axes say that it does."""
    mesh = found.strategy.mesh
    for rank in range(own.strategy.world_size):
        coordinates = [0] * len(mesh.axes)
        for run, place in zip(runs, own.strategy.mesh.coords(rank), strict=True):
            for axis in reversed(run):
                place, coordinates[axis] = divmod(place, mesh.sizes[axis])  # noqa: PLW2901
        if own.part(rank).boxes != found.part(mesh.rank(tuple(coordinates))).boxes:
            return False
    return True
