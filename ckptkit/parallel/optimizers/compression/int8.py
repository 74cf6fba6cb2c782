"""Gradients of 8 bits."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import GradBucket

from ckptkit.parallel.optimizers.compression.blocks import (
    decoded,
    encoded,
    runs_of,
    shared_out,
)
from ckptkit.parallel.optimizers.compression.compression import Compression, Sent
from ckptkit.parallel.optimizers.compression.wire import done


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

    def _packed(self, values: torch.Tensor) -> torch.Tensor:
        # Blocks of 512 whatever the tensors: one piece has a part of each of a whole unit.
        return encoded(values.float(), runs_of([values.numel()]))

    def _unpacked(self, data: torch.Tensor, numel: int) -> torch.Tensor:
        return decoded(data, runs_of([numel]))
