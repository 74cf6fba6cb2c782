"""MPI operations that end: each is started, and looked after until its deadline."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.errors import PeerError

_SPINS = 200  # short messages arrive within these; then others may have the core
_LONGEST_PAUSE = 0.001

# MPI may still write to what these use: no collective can be called off.
_abandoned: list[Any] = []


def finish(request: Any, seconds: float, what: str, *kept: Any) -> None:
    """Wait for an operation that the other ranks have to take part in."""
    deadline = time.monotonic() + seconds
    turns = 0
    while not request.Test():
        turns += 1
        if time.monotonic() > deadline:
            _abandoned.append((request, kept))
            raise PeerError(
                f"not all ranks came within {seconds:g} s",
                where=what,
                hint="look at the logs of the other ranks: one of them failed, hangs or is slow",
            )
        time.sleep(0 if turns < _SPINS else min(_LONGEST_PAUSE, 0.00001 * (turns - _SPINS)))


def done(result: list[torch.Tensor]) -> dist.Work:
    """The work of a collective that is over already."""
    return _Done(result)


class _Done(dist.Work):
    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self._found = found

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """What fails raises at once."""
        return True

    def exception(self) -> None:
        """None, for the same reason."""

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Nothing to wait for."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def result(self) -> list[torch.Tensor]:
        """The tensors that were filled."""
        return self._found

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """The same, as DDP wants it."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._found)
        return future


class Message(dist.Work):
    """The work of a message on its way, which the other side may be waiting for too."""

    def __init__(
        self, pieces: list[Any], data: torch.Tensor, seconds: float, landing: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._data = data
        self._seconds = seconds
        self._landing = landing
        self.source = -1

    def is_completed(self) -> bool:
        """Whether it has arrived."""
        return all(piece.Test() for piece in self._pieces)

    def is_success(self) -> bool:
        """Whether it has arrived whole."""
        return self.is_completed()

    def exception(self) -> None:
        """Nothing goes wrong without raising."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has arrived, or was taken."""
        given = 0.0 if timeout is None else timeout.total_seconds()
        for piece in self._pieces:
            finish(piece, given if given > 0 else self._seconds, "message", self._data)
        self._pieces = []
        if self._landing is not None:
            with torch.no_grad():  # pipelines receive into leaves that require gradients
                self._landing.copy_(
                    self._data.view(self._landing.dtype).reshape(self._landing.shape)
                )
            self._landing = None
        return True

    def synchronize(self) -> None:
        """The same."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """What has arrived."""
        self.wait()
        return [self._data]

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of what has arrived; there is no thread that could complete it later."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self.source
