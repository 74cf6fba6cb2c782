"""What autograd saves in the forward of a micro-batch, kept in a store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ckptkit.activation.held import Held
from ckptkit.activation.memory import storages_of
from ckptkit.activation.moved import Moved
from ckptkit.activation.offload import Offload, Owned
from ckptkit.activation.store import ActivationStore


class Saving:
    """The places in a store of what one forward saves, until it is cleared."""

    def __init__(self, store: ActivationStore, name: str) -> None:
        self.store = store
        self._name = name
        self._keys: list[str] = []

    def hooks(self, module: nn.Module, given: Any) -> saved_tensors_hooks:
        """For the forward of a module."""
        # Whoever gives the inputs holds them anyway, all micro-batches in one memory.
        stays = {
            storage._cdata
            for leaf in tree_leaves(given)
            if isinstance(leaf, torch.Tensor)
            for storage in storages_of(leaf)
        }
        ways = self._ways(module)

        def pack(tensor: torch.Tensor) -> object:
            if any(storage._cdata in stays for storage in storages_of(tensor)):
                return Held.of(tensor)
            return ways.pack(tensor)

        return saved_tensors_hooks(pack, ways.unpack)

    def next_key(self) -> str:
        """A place for one more."""
        key = f"saved {self._name}/{len(self._keys)}"
        self._keys.append(key)
        return key

    def prefetch(self) -> None:
        """Begin to bring back what was moved, in the order of backward."""
        for key in reversed(self._keys):
            self.store.prefetch(key)

    def clear(self) -> None:
        """Forget all of it."""
        for key in self._keys:
            self.store.clear(key)

    def _ways(self, module: nn.Module) -> Any:
        if self.store._buffers is None:
            return _Staying(self, module)
        self.store._lane.next_forward()
        return _Moving(self).begin(module)


class _Moving(Offload):
    """Moves to the host memory of a store, each memory once."""

    def __init__(self, saving: Saving) -> None:
        super().__init__()
        assert saving.store._buffers is not None  # noqa: S101 — the caller has looked
        self.buffers, self.lane = saving.store._buffers, saving.store._lane
        self._saving = saving

    def move(self, flat: torch.Tensor, watched: torch.Tensor) -> Moved:
        moved = super().move(flat, watched)
        self._saving.store.register_moved(self._saving.next_key(), moved, flat.numel())
        return moved


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is that was registered."""

    key: str
    version: int


class _Staying:
    """Hooks that leave tensors on their device."""

    def __init__(self, saving: Saving, module: nn.Module) -> None:
        self._saving = saving
        self._owned = Owned(module)

    def pack(self, tensor: torch.Tensor) -> Held | _Place:
        """What autograd keeps in the place of a tensor."""
        owned = self._owned.storages()
        is_owned = isinstance(tensor._base, nn.Parameter)
        if is_owned or any(each._cdata in owned for each in storages_of(tensor)):
            return Held.of(tensor)
        key = self._saving.next_key()
        self._saving.store.register(key, tensor)
        return _Place(key, tensor._version)

    def unpack(self, packed: Held | _Place) -> torch.Tensor:
        """The tensor again."""
        if isinstance(packed, _Place):
            packed = Held(self._saving.store.retrieve(packed.key), packed.version)
        return packed.get()
