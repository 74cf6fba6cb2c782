"""Gradients of low rank: PowerSGD (Vogels, Karimireddy, Jaggi, 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    _orthogonalize,
    _should_compress,
)

from ckptkit.parallel.optimizers.compression.compression import Compression, Sent
from ckptkit.parallel.optimizers.compression.residuals import as_rows, from_rows
from ckptkit.parallel.optimizers.compression.wire import done

_EPSILON = 1e-8  # a gradient of zeros has no direction
_LEAST_SAVING = 2  # as torch has it: less is not worth the products


class PowerSGD(Compression):
    """Sends two thin factors for each matrix, and adds what they leave to the next gradient.

    torch's hook keeps its memory by the number of the bucket, and DDP makes its buckets anew after
    the first step of every job; on gloo, its collectives may change places. So only what it is
    made of is torch's: memory is by parameter here, and goes into the checkpoint.
    """

    remembers = True

    def __init__(self, spec: str, rank: int, after: int) -> None:
        super().__init__(spec)
        self._rank = rank
        self._after = after
        self._steps = 0
        self._factors: dict[str, torch.Tensor] = {}
        self._residuals: dict[str, torch.Tensor] = {}

    def allocate(self) -> None:
        """Make the residuals, all zero, and the first factors."""
        for parameter, name in self._names.items():
            if parameter.requires_grad and self._thin(parameter):
                self._prepare(name, parameter)

    def state_dict(self) -> dict[str, Any]:
        """The step, the factors, and the residuals with a row for each rank."""
        state = super().state_dict() | {"steps": self._steps}
        if self._residuals:
            state |= {"ranks": self.wire.size, "factors": dict(self._factors)}
            state["residuals"] = as_rows(self._residuals, self.wire)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; residuals of another number of ranks are shared out."""
        super().load_state_dict(state)
        parameters = {name: parameter for parameter, name in self._names.items()}
        rows, ranks = state.get("residuals", {}), state.get("ranks", 0)
        self._residuals = from_rows(rows, self.wire, parameters.get, ranks)
        factors = state.get("factors", {})
        self._factors = {n: factors[n].to(parameters[n].device) for n in self._residuals}
        self._steps = state["steps"]

    def _send(self, bucket: GradBucket) -> Sent:
        buffer = bucket.buffer()
        if self._steps < self._after:
            buffer.copy_(self.wire.mean(buffer))
        else:
            self._compress(bucket)
        self._steps += bucket.is_last()
        return done(buffer)

    def _compress(self, bucket: GradBucket) -> None:
        thin, whole = {}, []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if self._thin(gradient):
                thin[self._name(parameter)] = gradient
            else:
                whole.append(gradient)
        if whole:
            self._mean(whole)
        if thin:
            self._approximate(thin)

    def _approximate(self, gradients: dict[str, torch.Tensor]) -> None:
        """Put what two factors say of each gradient in its place, and keep the rest."""
        for name, gradient in gradients.items():
            self._prepare(name, gradient)
        totals = {n: (self._residuals[n] + g.float()).flatten(1) for n, g in gradients.items()}
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
            for kept, new in ((self._residuals[name], left), (self._factors[name], c)):
                torch.where(sound, new, kept, out=kept)

    def _mean(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the means over all ranks in the place of the tensors, in one exchange."""
        mean = self.wire.mean(torch.cat([tensor.flatten() for tensor in tensors]))
        pieces = mean.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.view_as(tensor))

    def _prepare(self, name: str, like: torch.Tensor) -> None:
        if name in self._residuals:
            return
        self._residuals[name] = torch.zeros(like.shape, device=like.device)
        # By its name, so that it is the same on all ranks and in any bucket.
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        shape = math.prod(like.shape[1:]), self._thin(like)
        self._factors[name] = torch.randn(shape, generator=generator).to(like.device)

    def _thin(self, gradient: torch.Tensor) -> int:
        """The rank of the factors of a gradient; 0 for one that is sent as it is."""
        if gradient.dim() < 2:
            return 0
        rows, columns = gradient.shape[0], math.prod(gradient.shape[1:])
        rank = min(rows, columns, self._rank)
        pays, _, _ = _should_compress(rows, columns, rank, _LEAST_SAVING)
        return rank if pays else 0
