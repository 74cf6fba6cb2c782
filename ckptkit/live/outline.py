"""The outline of a rank's tensors: what a later save can use again of what was found out of them,
and the short look that tells whether it still holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ckptkit.live.state.parts import LiveTensor, Tied
from ckptkit.live.state.tensors import is_plain
from ckptkit.live.state.topology import Topology
from ckptkit.live.wrappers.entries import ModelEntry, StateEntry

_NO_MEMORY = torch.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What a snapshot found out of tensors, without their memory: `seen` is all that it follows
    from, in the order in which it was looked at.
    """

    topology: Topology
    seen: list[object]
    tensors: list[LiveTensor]
    tied: list[Tied]

    @classmethod
    def of(
        cls, topology: Topology, look: Look, tensors: Sequence[LiveTensor], tied: list[Tied]
    ) -> Outline | None:
        """That of what was collected at this look; None where tensors are looked at each time."""
        if not look.is_usual or any(held.own is not None for held in tensors):
            return None
        # No memory is kept alive from one save to the next.
        return cls(topology, look.seen, [held.in_memory(_NO_MEMORY) for held in tensors], tied)


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
        self._first: dict[int, int] = {}

    def at_model(self, entries: Sequence[ModelEntry]) -> None:
        """Parameters and buffers, and which of them are one tensor."""
        if not self.is_usual:
            return
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

    def at_optimizer(self, entries: Sequence[StateEntry]) -> None:
        """What an optimizer keeps."""
        self.seen.append(len(entries))
        for parameter, key, value, shared in entries:
            self.seen += (parameter, key, shared)
            if isinstance(value, torch.Tensor):
                self._at(value)

    def at_tree(self, tensors: Mapping[str, torch.Tensor], *, is_replicated: bool) -> None:
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
