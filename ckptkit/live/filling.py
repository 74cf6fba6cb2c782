"""Filling the memory of live tensors from the arrays of a step: each rank for itself, or what
several need alike by one of them, which gives it to the others.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy.typing as npt
import torch
import torch.distributed as dist

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.checkpoint import Array, Checkpoint
from ckptkit.errors import LayoutError
from ckptkit.live.comparison import Filling
from ckptkit.live.state.parts import LiveTensor, indices
from ckptkit.live.state.ranks import Axes, group_along, wire
from ckptkit.live.state.tensors import bits_of, dtype_of, torch_dtype
from ckptkit.live.state.topology import Topology
from ckptkit.model import Box, Replicate
from ckptkit.plan.read import batches, readable_pieces, readers_of

log = logging.getLogger("ckptkit.live")

_STAGED_BYTES = 256 << 20
_TURN_BYTES = 64 << 20
_PIECE_BYTES = 8 << 20  # small enough to spread evenly over readers
_ALIGNMENT = 64

ReadMany: TypeAlias = Callable[[Sequence[tuple[str, Box, npt.NDArray[Any]]]], None]
"""Reads boxes of arrays into memory."""


def fill(topology: Topology, fillings: Sequence[Filling], read: ReadMany) -> None:
    """Fill tensors: those in host memory directly, the others through memory of a bounded size.

    A step has raw elements, which numpy can put in place only where the tensor has these too: what
    lies on a device, is of another dtype, or is a conjugate view, torch has to copy.
    """
    known: dict[Any, list[tuple[Box, tuple[Any, ...]]]] = {}  # layers are alike

    def wanted(held: LiveTensor, array: Array, memory: torch.Tensor) -> list[Any]:
        bits = bits_of(held.name, memory)
        kind = held.shape, held.local.shape, id(held.placements), held.own
        if kind not in known:
            known[kind] = _boxes(topology, held)
        return [(array.name, box, bits[inside]) for box, inside in known[kind]]

    direct: list[Any] = []
    staged: list[Filling] = []
    for held, array in fillings:
        local = held.local
        is_alike = array.dtype == dtype_of(held.name, local)
        if is_alike and local.is_cpu and not (local.is_conj() or local.is_neg()):
            direct += wanted(held, array, local)
        else:
            staged.append((held, array))
    read(direct)
    for first, last in batches([held.local.nbytes for held, _ in staged], _STAGED_BYTES):
        memory = [
            torch.empty(
                held.local.shape,
                dtype=torch_dtype(array.dtype),
                pin_memory=held.local.device.type == "cuda",
            )
            for held, array in staged[first:last]
        ]
        batch = list(zip(staged[first:last], memory, strict=True))
        read([each for filling, there in batch for each in wanted(*filling, there)])
        with torch.no_grad():
            for (held, _), there in batch:
                held.local.copy_(there)


def _boxes(topology: Topology, held: LiveTensor) -> list[tuple[Box, tuple[Any, ...]]]:
    """The boxes of a tensor that this rank holds, and where each is in its memory: an index with an
    ellipsis, so that it also gives a view of what has no dims.
    """
    part, shape = held.part(topology), tuple(held.local.shape)
    if not part.boxes and 0 in shape:
        return []  # torch's empty parts have lost their other dims
    if part.shape != shape:
        raise LayoutError(
            f"this rank should hold {part.shape} of {held.shape}, but the tensor here has {shape}",
            where=held.name,
            hint="if it was cut by hand, say how with rules={…}",
        )
    places = [here for _, here in indices(part, held.shape)]
    return [(box, (*place, ...)) for box, place in zip(part.boxes, places, strict=True)]


# What several ranks need alike, read by one of them and given to the others by broadcasts.


def fill_once(
    checkpoint: Checkpoint,
    topology: Topology,
    fillings: Sequence[Filling],
    ranks: Ranks,
    read: ReadMany,
) -> list[Filling]:
    """Fill what several ranks need alike, and return what is this rank's alone. A collective call
    of the default process group.

    Ranks that differ only along axes which repeat a tensor need the same boxes of it. Each such
    group cuts what it needs into pieces, and every rank of it computes alike who reads which.
    """
    mesh = topology.strategy.mesh
    by_axes: dict[Axes, list[Filling]] = {}
    for held, array in fillings:
        repeating = tuple(
            number
            for number, axis in enumerate(mesh.axes)
            if axis.size > 1 and isinstance(held.placements.get(axis.name, Replicate()), Replicate)
        )
        by_axes.setdefault(repeating, []).append((held, array))
    alone = by_axes.pop((), [])
    plans = {axes: _shares(checkpoint, topology, each) for axes, each in by_axes.items()}
    agreed = _agreed(ranks, topology, plans)
    errors: list[Exception] = []
    circle: _Circle | None = None
    for axes in agreed:
        # Made by all ranks, also by those that need nothing along these axes.
        members, group = group_along(mesh.sizes, mesh.coords(topology.rank), axes)
        circle = None  # before the next one is made: the memory of one is what was promised
        if axes in plans:
            circle = _Circle(members, topology.rank, group, plans[axes])
        # A rank without the memory would not come to a broadcast that others wait in.
        ranks.wait()
        if circle is not None:
            errors += circle.run(read)
    for axes in plans.keys() - set(agreed):
        alone += by_axes[axes]
    if errors:
        raise errors[0]
    return alone


@dataclass(frozen=True, slots=True, eq=False)
class _SharedBox:
    """A box that a group of ranks needs, and where it goes on this one."""

    array: Array
    box: Box
    target: torch.Tensor
    order: tuple[int, int]
    """The pack and the offset of its first chunk."""

    @property
    def nbytes(self) -> int:
        """Its bytes, as the step has them."""
        return self.box.size * self.array.dtype.itemsize

    @property
    def room(self) -> int:
        """The bytes that it takes in a turn."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


def _shares(
    checkpoint: Checkpoint, topology: Topology, fillings: Sequence[Filling]
) -> list[_SharedBox]:
    """What a group of ranks needs of some tensors, in the order in which it lies in the packs."""
    manifest, found = checkpoint.manifest, []
    for held, array in fillings:
        grid, start = array.grid, checkpoint.first_row(array.name)
        for box, inside in _boxes(topology, held):
            memory = held.local[inside]
            for piece in readable_pieces(grid, box, array.dtype.itemsize, _PIECE_BYTES):
                row = start + grid.flat(tuple(span[0] for span in grid.span(piece)))
                order = int(manifest.pack[row]), int(manifest.offset[row])
                there: tuple[Any, ...] = (*piece.within(box), ...)
                found.append(_SharedBox(array, piece, memory[there], order))
    return sorted(found, key=lambda share: (share.order, share.array.name, share.box.offset))


def _agreed(ranks: Ranks, topology: Topology, plans: dict[Axes, list[_SharedBox]]) -> list[Axes]:
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

    mine = []
    for axes, plan in sorted(plans.items()):
        digest = hashlib.sha256()
        for share in plan:
            digest.update(repr((share.array.name, share.box, share.array.dtype)).encode())
        mine.append((axes, digest.hexdigest()))
    agreed: list[Axes] = ranks.agree(mine, same_for_all)
    return agreed


class _Circle:
    """The ranks of a group: in each turn every one reads a batch, and then gives it to all.

    A rank whose reading fails takes part in all broadcasts nevertheless, and raises at the end:
    nobody waits for it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        plan: Sequence[_SharedBox],
    ) -> None:
        self._ranks = ranks
        self._group = group
        self._me = ranks.index(rank)
        readers = readers_of([share.nbytes for share in plan], len(ranks))
        # By place in the circle, what each rank reads in each turn, with where it begins there.
        self._turns: list[list[list[tuple[int, _SharedBox]]]] = []
        largest = 0
        for place in range(len(ranks)):
            own = [share for share, reader in zip(plan, readers, strict=True) if reader == place]
            starts = list(accumulate((share.room for share in own), initial=0))
            runs = batches([b - a for a, b in pairwise(starts)], _TURN_BYTES)
            largest = max([largest, *(starts[last] - starts[first] for first, last in runs)])
            self._turns.append(
                [[(starts[n] - starts[i], own[n]) for n in range(i, j)] for i, j in runs]
            )
        device = wire()
        is_pinned = device.type == "cuda"
        # While one batch is given to the others, the next is read.
        self._own = [
            torch.empty(largest, dtype=torch.uint8, pin_memory=is_pinned)
            for _ in self._turns[self._me][:2]
        ]
        # What others give arrives here, and on a device also what this rank gives leaves from here.
        self._wired = torch.empty(largest, dtype=torch.uint8, device=device)

    def run(self, read: ReadMany) -> list[Exception]:
        """Fill all; what went wrong on this rank is returned when the others have theirs."""
        errors: list[Exception] = []
        mine = self._turns[self._me]

        def read_turn(turn: int) -> None:
            if errors:
                return
            memory, wanted = self._own[turn % 2], []
            for start, share in mine[turn]:
                raw = memory[start : start + share.nbytes].numpy()
                bits = raw.view(share.array.dtype.bits)
                wanted.append((share.array.name, share.box, bits.reshape(share.box.shape)))
            try:
                read(wanted)
            except Exception as error:  # noqa: BLE001 — as the class says
                errors.append(error)

        with ThreadPoolExecutor(1, thread_name_prefix="ckptkit") as reader:
            reading: Future[None] | None = reader.submit(read_turn, 0) if mine else None
            for turn in range(max(map(len, self._turns), default=0)):
                if reading is not None:
                    reading.result()
                    is_last = turn + 1 >= len(mine)
                    reading = None if is_last else reader.submit(read_turn, turn + 1)
                for place, turns in enumerate(self._turns):
                    if turn < len(turns):
                        self._give(place, turn, errors)
        return errors

    @torch.no_grad()
    def _give(self, place: int, turn: int, errors: list[Exception]) -> None:
        """One rank's batch of a turn, from it to all."""
        batch, memory = self._turns[place][turn], self._wired
        start, last = batch[-1]
        room = start + last.room
        if place == self._me and memory.device.type == "cpu":
            memory = self._own[turn % 2]
        elif place == self._me:
            memory[:room].copy_(self._own[turn % 2][:room])
        dist.broadcast(memory[:room], src=self._ranks[place], group=self._group)
        try:
            for start, share in batch:
                values = memory[start : start + share.nbytes].view(torch_dtype(share.array.dtype))
                share.target.copy_(values.view(share.box.shape))
        except Exception as error:  # noqa: BLE001 — as the class says
            errors.append(error)
