"""How the ranks of a distributed store reach each other: one fetches what another keeps, and all
meet. Threads of one process do so in memory. Processes fetch over TCP, each answering from threads
of its own.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ckptkit.activation.memory import LayerId, is_plain
from ckptkit.checkpoint.ranks import OneRank, Ranks, ThreadBarrier
from ckptkit.errors import NotFoundError, PeerError, UnsupportedTypeError
from ckptkit.live.state.ranks import World, current_world, ranks_of
from ckptkit.live.state.sockets import (
    Listener,
    connect,
    hear,
    message,
    own_address,
    seconds_until,
    tell,
)
from ckptkit.live.state.tensors import TensorForm, bytes_of

_TOKEN = 32
_MOST_IDLE = 4  # connections to a rank that wait for the next fetch

Answer = Callable[[LayerId, float], torch.Tensor]
"""From a layer and the seconds to wait for it to its activation; raises `NotFoundError`."""


class Transport(Protocol):
    """Ranks that are numbered from 0, one of which this is.

    `fetch` is one-sided: it must work whatever the other rank is doing meanwhile, so whoever
    implements it answers from a thread of its own. `gather` and `broadcast` are called by all
    ranks. What goes wrong with another rank is a `PeerError` within the time-out, never a hang.
    """

    rank: int
    world_size: int

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

    def __init__(self, ranks: Ranks, room: _ThreadRoom) -> None:
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self._ranks = ranks
        self._room = room

    @classmethod
    def world(cls, size: int, *, timeout: float = 30.0) -> list[ThreadTransport]:
        room = _ThreadRoom(timeout)
        ranks = ThreadBarrier.group(size, timeout) if size > 1 else [OneRank()]
        return [cls(each, room) for each in ranks]

    def serve(self, answer: Answer | None) -> None:  # None: no longer
        with self._room.opened:
            self._room.answers[self.rank] = answer
            self._room.opened.notify_all()

    def fetch(self, source: int, layer_id: LayerId, *, wait: float) -> torch.Tensor:
        room = self._room
        with room.opened:
            came = room.opened.wait_for(lambda: source in room.answers, room.timeout)
            answer = room.answers.get(source)
        if answer is None:
            why = "its store is closed" if came else "it did not come in time"
            raise PeerError(f"rank {source} does not answer: {why}")
        tensor = answer(layer_id, wait)
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def gather(self, value: Any) -> list[Any]:
        heard: list[Any] = self._ranks.agree(value, list)
        return heard

    def broadcast(self, source: int, tensor: torch.Tensor) -> None:
        if self.rank == source:
            self._room.tensor = tensor.detach()
        self._ranks.wait()
        if self.rank != source:
            tensor.copy_(self._room.tensor)
        self._ranks.wait()

    def close(self) -> None:
        self.serve(None)


@dataclass
class _ThreadRoom:
    """What the threads of one world share."""

    timeout: float
    answers: dict[int, Answer | None] = field(default_factory=dict)
    opened: threading.Condition = field(default_factory=threading.Condition)
    tensor: torch.Tensor = field(default_factory=partial(torch.empty, 0))
    """What one rank broadcasts, while all of them are in that call."""


def meeting_of(group: dist.ProcessGroup) -> tuple[World, str]:
    """The ranks of a process group, and a name for them to meet under: another one for each call,
    which all of them make.
    """
    rank, store = group.rank(), current_world().rendezvous
    if store is None:
        return World(), ""
    # Groups apart may have one name, but never the same first rank.
    first = dist.get_process_group_ranks(group)[0]
    name = f"activations/{group.group_name}/{first}"
    turn = store.add(f"ckptkit/{name}/turns of rank {rank}", 1)
    return World(rank, group.size(), store), f"{name}/{turn}"


class SocketTransport:
    """The ranks of a process group, which meet over the job's store and fetch over TCP."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 30.0) -> None:
        found = dist.group.WORLD if group is None else group
        assert found is not None  # noqa: S101 — the caller has looked
        self.rank: int = found.rank()
        self.world_size: int = found.size()
        self._group = found
        self._timeout = timeout
        self._world, self._name = meeting_of(found)
        self._numbers = count()
        self._met: Ranks = OneRank()
        self._token = b""
        self._listener: Listener | None = None
        self._addresses: list[tuple[str, int]] = []
        self._idle: list[list[socket.socket]] = [[] for _ in range(self.world_size)]
        self._lock = threading.Lock()

    def serve(self, answer: Answer) -> None:
        # Two rounds: where to listen depends on whether all are on one machine, and who fetches
        # shows rank 0's token.
        heard = self.gather((socket.gethostname(), secrets.token_hex(_TOKEN // 2)))
        self._token = heard[0][1].encode()
        host = own_address(name for name, _ in heard)
        self._listener = Listener(host, self._token, partial(self._serve, answer))
        self._addresses = self.gather((host, self._listener.port))

    def fetch(self, source: int, layer_id: LayerId, *, wait: float) -> torch.Tensor:
        seconds, where = self._timeout + wait, f"activation {layer_id!r}"
        deadline = time.monotonic() + seconds
        try:
            with self._connection(source, deadline) as sock:
                tell(sock, [layer_id, wait])
                what, *said = hear(sock, sys.maxsize, deadline)
        except TimeoutError:
            raise PeerError(
                f"rank {source} did not answer within {seconds:g} s",
                where=where,
                hint="it hangs, or its machine cannot be reached; timeout= says how long to wait",
            ) from None
        except (OSError, EOFError) as error:
            raise PeerError(
                f"rank {source} has gone: its process died, or its store is closed", where=where
            ) from error
        if what == "failed":
            raise PeerError(f"rank {source}: {said[0]}", where=where)
        if what == "missing":
            raise NotFoundError(
                f"rank {source} keeps no activation of this layer", value=layer_id, hint=said[0]
            )
        tensor: torch.Tensor = said[0]
        tensor = tensor.to("cuda") if said[1] == "cuda" else tensor
        return tensor.requires_grad_(said[2])

    def gather(self, value: Any) -> list[Any]:
        name = f"{self._name}/{next(self._numbers)}"
        ranks = ranks_of(self._world, name, self._timeout, "the ranks do not go on")
        with self._in_time():
            heard: list[Any] = ranks.agree(value, list)
        # All are here: nobody reads any more what was said before.
        before, self._met = self._met, ranks
        if self.rank == 0:
            before.forget()
        return heard

    def broadcast(self, source: int, tensor: torch.Tensor) -> None:
        """A collective of the group, as bytes, which all backends take; all ranks have just met."""
        flat, devices = bytes_of(tensor), self._group._device_types
        if not flat.numel():
            return
        is_taken = flat.device.type in [device.type for device in devices]
        sent = flat if is_taken else flat.to(devices[0])
        with self._in_time():
            work = dist.broadcast(sent, group=self._group, group_src=source, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=self._timeout))
        if not is_taken:
            flat.copy_(sent)

    def close(self) -> None:
        """Stop answering, and leave the others: connections in use are closed at their end."""
        with self._lock:
            idle, self._idle = self._idle, []
        for sock in [each for socks in idle for each in socks]:
            sock.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None  # it knows the store, which knows this

    @contextmanager
    def _connection(self, source: int, deadline: float) -> Iterator[socket.socket]:
        """One of as many to a rank as threads ask it at once."""
        with self._lock:
            sock = self._idle[source].pop() if self._idle and self._idle[source] else None
        if sock is None:
            sock = connect(*self._addresses[source], self._token, seconds_until(deadline))
        try:
            sock.settimeout(seconds_until(deadline))
            yield sock
        except BaseException:
            sock.close()  # what comes on it yet answers nobody
            raise
        with self._lock:
            if self._idle and len(self._idle[source]) < _MOST_IDLE:
                self._idle[source].append(sock)
            else:
                sock.close()

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # PeerError is one
            what = error.what if isinstance(error, PeerError) else f"another rank is lost: {error}"
            raise PeerError(
                what, hint="the ranks cannot meet again in this store: close it, and make another"
            ) from error

    def _serve(self, answer: Answer, sock: socket.socket) -> None:
        """Answer what one thread of another rank asks, until that closes its connection."""
        while True:
            asked = hear(sock, 0)
            # A call of its own, so that while the next question is waited for nothing holds the
            # tensor that this one is answered with.
            self._reply(sock, answer, asked)

    def _reply(self, sock: socket.socket, answer: Answer, asked: Any) -> None:
        try:
            layer_id, wait = asked
            tensor = answer(layer_id, wait)
            _, device, requires_grad = described(tensor)
            parts = message(("kept", tensor, device, requires_grad))
        except NotFoundError as error:
            parts = message(("missing", error.hint))
        except Exception as error:  # noqa: BLE001 — told to the rank that asked
            parts = message(("failed", f"{type(error).__name__}: {error}"))
        for part in parts:
            sock.sendall(part)


def described(tensor: torch.Tensor, *, where: str = "") -> tuple[TensorForm, str, bool]:
    """The form of a tensor, its device and whether it requires a gradient; only plain memory can be
    sent.
    """
    if not is_plain(tensor):
        raise UnsupportedTypeError(
            "only dense tensors can be sent to other ranks",
            where=where,
            value=f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}",
            hint="keep the local part of a DTensor, and the dense form of a sparse one",
        )
    return TensorForm.of(tensor), tensor.device.type, tensor.requires_grad
