"""What activations take: every storage that a step makes and still holds, and what stores keep."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ckptkit.errors import UnsupportedTypeError
from ckptkit.model.document import size_text

LayerId = str | int


class ActivationMeter(TorchDispatchMode):
    """Counts what is made within, by storage, as long as anything holds it: `current`, `peak`.

    So it sees all ways of keeping alike: what autograd saves, what selective checkpointing
    caches, and what lies there for a moment. Gradients, which backward makes, are not counted;
    what backward recomputes, brings back or gathers is. Parameters and what came from outside are
    not.

    >>> with ActivationMeter() as meter:
    ...     kept = torch.ones(256).exp()
    >>> meter.current, meter.peak
    (1024, 2048)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.marked_peak = 0
        self._known: set[int] = set()
        self._lock = threading.RLock()  # the end of a storage may come while it is held

    def mark(self) -> int:
        """Begin `marked_peak` anew; the bytes of now."""
        self.marked_peak = self.current
        return self.current

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # What came from outside counts nothing, also where a result is a view of it.
        for storage in storages_in((args, kwargs)):
            self._watch(storage, 0)
        result = func(*args, **(kwargs or {}))
        counts: bool | None = getattr(_SAID, "counts", None)
        if counts is None:  # what backward makes are gradients, unless it computes forwards again
            counts = torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()
        for storage in storages_in(result):
            self._watch(storage, storage.nbytes() if counts else 0)
        return result

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        weakref.finalize(storage, self._forget, key, size).atexit = False
        with self._lock:
            self.current += size
            self.peak = max(self.peak, self.current)
            self.marked_peak = max(self.marked_peak, self.current)

    def _forget(self, key: int, size: int) -> None:
        with self._lock:
            self._known.discard(key)  # at once: the next storage may get this address
            self.current -= size


_SAID = threading.local()


@contextmanager
def _counting(*, counts: bool) -> Iterator[None]:
    before = getattr(_SAID, "counts", None)
    _SAID.counts = counts
    try:
        yield
    finally:
        _SAID.counts = before


# Says of what is made within that it is an activation, also in backward: it comes back.
metered = partial(_counting, counts=True)
# Says that it is none: host memory that activations are moved to.
unmetered = partial(_counting, counts=False)


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes of activations at one moment of a step: a forward and a backward."""
    with ActivationMeter() as meter:
        step()
    return int(meter.peak)


def kept_bytes(forward: Callable[[], object]) -> int:
    """The bytes of activations that a forward leaves behind, with its result."""
    with ActivationMeter() as meter:
        result = forward()
        kept = int(meter.current)
        del result
    return kept


# What sparse tensors are made of.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor: that of its local parts, for one that is made of others."""
    whole: Any = tensor
    if is_traceable_wrapper_subclass(whole):
        # A DTensor has a mesh among them.
        yield from storages_in([getattr(whole, name) for name in whole.__tensor_flatten__()[0]])
    elif tensor.device.type == "meta":
        return
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        for each in _PARTS.get(tensor.layout, ()):
            yield from storages_of(getattr(tensor.detach(), each)())


def storages_in(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in lists, dictionaries and the like."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from storages_of(leaf)


def plain_layer(layer_id: object) -> LayerId:
    """The name or number of a layer, without what a subclass adds: other ranks get it as text."""
    if isinstance(layer_id, str):
        return str.__str__(layer_id)
    if isinstance(layer_id, int) and not isinstance(layer_id, bool):
        return int(layer_id)
    raise UnsupportedTypeError("a layer is a name or a number", value=layer_id)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but memory and its shape."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
    )


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory of a store, in bytes; tensors that share memory are counted once.

    >>> print(MemoryStats(current=2048, peak=4096, count=2))
    2 activations, 2.0 KiB (peak 4.0 KiB)
    """

    current: int = 0
    peak: int = 0
    count: int = 0
    """How many activations are held."""
    on_host: int = 0
    """The part of `current` that has been moved to host memory."""
    evicted: int = 0
    """How many were dropped to stay within the budget."""

    def __str__(self) -> str:
        return f"{self.count} activations, {size_text(self.current)} (peak {size_text(self.peak)})"
