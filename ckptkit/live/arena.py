"""Host memory that a save copies tensors of devices into: made once, used by every save."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from ckptkit.live.state.parts import LiveTensor
from ckptkit.storage import AlignedBuffer, BufferPool

_ALIGNMENT = 64


class Arena:
    """Memory of the size of this rank's state: pinned where a device copies into it, a pool of one
    buffer where the writer itself copies from host memory.
    """

    def __init__(self) -> None:
        self.pool = _PoolOfOne()
        self._memory: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """How much memory it has."""
        return 0 if self._memory is None else self._memory.nbytes

    def hold(self, tensors: Sequence[LiveTensor]) -> list[LiveTensor]:
        """The same tensors in the arena; complete, and independent of the originals, on return."""
        starts, size = [], 0
        for held in tensors:
            starts.append(size)
            size += -(-held.local.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = {held.local.device for held in tensors if held.local.device.type != "cpu"}
        memory = self._of_size(size, pinned=any(device.type == "cuda" for device in devices))
        copies = []
        for held, start in zip(tensors, starts, strict=True):
            local = held.local
            flat = memory[start : start + local.nbytes].view(local.dtype)
            copy = flat.view(local.shape)
            copy.copy_(local, non_blocking=True)
            copies.append(replace(held, local=copy))
        for device in devices:
            torch.get_device_module(device).synchronize(device)
        return copies

    def close(self) -> None:
        """Free the memory."""
        self._memory = None
        self.pool.clear()

    def _of_size(self, size: int, *, pinned: bool) -> torch.Tensor:
        memory = self._memory
        if memory is None or memory.nbytes < size or memory.is_pinned() < pinned:
            memory = self._memory = None  # freed first: two would be twice the promised memory
            memory = self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return memory


class _PoolOfOne(BufferPool):
    """Keeps the last buffer, whatever its size, and never two: states grow by optimizer state."""

    def __init__(self) -> None:
        super().__init__(limit=sys.maxsize)

    def take(self, size: int, *, congruent_to: int = 0) -> AlignedBuffer:
        """The kept buffer if it has the right size; otherwise it is freed first."""
        if not self.has(size, congruent_to=congruent_to):
            self.clear()
        return super().take(size, congruent_to=congruent_to)
