"""The activations that one rank keeps, by layer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Self

import torch

from ckptkit.activation.host import HostBuffers
from ckptkit.activation.meter import storages_of
from ckptkit.activation.moved import Lane, Moved
from ckptkit.activation.stats import MemoryStats
from ckptkit.activation.wire import bytes_of, is_plain
from ckptkit.errors import NotFoundError, UnsupportedTypeError, UsageError
from ckptkit.model.document import parse_size

LayerId = str | int
Memories = tuple[tuple[int, int], ...]
"""The key and the bytes of each memory that an activation lies in."""


@dataclass(slots=True)
class _Kept:
    """One activation, on its device or in host memory."""

    tensor: torch.Tensor | None
    moved: Moved | None
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    storages: Memories
    ready: torch.cuda.Event | None = None
    """When what makes it has ended; nobody on another stream may read it before."""


class ActivationStore:
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
        self._buffers = HostBuffers(pin=pin_memory) if offload else None
        self._lane = Lane()
        self._numbers = count()
        self._kept: dict[LayerId, _Kept] = {}
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._current = self._peak = self._evicted = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def has_budget(self) -> bool:
        """Whether it drops what it has no room for."""
        return self._budget is not None

    def register(self, layer_id: LayerId, tensor: torch.Tensor) -> None:
        """Keep the activation of a layer, in the place of one that it may have had."""
        check_layer(layer_id)
        _check_tensor(layer_id, tensor)
        with self._lock:
            storages = self._memories(tensor)
            self._drop(layer_id)
            if self._has_room_after_evicting(storages):
                self._add(layer_id, self._made(tensor, storages))

    def retrieve(self, layer_id: LayerId) -> torch.Tensor:
        """The activation of a layer."""
        check_layer(layer_id)
        with self._lock:
            kept = self._kept.get(layer_id)
            if kept is None:
                raise NotFoundError(
                    "no activation of this layer is kept",
                    value=layer_id,
                    hint=f"there are {sorted(map(str, self._kept))[:8]}",
                )
            return _tensor_of(kept)

    def retrieve_or_recompute(
        self, layer_id: LayerId, fn: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The activation of a layer, from `fn` where it is not kept; kept then if there is room."""
        check_layer(layer_id)
        with self._lock:
            if layer_id in self._kept:
                return self.retrieve(layer_id)
        made = fn()
        _check_tensor(layer_id, made)
        with self._lock:
            storages = self._memories(made)
            if layer_id not in self._kept and self._has_room(storages):
                self._add(layer_id, self._made(made, storages))
        return made

    def has(self, layer_id: LayerId) -> bool:
        """Whether the activation of a layer is kept."""
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
            if kept is not None and kept.moved is not None:
                kept.moved.prefetch()

    def clear(self, layer_id: LayerId | None = None) -> None:
        """Forget one activation, or all."""
        with self._lock:
            for each in [layer_id] if layer_id is not None else list(self._kept):
                self._drop(each)

    def memory_stats(self) -> MemoryStats:
        """What is kept now, and was at most."""
        with self._lock:
            moved = [kept for kept in self._kept.values() if kept.moved is not None]
            on_host = sum(size for kept in moved for _, size in kept.storages)
            return MemoryStats(self._current, self._peak, len(self._kept), on_host, self._evicted)

    def close(self) -> None:
        """Forget everything, and free the host memory that activations were moved to."""
        self.clear()
        if self._buffers is not None:
            self._buffers.release()

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, layer_id: LayerId) -> bool:
        return self.has(layer_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _register_moved(self, layer_id: LayerId, moved: Moved, size: int) -> None:
        """Keep, and count, what has been moved to this store's host memory already."""
        shape, held = torch.Size([size]), ((next(self._numbers), size),)
        kept = _Kept(None, moved, shape, torch.uint8, requires_grad=False, storages=held)
        with self._lock:
            self._drop(layer_id)
            self._add(layer_id, kept)

    def _memories(self, tensor: torch.Tensor) -> Memories:
        if self._buffers is None:
            return tuple((each._cdata, each.nbytes()) for each in storages_of(tensor))
        if not is_plain(tensor):
            raise UsageError(
                "only plain tensors are moved to the host",
                value=f"{type(tensor).__name__}, {tensor.layout}, {tensor.device}",
            )
        return ((next(self._numbers), tensor.numel() * tensor.itemsize),)

    def _made(self, tensor: torch.Tensor, storages: Memories) -> _Kept:
        detached, moved = tensor.detach(), None
        if self._buffers is None:
            held, ready = detached.requires_grad_(tensor.requires_grad), _event_after(detached)
        else:
            moved = Moved(bytes_of(detached), self._buffers, self._lane)
            held, ready = None, None  # what is moved waits for its own copy
        return _Kept(held, moved, tensor.shape, tensor.dtype, tensor.requires_grad, storages, ready)

    def _add(self, layer_id: LayerId, kept: _Kept) -> None:
        self._kept[layer_id] = kept
        for key, size in kept.storages:
            self._holders[key] += 1
            if self._holders[key] == 1:
                self._sizes[key] = size
                self._current += size
        self._peak = max(self._peak, self._current)
        self._changed.notify_all()

    def _drop(self, layer_id: LayerId) -> None:
        kept = self._kept.pop(layer_id, None)
        for key, _ in () if kept is None else kept.storages:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self._current -= self._sizes.pop(key)

    def _has_room(self, storages: Memories) -> bool:
        added = sum(size for key, size in storages if key not in self._sizes)
        return self._budget is None or self._current + added <= self._budget

    def _has_room_after_evicting(self, storages: Memories) -> bool:
        if self._budget is not None and sum(size for _, size in storages) > self._budget:
            self._evicted += 1
            return False
        # Backward asks for the newest first: the oldest are recomputed last, if at all.
        while not self._has_room(storages):
            self._drop(next(iter(self._kept)))
            self._evicted += 1
        return True


def check_layer(layer_id: object) -> None:
    """Refuse what cannot name a layer."""
    if not isinstance(layer_id, (str, int)) or isinstance(layer_id, bool):
        raise UnsupportedTypeError("a layer is a name or a number", value=layer_id)


def _check_tensor(layer_id: LayerId, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTypeError(
            "an activation is a tensor", where=str(layer_id), value=type(tensor).__name__
        )


def _event_after(tensor: torch.Tensor) -> torch.cuda.Event | None:
    if tensor.device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()
    return event


def _tensor_of(kept: _Kept) -> torch.Tensor:
    if kept.tensor is not None:
        if kept.ready is not None:
            torch.cuda.current_stream(kept.tensor.device).wait_event(kept.ready)
        return kept.tensor
    assert kept.moved is not None  # noqa: S101 — one of the two is there
    tensor = kept.moved.fetch().view(kept.dtype).view(kept.shape)
    return tensor.requires_grad_(kept.requires_grad)
