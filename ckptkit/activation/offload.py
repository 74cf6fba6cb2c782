"""Forwards whose activations wait in host memory for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ckptkit.activation.held import Held
from ckptkit.activation.host import HostBuffers
from ckptkit.activation.memory import storages_of
from ckptkit.activation.moved import Lane, Moved

_LEAST = 4096  # bytes: what is smaller stays
_AHEAD = 1  # forwards that are brought back before backward asks
_Key = tuple[int, int, int]


class Offload:
    """What the blocks of a model share: host memory, the ways to it, and the order of forwards."""

    def __init__(self, *, pin_memory: bool | None = None) -> None:
        self._pin_memory = pin_memory
        self.buffers = HostBuffers(pin=pin_memory)
        self.lane = Lane()
        self._forwards: list[weakref.ref[_Forward]] = []

    def __reduce__(self) -> tuple[Callable[[], Offload], tuple[()]]:
        # A copy of the model, or a pickle of it: what waits in host memory is the original's.
        return partial(Offload, pin_memory=self._pin_memory), ()

    def begin(self, block: nn.Module) -> _Forward:
        """A forward of a block, the next one in backward's reverse order."""
        self._forwards = [each for each in self._forwards if each() is not None]
        forward = _Forward(self, block, before=self._forwards[-_AHEAD:])
        self._forwards.append(weakref.ref(forward))
        return forward

    def move(self, flat: torch.Tensor, watched: torch.Tensor) -> Moved:
        """Move memory to the host, and watch a tensor in it for changes meanwhile."""
        return Moved(flat, self.buffers, self.lane, watched=watched)


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


@dataclass(frozen=True, slots=True)
class _View:
    """How a saved tensor lies in what was moved."""

    moved: Moved
    forward: _Forward
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


@dataclass(frozen=True, slots=True)
class _Spread:
    """A DTensor of which this rank's part was moved."""

    local: _View
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    size: torch.Size
    stride: tuple[int, ...]


class _Forward:
    """One forward of one block: what it saved, each memory once."""

    def __init__(
        self, offload: Offload, block: nn.Module, before: list[weakref.ref[_Forward]]
    ) -> None:
        self._offload = offload
        self._before = before
        self._owned = Owned(block)
        self._moved: dict[_Key, tuple[weakref.ref[Any], weakref.ref[Any], weakref.ref[Moved]]] = {}
        self._all: weakref.WeakSet[Moved] = weakref.WeakSet()
        self._back: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._asked = False

    def pack(self, tensor: torch.Tensor) -> Held | _View | _Spread:
        """What autograd keeps in the place of a tensor."""
        if not isinstance(tensor, DTensor):
            return self._moved_view(tensor) or Held.of(tensor)
        view = self._moved_view(tensor._local_tensor)
        if view is None:
            return Held.of(tensor)
        return _Spread(view, tensor.device_mesh, tensor.placements, tensor.size(), tensor.stride())

    def unpack(self, packed: Held | _View | _Spread) -> torch.Tensor:
        """The tensor again."""
        if isinstance(packed, Held):
            return packed.get()
        if not self._asked:
            self._asked = True
            for each in self._before:
                if (earlier := each()) is not None:
                    earlier.prefetch()
        if isinstance(packed, _View):
            return self._back_as(packed)
        return DTensor.from_local(
            self._back_as(packed.local),
            packed.mesh,
            packed.placements,
            run_check=False,
            shape=packed.size,
            stride=packed.stride,
        )

    def prefetch(self) -> None:
        """Begin to bring back all that it saved."""
        for moved in list(self._all):
            moved.prefetch()

    def _moved_view(self, tensor: torch.Tensor) -> _View | None:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return None
        # Copies within forward derivatives crash, and within torch.func they are wrapped.
        if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < _LEAST or isinstance(tensor._base, nn.Parameter):
            return None
        # Tensors of one memory may count its changes each for itself; views count with their base.
        counter = tensor if tensor._base is None else tensor._base
        key = storage._cdata, id(counter), tensor._version
        moved = self._known(key, storage, counter)
        if moved is None:
            if storage._cdata in self._owned.storages():
                return None
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            # The flat one counts its changes for itself.
            watched = tensor.detach()
            moved = self._offload.move(flat, watched)
            self._moved[key] = weakref.ref(storage), weakref.ref(counter), weakref.ref(moved)
            self._all.add(moved)
        return _View(
            moved,
            self,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            is_conj=tensor.is_conj(),
            is_neg=tensor.is_neg(),
        )

    def _back_as(self, view: _View) -> torch.Tensor:
        storage = self._storage(view.moved)
        empty = torch.empty(0, dtype=view.dtype, device=storage.device)
        tensor = empty.set_(storage, view.offset, view.size, view.stride)
        tensor = tensor.conj() if view.is_conj else tensor
        return torch._neg_view(tensor) if view.is_neg else tensor

    def _known(
        self, key: _Key, storage: torch.UntypedStorage, counter: torch.Tensor
    ) -> Moved | None:
        if key not in self._moved:
            return None
        same_storage, same_counter, moved = self._moved[key]
        # The addresses alone may be those of others by now.
        return moved() if same_storage() is storage and same_counter() is counter else None

    def _storage(self, moved: Moved) -> torch.UntypedStorage:
        held = self._back.get(id(moved))
        storage = held() if held is not None else None
        if storage is None:
            storage = moved.fetch().untyped_storage()
            self._back[id(moved)] = weakref.ref(storage)
        return storage


class Owned:
    """The memory of a block's parameters and buffers, which FSDP within it exchanges meanwhile."""

    def __init__(self, block: nn.Module) -> None:
        self._modules = [each for each in block.modules() if each._parameters or each._buffers]
        self._tensors: list[torch.Tensor] = []
        self._storages: set[int] = set()

    def storages(self) -> set[int]:
        """Their keys, as it is now."""
        tensors = [
            tensor
            for module in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        if len(tensors) != len(self._tensors) or not all(map(is_, tensors, self._tensors)):
            self._tensors = tensors
            self._storages = {each._cdata for tensor in tensors for each in storages_of(tensor)}
        return self._storages
