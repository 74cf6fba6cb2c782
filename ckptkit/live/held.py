"""One tensor of a job, as one rank holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from ckptkit.errors import LayoutError
from ckptkit.live.tensors import same_bits
from ckptkit.live.topology import Topology
from ckptkit.model import Box, Owner, Part, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A named tensor: its global shape, how the axes cut it, and this rank's own part."""

    name: str
    shape: tuple[int, ...]
    placements: Mapping[str, Placement]
    local: torch.Tensor
    role: str = "other"
    of: str | None = None
    alike: frozenset[str] = frozenset()
    """The axes along which all ranks are known to hold the same values."""
    of_first: frozenset[str] = frozenset()
    """The axes along which the first rank's values are about to become those of all."""

    own: Part | None = None
    """What this rank holds, where no placements say it: those here are what it is saved as."""
    tensor: DTensor | None = None
    """The tensor that holds it then."""

    def part(self, topology: Topology) -> Part:
        """What this rank holds of it."""
        if self.own is not None:
            return self.own
        return topology.part(self.name, self.shape, self.placements)

    def moved(self, topology: Topology) -> Held:
        """The tensor as its placements say. Where the rank holds something else this is a
        collective of the tensor's mesh, and a copy in host memory.
        """
        if self.own is None or self.tensor is None:
            return self
        whole = self.tensor.full_tensor().detach()
        # Torch knows strided pieces that differ in size by more than one way of counting.
        is_whole = all(
            same_bits(
                whole[box.within(Box.whole(self.shape))],
                self.local[place.within(Box.whole(self.own.shape))],
            )
            for box, place in zip(self.own.boxes, self.own.places, strict=True)
        )
        if not is_whole:
            raise LayoutError(
                "torch gathers this DTensor to something else than what its rank holds",
                where=self.name,
                value=str(self.tensor.placements),
            )
        part = topology.part(self.name, self.shape, self.placements)
        local = torch.empty(part.shape, dtype=whole.dtype)
        for box, place in zip(part.boxes, part.places, strict=True):
            local[place.within(Box.whole(part.shape))] = whole[box.within(Box.whole(self.shape))]
        return replace(self, local=local, own=None, tensor=None)

    def saved_placements(self, topology: Topology) -> dict[str, Placement]:
        """How the axes cut what is saved. Ranks that hold the same share the writing; where they
        may differ, as buffers do, a mixture would be nobody's values: the first rank's are saved.
        """
        return dict.fromkeys(self._unsure(topology), Owner(0)) | dict(self.placements)

    def first_replica(self, topology: Topology) -> int:
        """The rank whose values are saved for this rank's, which nothing keeps the same."""
        mesh = topology.strategy.mesh
        unsure = self._unsure(topology) - self.placements.keys() - self.of_first
        coords = zip(mesh.axes, mesh.coords(topology.rank), strict=True)
        return mesh.rank(tuple(0 if axis.name in unsure else coord for axis, coord in coords))

    def is_sure(self, topology: Topology) -> bool:
        """Whether nobody's values but this rank's are saved for it, or such that are the same."""
        return not self._unsure(topology) - self.placements.keys() - self.of_first

    def is_whole_where_others_are_cut(self, topology: Topology) -> bool:
        """Whether nobody says that it is cut along an axis that is there to cut."""
        unsure = self._unsure(topology) - self.placements.keys()
        axes = topology.strategy.mesh.axes
        return any(a.name in unsure for a in axes if a.kind not in ("ddp", "zero1", "pp"))

    def _unsure(self, topology: Topology) -> set[str]:
        axes = topology.strategy.mesh.axes
        return {axis.name for axis in axes if axis.size > 1 and axis.name not in self.alike}


@dataclass(frozen=True, slots=True)
class Tied:
    """A second name of a tensor."""

    name: str
    of: str
