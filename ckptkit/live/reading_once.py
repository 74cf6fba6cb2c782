"""What several ranks need alike is read by one of them, and goes to the others by broadcasts.

Ranks that differ only along axes which repeat a tensor need the same boxes of it. Each such group
cuts what it needs into pieces, and every rank of it computes alike who reads which. A rank whose
reading fails takes part in all broadcasts nevertheless, and raises at the end: nobody waits for it.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.live.filling import Filling, Inside, Target
from ckptkit.live.ranks import wire
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.live.state.topology import Topology
from ckptkit.model import Box, Replicate
from ckptkit.plan.read import batches, readable_pieces, readers_of

log = logging.getLogger("ckptkit.live")

BATCH_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20  # small enough to spread evenly over readers
_ALIGNMENT = 64

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A box that a group of ranks needs, and where it goes on this one."""

    name: str
    box: Box
    dtype: torch.dtype
    target: torch.Tensor
    order: tuple[int, int]
    """The pack and the offset of its first chunk."""

    @property
    def nbytes(self) -> int:
        """Its bytes, as the step has them."""
        return self.box.size * self.dtype.itemsize

    @property
    def room(self) -> int:
        """The bytes that it takes in a batch."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


def fill_once(filling: Filling, targets: Sequence[Target], barrier: Ranks) -> list[Target]:
    """Fill what several ranks need alike, and return the targets that are this rank's alone.

    A collective call of the default process group.
    """
    topology = filling.topology
    shared: dict[Axes, list[Target]] = {}
    for target in targets:
        shared.setdefault(_repeating(topology, target), []).append(target)
    alone = shared.pop((), [])
    plans = {axes: _pieces(filling, each) for axes, each in shared.items()}
    agreed = _agreed(barrier, topology, plans)
    errors: list[Exception] = []
    for axes in agreed:
        # Made by all ranks, also by those that need nothing along these axes.
        group = _group_along(topology, axes)
        circle = None
        if axes in plans:
            circle = _Circle(filling, members(topology, axes), group, plans[axes])
        # A rank without the memory would not come to a broadcast that others wait in.
        barrier.wait()
        if circle is not None:
            errors += circle.run()
    for axes in plans.keys() - set(agreed):
        alone += shared[axes]
    if errors:
        raise errors[0]
    return alone


def members(topology: Topology, axes: Axes) -> list[int]:
    """The ranks that differ from this one along some axes only."""
    sizes = topology.strategy.mesh.sizes
    coords = topology.strategy.mesh.coords(topology.rank)
    index = tuple(slice(None) if axis in axes else at for axis, at in enumerate(coords))
    ranks: list[int] = np.arange(math.prod(sizes)).reshape(sizes)[index].reshape(-1).tolist()
    return ranks


def _repeating(topology: Topology, target: Target) -> Axes:
    """The axes of several ranks that repeat a tensor."""
    placements = target.held.placements
    return tuple(
        number
        for number, axis in enumerate(topology.strategy.mesh.axes)
        if axis.size > 1 and isinstance(placements.get(axis.name, Replicate()), Replicate)
    )


def _pieces(filling: Filling, targets: Sequence[Target]) -> list[Piece]:
    checkpoint, found = filling.checkpoint, []
    numbers = {array.name: number for number, array in enumerate(checkpoint.manifest.arrays)}
    for target in targets:
        array, local = checkpoint[target.name], target.held.local
        itemsize = array.dtype.itemsize
        for box, inside in filling.boxes(target, local.shape):
            memory = local[inside]
            for piece in readable_pieces(array.grid, box, itemsize, _PIECE_BYTES):
                index: Inside = (*piece.within(box), ...)
                there = memory[index]
                dtype = torch_dtype(array.dtype)
                order = _first_chunk(checkpoint, numbers[array.info.name], piece)
                found.append(Piece(target.name, piece, dtype, there, order))
    return sorted(found, key=lambda piece: (piece.order, piece.name, piece.box.offset))


def _first_chunk(checkpoint: Checkpoint, number: int, box: Box) -> tuple[int, int]:
    manifest = checkpoint.manifest
    grid = manifest.arrays[number].grid
    row = int(manifest.starts[number]) + grid.flat(tuple(span[0] for span in grid.span(box)))
    return int(manifest.pack[row]), int(manifest.offset[row])


def _agreed(ranks: Ranks, topology: Topology, plans: dict[Axes, list[Piece]]) -> list[Axes]:
    """The axes along which all ranks of every group have come to the same plan.

    Where they have not, as when one passes other objects, all of them read for themselves.
    """
    mesh = topology.strategy.mesh

    def same_for_all(heard: list[list[tuple[Axes, str]]]) -> list[Axes]:
        known: dict[tuple[Axes, Axes], list[str]] = {}
        for rank, said in enumerate(heard):
            for axes, digest in said:
                rest = tuple(at for axis, at in enumerate(mesh.coords(rank)) if axis not in axes)
                known.setdefault((axes, rest), []).append(digest)
        wrong = {
            axes
            for (axes, _), digests in known.items()
            if len(set(digests)) > 1 or len(digests) != math.prod(mesh.sizes[axis] for axis in axes)
        }
        if wrong:
            log.warning(
                "ranks that repeat each other want different tensors: each reads for itself"
            )
        return sorted({axes for axes, _ in known} - wrong)

    mine = [(axes, _digest(plan)) for axes, plan in sorted(plans.items())]
    agreed: list[Axes] = ranks.agree(mine, same_for_all)
    return agreed


def _digest(plan: Sequence[Piece]) -> str:
    found = hashlib.sha256()
    for piece in plan:
        found.update(repr((piece.name, piece.box, piece.dtype)).encode())
    return found.hexdigest()


# By process group, then by the sizes of the mesh and the axes: what was made once serves all loads,
# as torch's names of groups that come and go are not the same on all ranks.
_groups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[Axes, Axes], dist.ProcessGroup]]
_groups = WeakKeyDictionary()


def _group_along(topology: Topology, axes: Axes) -> dist.ProcessGroup | None:
    """The process group of this rank and its like; every rank asks for the same axes."""
    sizes = topology.strategy.mesh.sizes
    everyone = np.arange(math.prod(sizes)).reshape(sizes)
    default = dist.group.WORLD
    if default is None or len(members(topology, axes)) == everyone.size:
        return default
    known = _groups.setdefault(default, {})
    if (sizes, axes) not in known:
        last = np.moveaxis(everyone, axes, range(-len(axes), 0))
        count = math.prod(sizes[axis] for axis in axes)
        lines: list[list[int]] = last.reshape(-1, count).tolist()
        known[sizes, axes], _ = dist.new_subgroups_by_enumeration(lines)
    return known[sizes, axes]


class _Circle:
    """The ranks of a group: in each turn every one reads a batch, and then gives it to all."""

    def __init__(
        self,
        filling: Filling,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        plan: Sequence[Piece],
    ) -> None:
        self._filling = filling
        self._ranks = ranks
        self._group = group
        self._me = ranks.index(filling.topology.rank)
        self._wire = wire()
        self._errors: list[Exception] = []
        self._plan = self._batches(plan)
        largest = max((_room(b) for of_rank in self._plan for b in of_rank), default=0)
        # While one batch is given to the others, the next is read.
        self._own = [self._memory(largest) for _ in range(min(2, len(self._plan[self._me])))]
        self._wired = torch.empty(largest, dtype=torch.uint8, device=self._wire)

    def run(self) -> list[Exception]:
        """Fill all pieces; what went wrong on this rank is returned when the others have theirs."""
        turns = max(map(len, self._plan), default=0)
        mine, own = self._plan[self._me], self._own
        with ThreadPoolExecutor(1, thread_name_prefix="ckptkit") as reading:
            ready = [reading.submit(self._read, mine[0], own[0])] if mine else []
            for turn in range(turns):
                if turn < len(mine):
                    ready[turn].result()
                if turn + 1 < len(mine):
                    memory = own[(turn + 1) % 2]
                    ready.append(reading.submit(self._read, mine[turn + 1], memory))
                for place, of_rank in enumerate(self._plan):
                    if turn < len(of_rank):
                        self._give(place, turn)
        return self._errors

    def _batches(self, plan: Sequence[Piece]) -> list[list[list[Piece]]]:
        """By place in the circle, what each rank reads in each turn."""
        readers = readers_of([piece.nbytes for piece in plan], len(self._ranks))
        found: list[list[list[Piece]]] = []
        for place in range(len(self._ranks)):
            mine = [piece for piece, r in zip(plan, readers, strict=True) if r == place]
            runs = batches([piece.room for piece in mine], BATCH_BYTES)
            found.append([mine[first:last] for first, last in runs])
        return found

    def _memory(self, size: int) -> torch.Tensor:
        pinned = self._wire.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _read(self, batch: Sequence[Piece], memory: torch.Tensor) -> None:
        if self._errors:
            return
        wanted = []
        for piece, start in zip(batch, _starts(batch), strict=True):
            stored = self._filling.checkpoint[piece.name].dtype.bits
            raw = memory[start : start + piece.nbytes].numpy()
            wanted.append((piece.name, piece.box, raw.view(stored).reshape(piece.box.shape)))
        try:
            self._filling.read(wanted)
        except Exception as error:  # noqa: BLE001 — as above
            self._errors.append(error)

    def _give(self, place: int, turn: int) -> None:
        batch, memory = self._plan[place][turn], self._wired
        room = _room(batch)
        if place == self._me and self._wire.type == "cpu":
            memory = self._own[turn % 2]
        elif place == self._me:
            memory[:room].copy_(self._own[turn % 2][:room])
        dist.broadcast(memory[:room], src=self._ranks[place], group=self._group)
        try:
            _hand_out(batch, memory)
        except Exception as error:  # noqa: BLE001 — as above
            self._errors.append(error)


@torch.no_grad()
def _hand_out(batch: Sequence[Piece], memory: torch.Tensor) -> None:
    for piece, start in zip(batch, _starts(batch), strict=True):
        values = memory[start : start + piece.nbytes].view(piece.dtype)
        piece.target.copy_(values.view(piece.box.shape))


def _starts(batch: Sequence[Piece]) -> list[int]:
    return list(accumulate((piece.room for piece in batch), initial=0))[:-1]


def _room(batch: Sequence[Piece]) -> int:
    return sum(piece.room for piece in batch)
