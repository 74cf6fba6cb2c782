"""How the ranks of a distributed store reach each other; threads of one process, for a start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ckptkit.activation.store import LayerId
from ckptkit.errors import NotFoundError, PeerError

Answer = Callable[[LayerId, float], torch.Tensor]
"""From a layer and the seconds to wait for it to its activation; raises `NotFoundError`."""


class Transport(Protocol):
    """Ranks that are numbered from 0, one of which this is.

    `fetch` is one-sided: it must work whatever the other rank is doing meanwhile, so whoever
    implements it answers from a thread of its own. `gather` and `broadcast` are called by all
    ranks. What goes wrong with another rank is a `PeerError` within the time-out, never a hang.
    """

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def serve(self, answer: Answer) -> None:
        """Begin to answer the others."""

    def fetch(self, source: int, layer_id: LayerId, *, wait: float) -> torch.Tensor:
        """What another rank answers, in memory of its own."""

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all ranks, on all ranks."""

    def broadcast(self, source: int, tensor: torch.Tensor) -> None:
        """Fill the tensors of all ranks, which are alike, with that of one."""

    def close(self) -> None:
        """Stop answering."""


class ThreadTransport:
    """The ranks are threads of one process: for tests and notebooks.

    >>> [transport.rank for transport in ThreadTransport.world(2)]
    [0, 1]
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self._rank = rank
        self._meeting = meeting

    @classmethod
    def world(cls, size: int, *, timeout: float = 30.0) -> list[ThreadTransport]:
        """One for each thread."""
        meeting = _Meeting(size, timeout)
        return [cls(rank, meeting) for rank in range(size)]

    @property
    def rank(self) -> int:
        """The number of this thread."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many threads there are."""
        return self._meeting.size

    def serve(self, answer: Answer) -> None:
        """Let the others ask this one."""
        self._meeting.open(self._rank, answer)

    def fetch(self, source: int, layer_id: LayerId, *, wait: float) -> torch.Tensor:
        """A copy of what the other thread keeps."""
        answer = self._meeting.answer_of(source)
        try:
            tensor = answer(layer_id, wait)
        except NotFoundError as error:
            raise missing(source, layer_id, error.hint) from None
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def gather(self, value: Any) -> list[Any]:
        """The values of all threads."""
        return list(self._meeting.exchange(self._rank, value))

    def broadcast(self, source: int, tensor: torch.Tensor) -> None:
        """Copy the tensor of one thread into those of the others."""
        found: torch.Tensor = self._meeting.exchange(self._rank, tensor)[source]
        if self._rank != source:
            tensor.copy_(found.detach())

    def close(self) -> None:
        """Let nobody ask any more."""
        self._meeting.open(self._rank, None)


class _Meeting:
    """Where the threads meet; who does not come in time breaks it for all."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self._timeout = timeout
        self._answers: dict[int, Answer | None] = {}
        self._opened = threading.Condition()
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout)

    def open(self, rank: int, answer: Answer | None) -> None:
        with self._opened:
            self._answers[rank] = answer
            self._opened.notify_all()

    def answer_of(self, rank: int) -> Answer:
        with self._opened:
            came = self._opened.wait_for(lambda: rank in self._answers, self._timeout)
            answer = self._answers.get(rank)
        if answer is None:
            why = "its store is closed" if came else "it did not come in time"
            raise PeerError(f"rank {rank} does not answer: {why}")
        return answer

    def exchange(self, rank: int, value: Any) -> Sequence[Any]:
        self._values[rank] = value
        try:
            self._barrier.wait()
            heard = list(self._values)
            self._barrier.wait()  # nobody may write the next value before all have read
        except threading.BrokenBarrierError:
            raise PeerError("not all ranks came in time") from None
        return heard


def missing(source: int, layer_id: LayerId, there: str) -> NotFoundError:
    """What is raised where a rank asks another one for what that does not have."""
    return NotFoundError(
        f"rank {source} keeps no activation of this layer", value=layer_id, hint=there
    )
