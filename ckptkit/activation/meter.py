"""Measures the bytes of activations: every storage that a step makes and still holds."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_SAID = threading.local()
# What sparse tensors are made of.
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


@contextmanager
def unmetered() -> Iterator[None]:
    """What is made in here is no activation: host memory that they are moved to."""
    with _counting(counts=False):
        yield


@contextmanager
def metered() -> Iterator[None]:
    """What is made in here is an activation, also in backward: it comes back."""
    with _counting(counts=True):
        yield


@contextmanager
def _counting(*, counts: bool) -> Iterator[None]:
    before = getattr(_SAID, "counts", None)
    _SAID.counts = counts
    try:
        yield
    finally:
        _SAID.counts = before


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
        for storage in _storages((args, kwargs)):
            self._watch(storage, 0)
        result = func(*args, **(kwargs or {}))
        counts = self._counts()
        for storage in _storages(result):
            self._watch(storage, storage.nbytes() if counts else 0)
        return result

    def _counts(self) -> bool:
        said: bool | None = getattr(_SAID, "counts", None)
        if said is not None:
            return said
        return torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled()

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
            self._known.discard(key)
            self.current -= size


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


def storages_of(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """The memory of a tensor: that of its local parts, for one that is made of others."""
    whole: Any = tensor
    if is_traceable_wrapper_subclass(whole):
        inner = [getattr(whole, name) for name in whole.__tensor_flatten__()[0]]
        for each in inner:  # a DTensor has a mesh among them
            if isinstance(each, torch.Tensor):
                yield from storages_of(each)
    elif tensor.device.type == "meta":
        return
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    else:
        for each in _PARTS.get(tensor.layout, ()):
            yield from storages_of(getattr(tensor.detach(), each)())


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from storages_of(leaf)
