"""The ways of compressing gradients: 16 bits, 8 bits, the largest elements, factors of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    _orthogonalize,
    _should_compress,
)

from ckptkit.errors import UsageError
from ckptkit.parallel.optimizers.compression import (
    Compression,
    RememberingCompression,
    Sent,
    done,
)

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}

BLOCK = 512  # a scale then costs less than one percent
_LARGEST = 127
_SCALE_BYTES = 4

_EPSILON = 1e-8  # a gradient of zeros has no direction
_LEAST_SAVING = 2  # as torch has it: less is not worth the products


def compression_of(spec: str | Compression, *, after: int = 2) -> Compression:
    """The compression that a text such as "powersgd:4" means; `after` is how many steps PowerSGD
    sends as they are.
    """
    if isinstance(spec, Compression):
        return spec
    if after < 0:
        raise UsageError("a number of steps", where="after", value=after)
    name, colon, amount = spec.partition(":")
    try:
        if name in _HALVES and not colon:
            return Cast(spec)
        if name == "int8" and not colon:
            return Int8(spec)
        if name == "topk" and 0 < float(amount) <= 1:
            return TopK(spec, float(amount))
        if name == "powersgd" and int(amount) >= 1:
            return PowerSGD(spec, int(amount), after)
    except ValueError:
        pass  # no number
    raise UsageError(
        "no compression",
        where="compression",
        value=spec,
        hint='known: "fp16", "bf16", "int8", "topk:0.01" (a share), "powersgd:4" (a rank)',
    )


class Cast(Compression):
    """Sends 16 bits for each element: "fp16" or "bf16"; by torch's own hooks on NCCL."""

    def _send(self, bucket: GradBucket) -> Sent:
        buffer = bucket.buffer()
        if self.wire.is_nccl:
            self.wire.sent += self.wire.ring(2 * buffer.numel())
            return _HOOKS[self.spec](self.wire.group, bucket)
        return done(buffer.copy_(self.wire.mean(buffer.to(_HALVES[self.spec]))))

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(_HALVES[self.spec]).contiguous().view(torch.uint8)

    def unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return data.clone().view(_HALVES[self.spec])[:numel].float()


class Int8(Compression):
    """Sends 8 bits for each element and a scale for each block of 512.

    Each rank adds up its share of what all ranks have, in the order of the ranks, and sends the
    means to all: a quarter of the bytes of an all-reduce, whatever the number of ranks.
    """

    def _send(self, bucket: GradBucket) -> Sent:
        wire, buffer = self.wire, bucket.buffer()
        shares = shared_out(runs_of(g.numel() for g in bucket.gradients()), wire.size)
        sizes = [sum(run.nbytes for run in runs) for runs in shares]
        parts = buffer.float().split([sum(run.numel for run in runs) for runs in shares])
        pieces = [encoded(part, runs) for part, runs in zip(parts, shares, strict=True)]
        mine = shares[wire.rank]
        mean = torch.zeros_like(parts[wire.rank])
        for piece in wire.exchange(pieces, sizes[wire.rank]):
            mean += decoded(piece, mine)
        means = wire.gather(encoded(mean.div_(wire.size), mine), sizes)
        found = [decoded(data, runs) for data, runs in zip(means, shares, strict=True)]
        return done(buffer.copy_(torch.cat(found)))

    def packed(self, values: torch.Tensor) -> torch.Tensor:
        # Blocks of 512 whatever the tensors: one piece has a part of each of a whole unit.
        return encoded(values.float(), runs_of([values.numel()]))

    def unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return decoded(data, runs_of([numel]))


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one length, one after another."""

    count: int
    length: int

    @property
    def numel(self) -> int:
        return self.count * self.length

    @property
    def nbytes(self) -> int:
        return self.count * (_SCALE_BYTES + self.length)


def runs_of(sizes: Iterable[int]) -> list[BlockRun]:
    """The blocks of tensors of some sizes: none has elements of two, so that what else is sent
    with a tensor does not matter to it.
    """
    runs = []
    for size in sizes:
        runs += [BlockRun(size // BLOCK, BLOCK)] if size >= BLOCK else []
        runs += [BlockRun(1, size % BLOCK)] if size % BLOCK else []
    return runs


def shared_out(runs: Sequence[BlockRun], ranks: int) -> list[list[BlockRun]]:
    """The blocks in order, for each rank about as many elements."""
    shares: list[list[BlockRun]] = [[] for _ in range(ranks)]
    total, at = sum(run.numel for run in runs), 0
    for run in runs:
        left = run
        while left.count:
            rank = at * ranks // total
            # How many elements there are, rounded up, before the share of the next rank begins.
            room = -(-(total * (rank + 1) - at * ranks) // ranks)
            # Whole blocks, and at least one, so that this ends: a share may be a block too long.
            taken = replace(left, count=min(left.count, -(-room // left.length)))
            shares[rank].append(taken)
            at += taken.numel
            left = replace(left, count=left.count - taken.count)
    return shares


def encoded(values: torch.Tensor, runs: Sequence[BlockRun]) -> torch.Tensor:
    """The bytes for the elements of some blocks: the scales, then the elements.

    A block with an element that is not finite comes out as NaN, all of it: that is seen.
    """
    scales, codes = [values.new_empty(0)], [values.new_empty(0, dtype=torch.int8)]
    pieces = values.split([run.numel for run in runs])
    for run, piece in zip(runs, pieces, strict=True):
        rows = piece.view(run.count, run.length)
        scale = rows.abs().amax(1, keepdim=True) / _LARGEST
        # What is not finite has no whole number: the scale, which is not finite either, tells it.
        code = (rows / torch.where(scale > 0, scale, 1)).round_().nan_to_num_(0)
        codes.append(code.clamp_(-_LARGEST, _LARGEST).to(torch.int8).flatten())
        scales.append(scale.flatten())
    return torch.cat([torch.cat(scales).view(torch.uint8), torch.cat(codes).view(torch.uint8)])


def decoded(data: torch.Tensor, runs: Sequence[BlockRun]) -> torch.Tensor:
    """The elements, about, that `encoded` made bytes of."""
    head = _SCALE_BYTES * sum(run.count for run in runs)
    # Cloned, as bytes of a larger message may begin where no float32 can.
    scales = data[:head].clone().view(torch.float32).split([run.count for run in runs])
    codes = data[head:].view(torch.int8).split([run.numel for run in runs])
    values = [torch.empty(0, dtype=torch.float32, device=data.device)]
    for run, scale, code in zip(runs, scales, codes, strict=True):
        values.append((code.view(run.count, run.length) * scale[:, None]).flatten())
    return torch.cat(values)


class TopK(RememberingCompression):
    """Sends the largest elements of each gradient, and adds what is left to the next one.

    All ranks send theirs to all: 8 bytes for each, times the number of the other ranks.
    """

    def __init__(self, spec: str, share: float) -> None:
        super().__init__(spec)
        self._share = share

    def _send(self, bucket: GradBucket) -> Sent:
        gradients = bucket.gradients()
        each = zip(bucket.parameters(), gradients, strict=True)
        chosen = [self._chosen(self._names[parameter], gradient) for parameter, gradient in each]
        indices = torch.cat([index for index, _, _ in chosen]).to(torch.int32).view(torch.uint8)
        values = torch.cat([value for _, value, _ in chosen]).view(torch.uint8)
        payload = torch.cat([indices, values])
        sizes = [len(index) for index, _, _ in chosen]
        sums = [torch.zeros_like(g, dtype=torch.float32).flatten() for g in gradients]
        # As much of each rank, as how many are chosen follows from the sizes of gradients alone. In
        # the order of the ranks, so that the sums are the same in any bucket.
        for data in self.wire.gather(payload, [payload.numel()] * self.wire.size):
            half = data.view(2, -1).clone()
            where, what = half[0].view(torch.int32).split(sizes), half[1].view(torch.float32)
            for total, index, value in zip(sums, where, what.split(sizes), strict=True):
                total.index_add_(0, index, value)
        ends = zip(bucket.parameters(), gradients, sums, chosen, strict=True)
        for parameter, gradient, total, (_, _, left) in ends:
            gradient.copy_(total.div_(self.wire.size).view_as(gradient))
            residual = self.residuals[self._names[parameter]]
            # The same on all ranks: after an overflow, which the training skips, all stays.
            torch.where(total.isfinite().all(), left, residual, out=residual)
        return done(bucket.buffer())

    def _chosen(
        self, name: str, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where the largest elements are, those, and what is left; a call of its own, so that the
        sum, as large as a gradient, is not kept while ranks exchange.
        """
        self.remember(name, gradient)
        residual = self.residuals[name]
        total = (residual + gradient.float()).flatten()
        index = total.abs().topk(math.ceil(self._share * total.numel()), sorted=False).indices
        return index, total[index], total.index_fill(0, index, 0).view_as(residual)


class PowerSGD(RememberingCompression):
    """Sends two thin factors for each matrix, and adds what they leave to the next gradient.

    torch's hook keeps its memory by the number of the bucket, and DDP makes its buckets anew after
    the first step of every job; on gloo, its collectives may change places. So only what it is
    made of is torch's: memory is by parameter here, and goes into the checkpoint.
    """

    def __init__(self, spec: str, rank: int, after: int) -> None:
        super().__init__(spec)
        self._rank = rank
        self._after = after
        self._steps = 0
        self._factors: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """The step, the factors, and the residuals with a row for each rank."""
        state = super().state_dict() | {"steps": self._steps}
        return state | ({"factors": dict(self._factors)} if self.residuals else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; residuals of another number of ranks are shared out."""
        super().load_state_dict(state)
        factors = state.get("factors", {})
        self._factors = {n: factors[n].to(left.device) for n, left in self.residuals.items()}
        self._steps = state["steps"]

    def _send(self, bucket: GradBucket) -> Sent:
        buffer = bucket.buffer()
        if self._steps < self._after:
            buffer.copy_(self.wire.mean(buffer))
        else:
            thin, whole = {}, []
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if self._thin(gradient):
                    thin[self._names[parameter]] = gradient
                else:
                    whole.append(gradient)
            if whole:
                self._mean(whole)
            if thin:
                self._approximate(thin)
        self._steps += bucket.is_last()
        return done(buffer)

    def _approximate(self, gradients: dict[str, torch.Tensor]) -> None:
        """Put what two factors say of each gradient in its place, and keep the rest."""
        for name, gradient in gradients.items():
            self.remember(name, gradient)
        totals = {n: (self.residuals[n] + g.float()).flatten(1) for n, g in gradients.items()}
        # Products are linear: the mean of all ranks' products is that of their mean gradient, which
        # nobody has. The old factors are copied, as they stay where the step is skipped.
        old = {name: self._factors[name].clone() for name in gradients}
        for factor in old.values():
            _orthogonalize(factor[None], _EPSILON)
        rows = [total @ old[name] for name, total in totals.items()]
        self._mean(rows)
        for factor in rows:
            _orthogonalize(factor[None], _EPSILON)
        columns = [total.T @ r for total, r in zip(totals.values(), rows, strict=True)]
        self._mean(columns)
        for (name, gradient), r, c in zip(gradients.items(), rows, columns, strict=True):
            found = (r @ c.T).view_as(gradient)
            gradient.copy_(found)
            # The same on all ranks: after an overflow, which the training skips, all stays.
            sound = found.isfinite().all()
            left = totals[name].view_as(gradient) - found
            for kept, new in ((self.residuals[name], left), (self._factors[name], c)):
                torch.where(sound, new, kept, out=kept)

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the means over all ranks in the place of the tensors, in one exchange."""
        mean = self.wire.mean(torch.cat([tensor.flatten() for tensor in tensors]))
        pieces = mean.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    def remember(self, name: str, like: torch.Tensor) -> None:
        """Make the residual of a parameter and its first factor, where it has such."""
        if name in self.residuals or not self._thin(like):
            return
        super().remember(name, like)
        # By its name, so that it is the same on all ranks and in any bucket.
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        shape = math.prod(like.shape[1:]), self._thin(like)
        factor = torch.randn(shape, generator=generator, device="cpu")
        self._factors[name] = factor.to(like.device)

    def _thin(self, gradient: torch.Tensor) -> int:
        """The rank of the factors of a gradient; 0 for one that is sent as it is."""
        if gradient.dim() < 2:
            return 0
        rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
        rank = min(rows, columns, self._rank)
        pays, _, _ = _should_compress(rows, columns, rank, _LEAST_SAVING)
        return rank if pays else 0
