"""Buffers that a forward changes, such as running means, are not changed again by recomputing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Buffers = dict[str, torch.Tensor | None]


class BufferGuard(AbstractContextManager[None]):
    """Of one forward of a block: a context for its recomputations, entered for each.

    They run on the buffers that the forward began with, and the block has its own afterwards.
    """

    def __init__(self, block: nn.Module, others: WeakSet[BufferGuard]) -> None:
        self._before = _buffers_of([block])
        self._others = others
        others.add(self)
        # Their kernels change running means without saying so in the version of the tensor.
        norms = [each for each in block.modules() if isinstance(each, _NormBase) and each.training]
        self._silent = {id(buffer) for norm in norms for buffer in norm.buffers()}
        self._copies: dict[int, torch.Tensor] = {}
        self._after: list[tuple[nn.Module, Buffers]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """What the forward runs in."""
        found = [
            (buffer, buffer._version, buffer.detach().clone()) for buffer in _distinct(self._before)
        ]
        yield
        # Only those stay: tables of positions are large, and do not change.
        changed = {
            id(buffer): copy
            for buffer, version, copy in found
            if buffer._version != version or id(buffer) in self._silent
        }
        # Forwards before this one that only read a buffer have read what it was until now.
        for each in self._others:
            each._copies = changed | each._copies

    def __enter__(self) -> None:
        self._after = [(module, dict(module._buffers)) for module, _ in self._before]
        fresh = {key: copy.clone() for key, copy in self._copies.items()}
        for module, buffers in self._before:
            _put(module, {name: fresh.get(id(each), each) for name, each in buffers.items()})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, buffers in self._after:
            _put(module, buffers)
        self._after = []


@contextmanager
def restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Afterwards the modules have the buffers that they have now, which hold what they hold now."""
    before = _buffers_of(modules)
    copies = [(buffer, buffer.detach().clone()) for buffer in _distinct(before)]
    try:
        yield
    finally:
        for module, buffers in before:
            _put(module, buffers)
        for buffer, copy in copies:
            # Not counted as a change: autograd may have saved the buffer itself.
            buffer.data.copy_(copy)


def _buffers_of(modules: Sequence[nn.Module]) -> list[tuple[nn.Module, Buffers]]:
    every = {id(inner): inner for module in modules for inner in module.modules()}
    return [(module, dict(module._buffers)) for module in every.values() if module._buffers]


def _distinct(found: Sequence[tuple[nn.Module, Buffers]]) -> list[torch.Tensor]:
    every = [buffer for _, buffers in found for buffer in buffers.values() if buffer is not None]
    return list({id(buffer): buffer for buffer in every}.values())


def _put(module: nn.Module, buffers: Buffers) -> None:
    own = module._buffers
    for name in own.keys() - buffers.keys():
        del own[name]
    for name, buffer in buffers.items():
        if own.get(name) is not buffer:
            own[name] = buffer
