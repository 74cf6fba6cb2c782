"""The activations that the ranks of a group keep, each of which any rank may ask for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from ckptkit.activation.sockets import SocketTransport
from ckptkit.activation.stats import GroupMemoryStats, MemoryStats
from ckptkit.activation.store import ActivationStore, LayerId, check_layer
from ckptkit.activation.transport import ThreadTransport, Transport
from ckptkit.activation.wire import described, empty_like
from ckptkit.errors import NotFoundError, PeerError, UnsupportedTypeError, UsageError

_SHOWN = 8
_PAUSE = 0.01  # seconds, before all ranks are asked again


class DistributedActivationStore:
    """A store on each rank of a process group (None: all ranks), made by all of them together.

    `register`, `retrieve` and `retrieve_or_fetch` are each rank's own affair: a fetch is answered
    by a thread of the other rank while that computes. `register_broadcast`, `synchronize`,
    `clear_everywhere` and `memory_stats` are called by all ranks. None waits longer than `timeout`
    seconds for another rank. What is registered is dense, and must not be changed in place
    afterwards. One process needs no process group.

    >>> with DistributedActivationStore() as store:  # of one process, or of all ranks of a job
    ...     store.register("layers.0", torch.ones(2))
    ...     print(store.fetch("layers.0", source_rank=0), store.synchronize())
    tensor([1., 1.]) {}
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        transport: Transport | None = None,
        timeout: float = 30.0,
        store: ActivationStore | None = None,
    ) -> None:
        self._store = ActivationStore() if store is None else store
        self._is_closed = False
        self._transport = _transport(group, timeout) if transport is None else transport
        self._transport.serve(self._answer)

    @property
    def local(self) -> ActivationStore:
        """What this rank keeps; what is registered there can be fetched as well."""
        return self._store

    @property
    def rank(self) -> int:
        """The number of this rank in the group."""
        return self._transport.rank

    @property
    def world_size(self) -> int:
        """The ranks of the group."""
        return self._transport.world_size

    def register(self, layer_id: LayerId, tensor: torch.Tensor) -> None:
        """Keep an activation here, where other ranks may fetch it."""
        if isinstance(tensor, torch.Tensor):  # the store refuses what is none
            described(tensor, where=str(layer_id))
        self._check_open(layer_id)
        self._store.register(layer_id, tensor)

    def register_broadcast(
        self, layer_id: LayerId, tensor: torch.Tensor | None = None, *, source_rank: int = 0
    ) -> torch.Tensor:
        """Keep the activation of one rank on all; the others need not have anything."""
        self._check(source_rank)
        mine = tensor if self.rank == source_rank else None
        what = layer_id, source_rank
        heard = self._together("register_broadcast", (what, _description(mine)))
        others = {rank: said[0] for rank, said in enumerate(heard) if said[0] != what}
        if others:
            raise PeerError(f"the ranks broadcast different layers: this one {what}", value=others)
        said = heard[source_rank][1]
        if said is None:
            raise UsageError(
                f"rank {source_rank} is the source, but has passed no dense tensor", value=layer_id
            )
        found = empty_like(said, device=said["device"]) if mine is None else mine
        self._transport.broadcast(source_rank, found)
        self.register(layer_id, found.requires_grad_(said["requires_grad"]))
        return found

    def retrieve(self, layer_id: LayerId) -> torch.Tensor:
        """An activation that this rank keeps."""
        return self._store.retrieve(layer_id)

    def retrieve_or_recompute(
        self, layer_id: LayerId, fn: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """An activation that this rank keeps, or what `fn` makes."""
        self._check_open(layer_id)
        return self._store.retrieve_or_recompute(layer_id, fn)

    def retrieve_or_fetch(
        self, layer_id: LayerId, source_rank: int | None = None, *, wait: float = 0.0
    ) -> torch.Tensor:
        """An activation that this rank keeps, or else a copy of another rank's (None: of whichever
        keeps it).

        The other rank may have `wait` seconds to register it. What was fetched is not kept here.
        """
        if source_rank is not None:
            self._check(source_rank)
        _check_wait(wait)
        with suppress(NotFoundError):
            return self._store.retrieve(layer_id)
        return self.fetch(layer_id, source_rank, wait=wait)

    def fetch(
        self, layer_id: LayerId, source_rank: int | None = None, *, wait: float = 0.0
    ) -> torch.Tensor:
        """What another rank keeps under a name, whatever this one has under it; with None the
        ranks are asked one after another, this one last.
        """
        check_layer(layer_id)
        _check_wait(wait)
        if source_rank is None:
            return self._fetched_from_any(layer_id, wait)
        self._check(source_rank)
        if source_rank == self.rank:
            return self._answer(layer_id, wait)
        return self._transport.fetch(source_rank, layer_id, wait=wait)

    def has(self, layer_id: LayerId) -> bool:
        """Whether this rank keeps it."""
        return self._store.has(layer_id)

    def keys(self) -> list[LayerId]:
        """What this rank keeps, the oldest first."""
        return self._store.keys()

    def clear(self, layer_id: LayerId | None = None) -> None:
        """Forget one activation, or all, on this rank."""
        self._store.clear(layer_id)

    def synchronize(self) -> dict[int, set[LayerId]]:
        """Wait for all ranks; by rank, the layers that it lacks and another one keeps. It is empty
        where all keep the same.
        """
        heard = [set(keys) for keys in self._together("synchronize", self._store.keys())]
        every = set().union(*heard)
        return {rank: every - keys for rank, keys in enumerate(heard) if keys != every}

    def clear_everywhere(self) -> None:
        """Forget everything on all ranks; when it returns, none keeps anything."""
        self._together("clear_everywhere", None)  # whoever still fetches has not come here yet
        self._store.clear()
        self._together("clear_everywhere", None)

    def local_memory_stats(self) -> MemoryStats:
        """Of this rank."""
        return self._store.memory_stats()

    def memory_stats(self) -> GroupMemoryStats:
        """Of all ranks; rank 0 has the time."""
        said = self._together("memory_stats", (self._store.memory_stats(), time.time()))
        return GroupMemoryStats(tuple(stats for stats, _ in said), said[0][1])

    def close(self) -> None:
        """Forget everything here and stop answering; ranks that ask later get an error."""
        if not self._is_closed:
            self._is_closed = True
            self._store.wake()
            self._transport.close()
            self._store.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.clear_everywhere()
        finally:
            self.close()

    def _fetched_from_any(self, layer_id: LayerId, wait: float) -> torch.Tensor:
        deadline = time.monotonic() + wait
        while True:
            for step in range(1, self.world_size + 1):
                with suppress(NotFoundError):
                    return self.fetch(layer_id, (self.rank + step) % self.world_size)
            if time.monotonic() >= deadline:
                raise NotFoundError("no rank keeps an activation of this layer", value=layer_id)
            time.sleep(_PAUSE)

    def _answer(self, layer_id: LayerId, wait: float) -> torch.Tensor:
        self._store.wait_for(layer_id, wait, until=lambda: self._is_closed)
        try:
            return self._store.retrieve(layer_id)
        except NotFoundError:
            raise NotFoundError(
                f"rank {self.rank} keeps no activation of this layer",
                value=layer_id,
                hint=f"it keeps {_listed(set(self._store.keys()))}",
            ) from None

    def _check_open(self, layer_id: LayerId) -> None:
        if self._is_closed:
            raise UsageError(
                "this store is closed: no rank could fetch what it keeps",
                value=layer_id,
                hint="make another one, on all ranks",
            )

    def _together(self, call: str, value: Any) -> list[Any]:
        """What all ranks say, each of which has to be in the same call."""
        heard = self._transport.gather((call, value))
        calls = {rank: said[0] for rank, said in enumerate(heard) if said[0] != call}
        if calls:
            raise PeerError(f"the ranks are in different calls: this one in {call}", value=calls)
        return [said for _, said in heard]

    def _check(self, rank: object) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise UsageError(
                "no rank of the group", value=rank, hint=f"they are 0 to {self.world_size - 1}"
            )


def _check_wait(wait: object) -> None:
    if type(wait) not in (int, float) or not 0 <= wait < math.inf:  # type: ignore[operator]
        raise UsageError("not so many seconds to wait", value=wait, hint="pass 0 or more")


def _transport(group: dist.ProcessGroup | None, timeout: float) -> Transport:
    if group is None and (not dist.is_initialized() or dist.get_world_size() == 1):
        return ThreadTransport.world(1, timeout=timeout)[0]
    return SocketTransport(group, timeout=timeout)


def _description(tensor: torch.Tensor | None) -> dict[str, Any] | None:
    """None also for what cannot be sent: all ranks are to hear of that."""
    with suppress(UnsupportedTypeError):
        return described(tensor) if isinstance(tensor, torch.Tensor) else None
    return None


def _listed(keys: set[LayerId]) -> str:
    names = sorted(map(str, keys))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN]) or 'nothing'}{more}"
