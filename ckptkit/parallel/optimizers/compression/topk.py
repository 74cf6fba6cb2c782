"""The largest elements of gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket

from ckptkit.parallel.optimizers.compression.compression import Compression, Sent
from ckptkit.parallel.optimizers.compression.residuals import as_rows, from_rows
from ckptkit.parallel.optimizers.compression.wire import done


class TopK(Compression):
    """Sends the largest elements of each gradient, and adds what is left to the next one.

    All ranks send theirs to all: 8 bytes for each, times the number of the other ranks.
    """

    remembers = True

    def __init__(self, spec: str, share: float) -> None:
        super().__init__(spec)
        self._share = share
        self._residuals: dict[str, torch.Tensor] = {}

    def allocate(self) -> None:
        """Make the residuals, all zero."""
        for parameter, name in self._names.items():
            if parameter.requires_grad:
                self._residual(name, parameter)

    def state_dict(self) -> dict[str, Any]:
        """The residuals: an array for each parameter, with a row for each rank."""
        if not self._residuals:
            return super().state_dict()
        rows = as_rows(self._residuals, self.wire)
        return super().state_dict() | {"ranks": self.wire.size, "residuals": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over residuals; those of another number of ranks are shared out."""
        super().load_state_dict(state)
        parameters = {name: parameter for parameter, name in self._names.items()}
        rows, ranks = state.get("residuals", {}), state.get("ranks", 0)
        self._residuals = from_rows(rows, self.wire, parameters.get, ranks)

    def _send(self, bucket: GradBucket) -> Sent:
        gradients = bucket.gradients()
        chosen = [
            self._choose(self._name(parameter), gradient)
            for parameter, gradient in zip(bucket.parameters(), gradients, strict=True)
        ]
        indices = torch.cat([index for index, _, _ in chosen]).to(torch.int32).view(torch.uint8)
        values = torch.cat([value for _, value, _ in chosen]).view(torch.uint8)
        payload = torch.cat([indices, values])
        sizes = [len(index) for index, _, _ in chosen]
        sums = [torch.zeros_like(g, dtype=torch.float32).flatten() for g in gradients]
        # In the order of the ranks, so that the sums are the same in any bucket.
        for data in self.wire.gather(payload, [payload.numel()] * self.wire.size):
            half = data.view(2, -1).clone()
            where, what = half[0].view(torch.int32).split(sizes), half[1].view(torch.float32)
            for total, index, value in zip(sums, where, what.split(sizes), strict=True):
                total.index_add_(0, index, value)
        each = zip(bucket.parameters(), gradients, sums, chosen, strict=True)
        for parameter, gradient, total, (_, _, left) in each:
            gradient.copy_(total.div_(self.wire.size).view_as(gradient))
            residual = self._residuals[self._name(parameter)]
            # The same on all ranks: after an overflow, which the training skips, all stays.
            torch.where(total.isfinite().all(), left, residual, out=residual)
        return done(bucket.buffer())

    def _choose(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Where the largest elements are, what they are, and what is left without them."""
        residual = self._residual(name, gradient)
        total = (residual + gradient.float()).flatten()
        count = math.ceil(self._share * total.numel())
        index = total.abs().topk(count, sorted=False).indices
        return index, total[index], total.index_fill(0, index, 0).view_as(residual)

    def _residual(self, name: str, like: torch.Tensor) -> torch.Tensor:
        if name not in self._residuals:
            self._residuals[name] = torch.zeros_like(
                like, dtype=torch.float32, memory_format=torch.contiguous_format
            ).detach()
        return self._residuals[name]
