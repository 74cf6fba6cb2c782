"""Host memory that activations are moved to, used again and again."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import torch

from ckptkit.activation.memory import unmetered
from ckptkit.errors import UsageError

_GRAIN = 4096
_Used = tuple[torch.Tensor, Sequence[torch.cuda.Event]]


class HostBuffers:
    """Buffers by size: fresh memory is slow to touch, and pinned memory slow to make.

    Sizes are powers of two, so that activations of other lengths fit too. There is never more
    memory than was in use at one time.
    """

    def __init__(self, *, pin: bool | None = None) -> None:
        if pin and not torch.cuda.is_available():
            raise UsageError(
                "there is no CUDA here to pin host memory for", value="pin_memory=True"
            )
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._free: defaultdict[int, list[_Used]] = defaultdict(list)
        self._lock = threading.RLock()
        self.in_use = 0
        self.unused = 0
        self._most = 0

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least so many bytes."""
        size = max(_GRAIN, 1 << (size - 1).bit_length())
        with self._lock:
            used = self._found(size)
            self.in_use += size if used is None else used[0].numel()
            self._most = max(self._most, self.in_use)
            self._trim()
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
            self.unused += buffer.numel()
            self._free[buffer.numel()].append((buffer, events))

    def release(self) -> None:
        """Free the buffers that are not in use."""
        with self._lock:
            self._free.clear()
            self.unused = 0

    def _found(self, size: int) -> _Used | None:
        for each in (size, 2 * size):
            if self._free[each]:
                self.unused -= each
                return self._free[each].pop()
        return None

    def _trim(self) -> None:
        while self.in_use + self.unused > self._most:
            largest = max(size for size, free in self._free.items() if free)
            del self._free[largest][0]
            self.unused -= largest
