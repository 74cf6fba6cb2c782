"""Forwards whose activations wait in host memory for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ckptkit.activation.host import HostBuffers
from ckptkit.activation.meter import storages_of
from ckptkit.activation.moved import Lane, Moved

_LEAST = 4096  # bytes: what is smaller stays
_AHEAD = 1  # forwards that are brought back before backward asks


class Offload:
    """What the blocks of a model share: host memory, the ways to it, and the order of forwards."""

    def __init__(self, *, pin_memory: bool | None = None) -> None:
        self.buffers = HostBuffers(pin=pin_memory)
        self.lane = Lane()
        self._forwards: list[weakref.ref[_Forward]] = []

    def begin(self, block: nn.Module) -> _Forward:
        """A forward of a block, the next one in backward's reverse order."""
        self._forwards = [each for each in self._forwards if each() is not None]
        forward = _Forward(self, block, before=self._forwards[-_AHEAD:])
        self._forwards.append(weakref.ref(forward))
        return forward


class Offloaded:
    """The forward of a block that leaves nothing on the device but its result."""

    def __init__(self, block: nn.Module, plain: Callable[..., Any], offload: Offload) -> None:
        self.plain_forward = plain
        self._block = block
        self._offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain_forward(*args, **kwargs)
        self._offload.lane.next_forward()
        forward = self._offload.begin(self._block)
        with saved_tensors_hooks(forward.pack, forward.unpack):
            return self.plain_forward(*args, **kwargs)


@dataclass(slots=True)
class _View:
    """How a saved tensor lies in what was moved."""

    moved: Moved
    forward: _Forward
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Forward:
    """One forward of one block: what it saved, each memory once."""

    def __init__(
        self, offload: Offload, block: nn.Module, before: list[weakref.ref[_Forward]]
    ) -> None:
        self._offload = offload
        self._before = before
        self._stays = {
            storage._cdata
            for tensor in (*block.parameters(), *block.buffers())
            for storage in storages_of(tensor)
        }
        self._moved: dict[tuple[int, int], tuple[weakref.ref[Any], weakref.ref[Moved]]] = {}
        self._all: weakref.WeakSet[Moved] = weakref.WeakSet()
        self._back: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._asked = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """What autograd keeps in the place of a tensor."""
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays or storage.nbytes() < _LEAST:
            return tensor
        moved = self._known(storage, tensor._version)
        if moved is None:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            # The flat one counts its changes for itself.
            watched = tensor.detach()
            moved = Moved(flat, self._offload.buffers, self._offload.lane, watched=watched)
            key = storage._cdata, tensor._version
            self._moved[key] = weakref.ref(storage), weakref.ref(moved)
            self._all.add(moved)
        offset = int(tensor.storage_offset())
        return _View(moved, self, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def unpack(self, packed: torch.Tensor | _View) -> torch.Tensor:
        """The tensor again."""
        if isinstance(packed, torch.Tensor):
            return packed
        if not self._asked:
            self._asked = True
            for each in self._before:
                if (earlier := each()) is not None:
                    earlier.prefetch()
        storage = self._storage(packed.moved)
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return empty.set_(storage, packed.offset, packed.size, packed.stride)

    def prefetch(self) -> None:
        """Begin to bring back all that it saved."""
        for moved in list(self._all):
            moved.prefetch()

    def _known(self, storage: torch.UntypedStorage, version: int) -> Moved | None:
        same, moved = self._moved.get((storage._cdata, version), (None, None))
        # The address alone may be that of another storage by now.
        return moved() if same is not None and moved is not None and same() is storage else None

    def _storage(self, moved: Moved) -> torch.UntypedStorage:
        held = self._back.get(id(moved))
        storage = held() if held is not None else None
        if storage is None:
            storage = moved.fetch().untyped_storage()
            self._back[id(moved)] = weakref.ref(storage)
        return storage
