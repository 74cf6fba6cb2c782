"""Eight bits for an element, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

BLOCK = 512  # a scale then costs less than one percent
_LARGEST = 127
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one length, one after another."""

    count: int
    length: int

    @property
    def numel(self) -> int:
        """How many elements they have."""
        return self.count * self.length

    @property
    def nbytes(self) -> int:
        """How many bytes they are sent in."""
        return self.count * (_SCALE_BYTES + self.length)


def runs_of(sizes: Iterable[int]) -> list[Run]:
    """The blocks of tensors of some sizes: none has elements of two, so that what else is sent
    with a tensor does not matter to it.
    """
    runs = []
    for size in sizes:
        runs += [Run(size // BLOCK, BLOCK)] if size >= BLOCK else []
        runs += [Run(1, size % BLOCK)] if size % BLOCK else []
    return runs


def shared_out(runs: Sequence[Run], ranks: int) -> list[list[Run]]:
    """The blocks in order, for each rank about as many elements."""
    shares: list[list[Run]] = [[] for _ in range(ranks)]
    total, at = sum(run.numel for run in runs), 0
    for run in runs:
        left = run
        while left.count:
            rank = at * ranks // total
            room = -(-(total * (rank + 1) - at * ranks) // ranks)
            part = replace(left, count=min(left.count, -(-room // left.length)))
            shares[rank].append(part)
            at += part.numel
            left = replace(left, count=left.count - part.count)
    return shares


def encoded(values: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """The bytes for the elements of some blocks: the scales, then the elements.

    A block with an element that is not finite comes out as NaN, all of it: that is seen.
    """
    scales, codes = [values.new_empty(0)], [values.new_empty(0, dtype=torch.int8)]
    pieces = values.split([run.numel for run in runs])
    for run, piece in zip(runs, pieces, strict=True):
        rows = piece.view(run.count, run.length)
        scale = rows.abs().amax(1, keepdim=True) / _LARGEST
        code = (rows / torch.where(scale > 0, scale, 1)).round_().nan_to_num_(0)
        codes.append(code.clamp_(-_LARGEST, _LARGEST).to(torch.int8).flatten())
        scales.append(scale.flatten())
    return torch.cat([torch.cat(scales).view(torch.uint8), torch.cat(codes).view(torch.uint8)])


def decoded(data: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """The elements that were encoded."""
    head = _SCALE_BYTES * sum(run.count for run in runs)
    scales = data[:head].clone().view(torch.float32).split([run.count for run in runs])
    codes = data[head:].view(torch.int8).split([run.numel for run in runs])
    values = [scales[0].new_empty(0)] if runs else [torch.empty(0, device=data.device)]
    for run, scale, code in zip(runs, scales, codes, strict=True):
        values.append((code.view(run.count, run.length) * scale[:, None]).flatten())
    return torch.cat(values)
