"""Memory that has been moved to the host, and comes back when backward needs it."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckptkit.activation.host import HostBuffers
from ckptkit.activation.memory import metered, unmetered
from ckptkit.errors import UsageError


class Moved:
    """A copy in host memory of what a tensor views, until nobody asks for it any more."""

    def __init__(
        self,
        flat: torch.Tensor,
        buffers: HostBuffers,
        lane: Lane,
        *,
        watched: torch.Tensor | None = None,
    ) -> None:
        self._size = flat.numel()
        self._device = flat.device
        self._lane = lane
        self._spoiled = False
        self._there: torch.cuda.Event | None = None
        self._arrived: torch.Tensor | None = None
        self._arriving: torch.cuda.Event | None = None
        buffer = buffers.take(self._size)
        self._copies: list[torch.cuda.Event] = []
        weakref.finalize(self, buffers.give, buffer, self._copies).atexit = False
        self._host = buffer[: self._size]
        with unmetered(), torch.no_grad():
            lane.move(flat, self._host, self._set_off, flat if watched is None else watched)

    def _set_off(self, event: torch.cuda.Event | None) -> Callable[[], None]:
        self._there = event
        self._copies.extend([] if event is None else [event])
        this = weakref.ref(self)

        def spoil() -> None:
            if (moved := this()) is not None:
                moved._spoiled = True

        return spoil

    def prefetch(self) -> None:
        """Begin to bring it back; nothing waits."""
        if self._device.type == "cuda" and self._arrived is None:
            with metered():
                self._arrived, self._arriving = self._lane.bring(
                    self._host, self._device, self._there
                )
            # The host memory may go to another before the copy from it has ended.
            self._copies.append(self._arriving)

    def fetch(self) -> torch.Tensor:
        """Its bytes on the device."""
        if self._there is not None:
            self._there.synchronize()  # it left in forward: nothing to wait for
            self._lane.drain()
        if self._spoiled:
            raise UsageError(
                "an activation was changed in place after backward was to use it",
                hint="offload copies it while the block goes on; compute out of place there",
            )
        self.prefetch()
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            with metered():
                return self._host.to(self._device, copy=True)
        if self._arriving is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arriving)
            arrived.record_stream(torch.cuda.current_stream(self._device))
        return arrived


class Lane:
    """Copies beside the computing: on CUDA on streams of its own, elsewhere at once. Safe to use
    from several threads.
    """

    def __init__(self) -> None:
        self._out: dict[torch.device, torch.cuda.Stream] = {}
        self._back: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: deque[_Leaving] = deque()
        self._lock = threading.RLock()
        self._forward = 0

    def move(
        self,
        flat: torch.Tensor,
        host: torch.Tensor,
        set_off: Callable[[torch.cuda.Event | None], Callable[[], None]],
        watched: torch.Tensor,
    ) -> None:
        """Copy to the host; the tensor is held until that is done, and watched for changes."""
        if flat.device.type != "cuda":
            host.copy_(flat)
            set_off(None)
            return
        stream = _stream(self._out, flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            host.copy_(flat, non_blocking=True)
        event = stream.record_event()
        version = watched._version
        with self._lock:
            self._pending.append(_Leaving(watched, version, event, set_off(event), self._forward))
            self.drain()

    def bring(
        self, host: torch.Tensor, device: torch.device, there: torch.cuda.Event | None
    ) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Begin to copy to the device."""
        stream = _stream(self._back, device)
        with torch.cuda.stream(stream):
            if there is not None:
                stream.wait_event(there)
            found = host.to(device, non_blocking=True)
        return found, stream.record_event()

    def next_forward(self) -> None:
        """Wait until what the forward before the last one moved has gone; the last one's may still
        be on its way.
        """
        with self._lock:
            while self._pending and self._pending[0].forward < self._forward:
                self._pending[0].event.synchronize()
                self._let_go(self._pending.popleft())
            self._forward += 1

    def drain(self) -> None:
        """Let go of what has been copied."""
        with self._lock:
            while self._pending and self._pending[0].event.query():
                self._let_go(self._pending.popleft())

    def _let_go(self, leaving: _Leaving) -> None:
        # It was held until now: a change that the copy could have seen is known by now.
        if leaving.tensor._version != leaving.version:
            leaving.spoil()


def _stream(
    streams: dict[torch.device, torch.cuda.Stream], device: torch.device
) -> torch.cuda.Stream:
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)
    return streams[device]


@dataclass(frozen=True, slots=True, eq=False)
class _Leaving:
    """What is being copied to the host, and held until that is done."""

    tensor: torch.Tensor
    version: int
    event: torch.cuda.Event
    spoil: Callable[[], None]
    forward: int
