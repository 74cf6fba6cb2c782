"""How axes cut tensors whose own placements do not say it: fused projections cut by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from ckptkit.model import Placement, Shard, parse_placement


@dataclass(frozen=True, slots=True)
class Rules:
    """Patterns of names and, for each, the placement by kind of axis; the first match counts."""

    patterns: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)

    @classmethod
    def of(cls, what: Mapping[str, Mapping[str, Placement | str]] | Rules | None) -> Rules:
        """Rules as they are, or of texts such as `{"*.wqkv.weight": {"tp": "shard(0)"}}`."""
        if what is None or isinstance(what, Rules):
            return what or cls()
        return cls(
            {
                pattern: {
                    kind: parse_placement(p) if isinstance(p, str) else p
                    for kind, p in placements.items()
                }
                for pattern, placements in what.items()
            }
        )

    def placements(self, name: str) -> Mapping[str, Placement]:
        """What is said of a tensor, by kind of axis; optimizer state is as its parameter."""
        for pattern, placements in self.patterns.items():
            if fnmatchcase(name, pattern):
                return placements
        return {}


def whole_shape(part: tuple[int, ...], placement: Placement, size: int) -> tuple[int, ...]:
    """The shape of a plain tensor of which each of `size` ranks holds an equal part."""
    if not isinstance(placement, Shard):
        return part
    extent = part[placement.dim] * size
    if placement.blocks is not None:
        extent = sum(placement.blocks)
    return (*part[: placement.dim], extent, *part[placement.dim + 1 :])
