"""Buffers that a forward changes, such as running means, are not changed again by recomputing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class BufferGuard:
    """Of one forward and its recomputation: the latter leaves buffers as it finds them."""

    def __init__(self, block: nn.Module) -> None:
        self._buffers = list(block.buffers())
        # Their kernels change running means without saying so in the version of the tensor.
        norms = [each for each in block.modules() if isinstance(each, _NormBase) and each.training]
        self._silent = [buffer for norm in norms for buffer in norm.buffers()]
        self._changed: list[torch.Tensor] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What the forward and what its recomputation run in."""
        return self._watched(), self._restored()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        before = [buffer._version for buffer in self._buffers]
        yield
        # Only those are copied later: tables of positions are large, and do not change.
        self._changed = self._silent + [
            buffer
            for buffer, version in zip(self._buffers, before, strict=True)
            if buffer._version != version and not any(buffer is each for each in self._silent)
        ]

    @contextmanager
    def _restored(self) -> Iterator[None]:
        with restored(self._changed):
            yield


@contextmanager
def restored(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Afterwards the tensors hold what they hold now."""
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, copy in zip(tensors, copies, strict=True):
            # Not counted as a change: autograd may have saved the buffer itself.
            tensor.data.copy_(copy)
