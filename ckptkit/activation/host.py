"""Host memory that activations are moved to, used again and again."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from ckptkit.activation.meter import unmetered

_GRAIN = 4096
_Used = tuple[torch.Tensor, Sequence[torch.cuda.Event]]


class HostBuffers:
    """Buffers by size: fresh memory is slow to touch, and pinned memory slow to make."""

    def __init__(self, *, pin: bool | None = None) -> None:
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._free: defaultdict[int, list[_Used]] = defaultdict(list)
        self._lock = threading.RLock()
        self.in_use = 0
        self.peak = 0

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least so many bytes."""
        size = -(-max(size, 1) // _GRAIN) * _GRAIN
        with self._lock:
            self.in_use += size
            self.peak = max(self.peak, self.in_use)
            used = self._free[size].pop() if self._free[size] else None
        if used is not None:
            buffer, events = used
            for event in events:
                event.synchronize()
            return buffer
        with unmetered(), torch.no_grad():
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def give(self, buffer: torch.Tensor, events: Sequence[torch.cuda.Event] = ()) -> None:
        """Take a buffer back that nobody reads or writes once the events have come."""
        with self._lock:
            self.in_use -= buffer.numel()
            self._free[buffer.numel()].append((buffer, events))

    def release(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._free.clear()
