"""The same again: what the last save of a job leaves to the next one, and how that finds out that
it still holds. Mostly nothing has changed between the two but the values.

- Memory, into which devices and the writer copy. It holds whatever has changed.
- The `Outline`: what was found out of each tensor. It holds where a `Look`, which takes much less
  time than finding it out, sees the same as before.
- The `Basis` of the plan: what follows from the outline, and what other ranks have said. Where all
  of it is equal the plan holds, and `Writer.add_again` adds everything at once.
- The plan: where each byte of the pack is. Without a basis the writer itself compares what is added
  with what its plan, `Writer.like`, was made for.

What is kept takes about 2.5 KB an array, besides the memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.write.plan import PackPlan
from ckptkit.live.state.entries import ModelEntry, StateEntry
from ckptkit.live.state.parts import LiveTensor
from ckptkit.live.state.tensors import devices_of, host_memory, is_plain, synchronize
from ckptkit.live.state.topology import Topology
from ckptkit.storage import AlignedBuffer, BufferPool

_ALIGNMENT = 64


class LastSave:
    """What is kept; before the first save that is nothing.

    The memory has the size of this rank's state: pinned where a device copies into it, a pool of
    one buffer where the writer itself copies from host memory.
    """

    def __init__(self) -> None:
        self.plan: PackPlan | None = None
        self.basis: Basis | None = None
        self.pool = _PoolOfOne()
        self._memory: torch.Tensor | None = None

    def hold(self, tensors: Sequence[LiveTensor]) -> list[LiveTensor]:
        """The same tensors in this memory; complete, and independent of those, on return."""
        starts, size = [], 0
        for held in tensors:
            starts.append(size)
            size += -(-held.local.nbytes // _ALIGNMENT) * _ALIGNMENT
        devices = devices_of(held.local for held in tensors)
        pinned = any(device.type == "cuda" for device in devices)
        # What other streams still compute is part of the state, and copies here wait for none.
        synchronize(devices)
        memory = self._memory
        if memory is None or memory.nbytes < size or memory.is_pinned() < pinned:
            memory = self._memory = None  # freed first: two would be twice the promised memory
            memory = self._memory = host_memory(size, devices)
        copies = []
        for held, start in zip(tensors, starts, strict=True):
            local = held.local
            copy = memory[start : start + local.nbytes].view(local.dtype).view(local.shape)
            # Torch copies the bits of a conjugate and then turns the copy, on the host, whether
            # they have arrived or not: so it is turned before.
            copy.copy_(local.resolve_conj().resolve_neg(), non_blocking=True)
            copies.append(held.in_memory(copy))
        synchronize(devices)
        return copies

    def keep(self, plan: PackPlan | None, basis: Basis | None) -> None:
        """Remember what was found out for a save that is committed."""
        self.plan, self.basis = plan, basis

    def close(self) -> None:
        """Free the memory."""
        self._memory = self.plan = self.basis = None
        self.pool.clear()


class Basis(NamedTuple):
    """What the plan of a save rests on."""

    outline: Outline
    replicas: list[tuple[int, int]]
    """The tensors that are compared between ranks: their numbers, and the first rank of each."""
    elsewhere: frozenset[str]
    """The tensors that an earlier stage saves."""
    preset: str | None
    nbytes: int
    """The bytes of the whole job."""


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What a snapshot found out of tensors, without their memory: `seen` is all that it follows
    from, in the order in which it was looked at.
    """

    topology: Topology
    seen: list[object]
    tensors: list[LiveTensor]
    tied: dict[str, str]


class Look:
    """A look at tensors, which takes much less time than to collect them: `seen` is one flat list
    of what they are, to be compared with that of the last look; `locals` is what this rank holds.

    All that `Collector` asks of an entry or a tensor has to be in `seen`. Values need not be: they
    are read from where the tensors lie now.
    """

    def __init__(self, seen: list[object], *, is_usual: bool) -> None:
        self.seen = seen
        self.locals: list[torch.Tensor] = []
        self.is_usual = is_usual
        """Whether all tensors have elements of their own; others are looked at each time."""

    def add_model(self, entries: Sequence[ModelEntry]) -> None:
        """Parameters and buffers, and which of them are one tensor."""
        self.seen.append(len(entries))
        first: dict[int, int] = {}
        for number, entry in enumerate(entries):
            name, value, is_parameter, shared, _, is_kept, is_broadcast = entry
            is_tensor = isinstance(value, torch.Tensor)
            known = first.setdefault(id(value), number) if is_tensor else None
            self.seen += (name, is_parameter, shared, is_kept, is_broadcast, known)
            if is_tensor:
                if "_st_info" in value.__dict__:
                    self.is_usual = False  # each time it becomes another DTensor
                if known == number:
                    self._at(value)

    def add_optimizer(self, entries: Sequence[StateEntry]) -> None:
        """What an optimizer keeps."""
        self.seen.append(len(entries))
        for parameter, key, value, shared in entries:
            self.seen += (parameter, key, shared)
            if isinstance(value, torch.Tensor):
                self._at(value)

    def add_tree(self, tensors: Mapping[str, torch.Tensor], *, is_replicated: bool) -> None:
        """The tensors of a nested dictionary."""
        self.seen += (len(tensors), is_replicated)
        for name, tensor in tensors.items():
            self.seen.append(name)
            self._at(tensor)

    def _at(self, tensor: torch.Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # What is amiss with one is told by who collects it.
        if not self.is_usual or not is_plain(local):
            self.is_usual = False
            return
        if isinstance(tensor, DTensor):
            spec = tensor._spec
            self.seen += (tensor.shape, tensor.dtype, spec.mesh, spec.placements)
        self.seen += (type(tensor), local.shape, local.dtype, local.device)
        self.locals.append(local.detach() if local.requires_grad else local)


class _PoolOfOne(BufferPool):
    """Keeps the last buffer, whatever its size, and never two: states grow by optimizer state."""

    def __init__(self) -> None:
        super().__init__(limit=sys.maxsize)

    def take(self, size: int, *, congruent_to: int = 0) -> AlignedBuffer:
        if not self.has(size, congruent_to=congruent_to):
            self.clear()
        return super().take(size, congruent_to=congruent_to)
