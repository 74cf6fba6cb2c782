"""Stores that keep activations by layer: `ActivationStore` those of one rank alone, and
`DistributedActivationStore` those that the other ranks of a group may fetch.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ckptkit.activation.memory import (
    LayerId,
    MemoryStats,
    is_plain,
    plain_layer,
    storages_of,
)
from ckptkit.activation.offload import HostMemory, Moved
from ckptkit.activation.transport import (
    SocketTransport,
    ThreadTransport,
    Transport,
    described,
)
from ckptkit.errors import NotFoundError, PeerError, UnsupportedTypeError, UsageError
from ckptkit.live.state.tensors import TensorForm, bytes_of
from ckptkit.model.document import parse_size
from ckptkit.storage.base.store import Closing

_SHOWN = 8
_PAUSE = 0.01  # seconds, before all ranks are asked again
# The key and the bytes of each memory that a tensor lies in.
_Memories = tuple[tuple[int, int], ...]


class ActivationStore(Closing):
    """Keeps activations until they are asked for, or says how to make them again.

    What is kept is detached: it holds no graph. `offload` moves it to host memory; with a
    `budget`, the oldest are dropped when there are more bytes than that, and recomputed when they
    are retrieved. Leaving a `with` block, also by an exception, clears it. Safe to use from
    several threads.

    >>> with ActivationStore(budget="1MiB") as store:
    ...     store.register("layers.0", torch.ones(2))
    ...     made = store.retrieve_or_recompute("layers.1", lambda: torch.zeros(2))
    ...     print(store.retrieve("layers.0"), store.memory_stats())
    tensor([1., 1.]) 2 activations, 16 B (peak 16 B)
    """

    def __init__(
        self,
        *,
        offload: bool = False,
        budget: int | str | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        self._budget = None if budget is None else parse_size(budget)
        self._host = HostMemory(pin=pin_memory) if offload else None
        self._numbers = count()
        self._kept: dict[LayerId, _Activation] = {}
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._current = self._peak = self._evicted = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def register(self, layer_id: LayerId, tensor: torch.Tensor) -> None:
        """Keep the activation of a layer, in the place of one that it may have had."""
        layer = plain_layer(layer_id)
        _check_tensor(layer, tensor)
        with self._lock:
            memories = self._memories(tensor)
            self._drop(layer)
            # Larger than the budget alone: there is nothing to gain by dropping others for it.
            if self._budget is not None and sum(size for _, size in memories) > self._budget:
                self._evicted += 1
                return
            # Backward asks for the newest first: the oldest are recomputed last, if at all.
            while not self._has_room(memories):
                self._drop(next(iter(self._kept)))
                self._evicted += 1
            self._add(layer, tensor, memories)

    def retrieve(self, layer_id: LayerId) -> torch.Tensor:
        layer = plain_layer(layer_id)
        with self._lock:
            kept = self._kept.get(layer)
            if kept is None:
                names = sorted(map(str, self._kept))
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                raise NotFoundError(
                    "no activation of this layer is kept",
                    value=layer,
                    hint=f"it keeps {', '.join(names[:_SHOWN]) or 'nothing'}{more}",
                )
            if isinstance(kept.held, torch.Tensor):
                # Who asks may be on another stream, which knows nothing of the one that computed.
                # And when this store drops it, its memory is not yet free for the one that made it.
                if kept.ready is not None:
                    stream = torch.cuda.current_stream(kept.held.device)
                    stream.wait_event(kept.ready)
                    if type(kept.held) is torch.Tensor:
                        kept.held.record_stream(stream)
                return kept.held
            tensor = kept.held.fetch().view(kept.dtype).view(kept.shape)
            return tensor.requires_grad_(kept.requires_grad)

    def retrieve_or_recompute(
        self, layer_id: LayerId, fn: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The activation of a layer, from `fn` where it is not kept; kept then if there is room."""
        layer = plain_layer(layer_id)
        with self._lock:
            if layer in self._kept:
                return self.retrieve(layer)
        # Without the lock, as this takes its time: other threads go on meanwhile.
        made = fn()
        _check_tensor(layer, made)
        with self._lock:
            memories = self._memories(made)
            if layer not in self._kept and self._has_room(memories):
                self._add(layer, made, memories)
        return made

    def has(self, layer_id: LayerId) -> bool:
        with self._lock:
            return layer_id in self._kept

    def wait_for(
        self, layer_id: LayerId, seconds: float, *, until: Callable[[], bool] = lambda: False
    ) -> None:
        """Return when the layer is kept, `until` holds after a `wake`, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: layer_id in self._kept or until(), timeout=seconds)

    def wake(self) -> None:
        """Let those that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def keys(self) -> list[LayerId]:
        """The layers whose activations are kept, the oldest first."""
        with self._lock:
            return list(self._kept)

    def prefetch(self, layer_id: LayerId) -> None:
        """Begin to bring back what has been moved; does nothing for what is not there."""
        with self._lock:
            kept = self._kept.get(layer_id)
            if kept is not None and isinstance(kept.held, Moved):
                kept.held.prefetch()

    def clear(self, layer_id: LayerId | None = None) -> None:
        with self._lock:
            for each in [layer_id] if layer_id is not None else list(self._kept):
                self._drop(each)

    def memory_stats(self) -> MemoryStats:
        """What is kept now, and was at most."""
        with self._lock:
            moved = [kept for kept in self._kept.values() if isinstance(kept.held, Moved)]
            on_host = sum(size for kept in moved for _, size in kept.memories)
            return MemoryStats(
                current=self._current,
                peak=self._peak,
                count=len(self._kept),
                on_host=on_host,
                evicted=self._evicted,
            )

    def close(self) -> None:
        """Forget everything, and free the host memory that activations were moved to."""
        self.clear()
        if self._host is not None:
            self._host.release()

    def __len__(self) -> int:
        return len(self.keys())

    __contains__ = has

    def _memories(self, tensor: torch.Tensor) -> _Memories:
        """Where a tensor is going to lie: what is moved gets memory of its own."""
        if self._host is None:
            return tuple((each._cdata, each.nbytes()) for each in storages_of(tensor))
        if not is_plain(tensor):
            raise UsageError(
                "only plain tensors are moved to the host",
                value=f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}",
            )
        return ((next(self._numbers), tensor.numel() * tensor.itemsize),)

    def _has_room(self, memories: _Memories) -> bool:
        added = sum(size for key, size in memories if key not in self._sizes)
        return self._budget is None or self._current + added <= self._budget

    def _add(self, layer: LayerId, tensor: torch.Tensor, memories: _Memories) -> None:
        held: torch.Tensor | Moved
        ready = None
        if self._host is not None:
            held = Moved(bytes_of(tensor), self._host)  # it waits for its own copy
        else:
            held = tensor.detach().requires_grad_(tensor.requires_grad)
            if held.device.type == "cuda":
                ready = torch.cuda.current_stream(held.device).record_event()
        form = tensor.shape, tensor.dtype, tensor.requires_grad
        self._keep(layer, _Activation(held, memories, *form, ready))

    def register_moved(self, layer: LayerId, moved: Moved, size: int) -> None:
        """Keep, and count, what has been moved to this store's host memory already."""
        memories = ((next(self._numbers), size),)
        with self._lock:
            self._drop(layer)
            self._keep(layer, _Activation(moved, memories, torch.Size([size]), torch.uint8))

    def _keep(self, layer: LayerId, kept: _Activation) -> None:
        self._kept[layer] = kept
        # Tensors that share memory count it once, until the last of them goes.
        for key, size in kept.memories:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._sizes[key] = size
                self._current += size
        self._peak = max(self._peak, self._current)
        self._changed.notify_all()

    def _drop(self, layer: LayerId) -> None:
        kept = self._kept.pop(layer, None)
        for key, _ in () if kept is None else kept.memories:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._current -= self._sizes.pop(key)


@dataclass(frozen=True, slots=True)
class _Activation:
    """One activation, on its device or in host memory."""

    held: torch.Tensor | Moved
    memories: _Memories
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool = False
    ready: torch.cuda.Event | None = None
    """When what makes it has ended; nobody on another stream may read it before."""


def _check_tensor(layer: LayerId, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTypeError(
            "an activation is a tensor", where=str(layer), value=type(tensor).__name__
        )


class DistributedActivationStore(Closing):
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
        self.local = ActivationStore() if store is None else store
        """What this rank keeps; what is registered there can be fetched as well."""
        self._is_closed = False
        is_alone = group is None and (not dist.is_initialized() or dist.get_world_size() == 1)
        if transport is None and is_alone:
            transport = ThreadTransport.world(1, timeout=timeout)[0]
        self._transport = transport or SocketTransport(group, timeout=timeout)
        self.rank = self._transport.rank
        self.world_size = self._transport.world_size
        self._transport.serve(self._answer)

    def register(self, layer_id: LayerId, tensor: torch.Tensor) -> None:
        """Keep an activation here, where other ranks may fetch it."""
        if isinstance(tensor, torch.Tensor):  # the store refuses what is none
            described(tensor, where=str(layer_id))
        self._check_open(layer_id)
        self.local.register(layer_id, tensor)

    def register_broadcast(
        self, layer_id: LayerId, tensor: torch.Tensor | None = None, *, source_rank: int = 0
    ) -> torch.Tensor:
        """Keep the activation of one rank on all; the others need not have anything."""
        self._check(source_rank)
        mine = tensor if self.rank == source_rank else None
        what = plain_layer(layer_id), source_rank
        # None also for what cannot be sent: all ranks are to hear of that.
        description = None
        if isinstance(mine, torch.Tensor) and is_plain(mine):
            form, *rest = described(mine)
            description = (astuple(form), *rest)
        heard = self._together("register_broadcast", (what, description))
        others = {rank: said[0] for rank, said in enumerate(heard) if said[0] != what}
        if others:
            raise PeerError(f"the ranks broadcast different layers: this one {what}", value=others)
        said = heard[source_rank][1]
        if said is None:
            raise UsageError(
                f"rank {source_rank} is the source, but has passed no dense tensor", value=layer_id
            )
        told, device, requires_grad = said
        form = TensorForm.heard(told)
        found = mine
        if found is None:
            found = torch.empty(form.shape, dtype=form.torch_dtype, device=device)
        self._transport.broadcast(source_rank, found)
        self.register(layer_id, found.requires_grad_(requires_grad))
        return found

    def retrieve(self, layer_id: LayerId) -> torch.Tensor:
        """An activation that this rank keeps."""
        return self.local.retrieve(layer_id)

    def retrieve_or_recompute(
        self, layer_id: LayerId, fn: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """An activation that this rank keeps, or what `fn` makes."""
        self._check_open(layer_id)
        return self.local.retrieve_or_recompute(layer_id, fn)

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
            return self.local.retrieve(layer_id)
        return self.fetch(layer_id, source_rank, wait=wait)

    def fetch(
        self, layer_id: LayerId, source_rank: int | None = None, *, wait: float = 0.0
    ) -> torch.Tensor:
        """What another rank keeps under a name, whatever this one has under it; with None the
        ranks are asked one after another, this one last.
        """
        layer = plain_layer(layer_id)
        _check_wait(wait)
        if source_rank is not None:
            self._check(source_rank)
            if source_rank == self.rank:
                return self._answer(layer, wait)
            return self._transport.fetch(source_rank, layer, wait=wait)
        deadline = time.monotonic() + wait
        while True:
            for step in range(1, self.world_size + 1):
                with suppress(NotFoundError):
                    return self.fetch(layer, (self.rank + step) % self.world_size)
            if time.monotonic() >= deadline:
                raise NotFoundError("no rank keeps an activation of this layer", value=layer)
            time.sleep(_PAUSE)

    def has(self, layer_id: LayerId) -> bool:
        return self.local.has(layer_id)

    def keys(self) -> list[LayerId]:
        return self.local.keys()

    def clear(self, layer_id: LayerId | None = None) -> None:
        self.local.clear(layer_id)

    def synchronize(self) -> dict[int, set[LayerId]]:
        """Wait for all ranks; by rank, the layers that it lacks and another one keeps. It is empty
        where all keep the same.
        """
        heard = [set(keys) for keys in self._together("synchronize", self.local.keys())]
        every = set().union(*heard)
        return {rank: every - keys for rank, keys in enumerate(heard) if keys != every}

    def clear_everywhere(self) -> None:
        """Forget everything on all ranks; when it returns, none keeps anything."""
        self._together("clear_everywhere", None)  # whoever still fetches has not come here yet
        self.local.clear()
        self._together("clear_everywhere", None)  # none fetches what another has yet to clear

    def memory_stats(self) -> list[MemoryStats]:
        """What each rank has, in their order."""
        heard = self._together("memory_stats", asdict(self.local.memory_stats()))
        return [MemoryStats(**said) for said in heard]

    def close(self) -> None:
        """Forget everything here and stop answering; ranks that ask later get an error."""
        if not self._is_closed:
            self._is_closed = True
            self.local.wake()
            self._transport.close()
            self.local.clear()

    def __exit__(self, *raised: object) -> None:
        try:
            if raised[0] is None:
                self.clear_everywhere()
        finally:
            self.close()

    def _answer(self, layer: LayerId, wait: float) -> torch.Tensor:
        """What this rank keeps, for itself or for another; called on threads of the transport."""
        self.local.wait_for(layer, wait, until=lambda: self._is_closed)
        try:
            return self.local.retrieve(layer)
        except NotFoundError as error:
            error.what = f"rank {self.rank} keeps no activation of this layer"
            raise

    def _together(self, call: str, value: Any) -> list[Any]:
        """What all ranks say, each of which has to be in the same call."""
        heard = self._transport.gather((call, value))
        calls = {rank: said[0] for rank, said in enumerate(heard) if said[0] != call}
        if calls:
            raise PeerError(f"the ranks are in different calls: this one in {call}", value=calls)
        return [said for _, said in heard]

    def _check_open(self, layer_id: LayerId) -> None:
        if self._is_closed:
            raise UsageError(
                "this store is closed: no rank could fetch what it keeps",
                value=layer_id,
                hint="make another one, on all ranks",
            )

    def _check(self, rank: object) -> None:
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise UsageError(
                "no rank of the group", value=rank, hint=f"they are 0 to {self.world_size - 1}"
            )


def _check_wait(wait: object) -> None:
    if type(wait) not in (int, float) or not 0 <= wait < math.inf:  # type: ignore[operator]
        raise UsageError("not so many seconds to wait", value=wait, hint="pass 0 or more")
