from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from ckptkit.model.box import Box


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: boxes in global coordinates, in the order of its memory.

    `shape` is that of the local tensor, `places` are the same boxes within it. A rank that holds
    nothing has no boxes.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    places: tuple[Box, ...]

    @property
    def is_empty(self) -> bool:
        return not self.boxes


@dataclass(frozen=True, slots=True)
class Replicas:
    """The ranks that hold the same: equal keys are equal sets of ranks, also across tensors.

    `index` is this rank's place among the `count` of them. Of nothing, nobody is a replica: the
    key is then empty and the count 0.
    """

    key: tuple[Hashable, ...]
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """Boxes of a part that the very same ranks hold."""

    boxes: tuple[Box, ...]
    places: tuple[Box, ...]
    replicas: Replicas
