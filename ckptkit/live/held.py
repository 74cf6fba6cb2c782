"""One tensor of a job, as one rank holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ckptkit.live.topology import Topology
from ckptkit.model import Owner, Placement


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

    def saved_placements(self, topology: Topology) -> dict[str, Placement]:
        """How the axes cut what is saved. Ranks that hold the same share the writing; where they
        may differ, as buffers do, a mixture would be nobody's values: the first rank's are saved.
        """
        axes = (axis for axis in topology.strategy.mesh.axes if axis.size > 1)
        first = {axis.name: Owner(0) for axis in axes if axis.name not in self.alike}
        return first | dict(self.placements)


@dataclass(frozen=True, slots=True)
class Tied:
    """A second name of a tensor."""

    name: str
    of: str
