"""Parameters of which every rank has some elements, wherever these begin and end, and the rows of
them that a step is made of: what one rank has and another is to have goes to it directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ckptkit.live.state.ranks import wire
from ckptkit.live.state.tensors import bytes_of
from ckptkit.plan.read import batches

_BATCH_BYTES = 256 << 20  # on each rank, besides what is exchanged


@dataclass(frozen=True, slots=True)
class ElementCut:
    """Which elements of a parameter each rank has. The ranks have a long row together, `each` the
    same number of its elements; `size` of these, after `before` others, are the parameter's.
    """

    size: int
    each: int
    before: int = 0

    def of(self, rank: int) -> tuple[int, int]:
        """The first element of the parameter that a rank has, and the one after the last."""
        ends = (rank * self.each - self.before, (rank + 1) * self.each - self.before)
        start, stop = (min(max(end, 0), self.size) for end in ends)
        return start, stop

    def ranks(self, start: int, stop: int) -> range:
        """Who has these elements."""
        if start >= stop:
            return range(0)
        first, last = self.before + start, self.before + stop - 1
        return range(first // self.each, last // self.each + 1)


class Move(NamedTuple):
    """Elements that ranks have by one cut, and are to have by another."""

    given: ElementCut
    elements: torch.Tensor
    wanted: ElementCut
    into: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HeldElements:
    """What this rank has of a parameter."""

    shape: tuple[int, ...]
    cut: ElementCut
    row: torch.Tensor
    """Has its elements, and mostly those of other parameters."""
    at: int
    """Where its elements begin there, if it has any."""
    rank: int
    ranks: int

    @property
    def rows_cut(self) -> ElementCut:
        """How ranks have rows of it, as many as the others each."""
        return ElementCut(math.prod(self.shape), self._height * math.prod(self.shape[1:]))

    @property
    def _height(self) -> int:
        return -(-self.shape[0] // self.ranks)

    def elements(self, row: torch.Tensor) -> torch.Tensor:
        """The elements of this rank, in what is kept for the row."""
        start, stop = self.cut.of(self.rank)
        return row.detach().view(-1).narrow(0, self.at if start < stop else 0, stop - start)

    def empty_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's rows. In host memory: on a device there may be no room for a
        second copy of an optimizer's state.
        """
        rows = min(self._height, max(self.shape[0] - self.rank * self._height, 0))
        return torch.empty((rows, *self.shape[1:]), dtype=dtype, device="cpu")

    def to_rows(self, row: torch.Tensor, rows: torch.Tensor) -> Move:
        """What fills the rows with what is kept for the row."""
        return Move(self.cut, self.elements(row), self.rows_cut, rows.view(-1))

    def from_rows(self, rows: torch.Tensor, row: torch.Tensor) -> Move:
        """What fills this rank's elements of the row with what the rows have."""
        return Move(self.rows_cut, rows.view(-1), self.cut, self.elements(row))


def exchange(moves: Sequence[Move], group: dist.ProcessGroup | None) -> None:
    """Make the moves: a collective of the group, whose ranks call it with as many, cut alike.

    An element goes over the network once, from who has it to who wants it. Without a group this
    rank has and wants everything.
    """
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    device = torch.device("cpu") if group is None else wire(group)
    sizes = [move.given.size * move.into.element_size() // ranks for move in moves]
    for first, last in batches(sizes, _BATCH_BYTES):
        leaving: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        coming: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for move in moves[first:last]:
            for own, memory, other, pieces in (
                (move.given, move.elements, move.wanted, leaving),
                (move.wanted, move.into, move.given, coming),
            ):
                start, stop = own.of(rank)
                for peer in other.ranks(start, stop):
                    begin, end = other.of(peer)
                    begin, end = max(begin, start), min(end, stop)
                    pieces[peer].append(bytes_of(memory[begin - start : end - start]))
        sent = [piece.to(device) for by_peer in leaving for piece in by_peer]
        send = torch.cat(sent) if sent else torch.empty(0, dtype=torch.uint8, device=device)
        got = send
        if group is not None:
            to_each, from_each = (
                [sum(map(len, by_peer)) for by_peer in pieces] for pieces in (leaving, coming)
            )
            got = torch.empty(sum(from_each), dtype=torch.uint8, device=device)
            dist.all_to_all_single(got, send, from_each, to_each, group=group)
        arrived = {got.device: got}
        at = 0
        for piece in (piece for by_peer in coming for piece in by_peer):
            if piece.device not in arrived:
                arrived[piece.device] = got.to(piece.device)
            piece.copy_(arrived[piece.device][at : at + len(piece)])
            at += len(piece)
