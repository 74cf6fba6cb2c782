"""What one rank holds of a model and its optimizers, with what it is a part of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.names import WRAPPED, join, split
from ckptkit.live.agree import Documents
from ckptkit.live.held import Held
from ckptkit.live.optimizers.adapter import Saved, SavedState
from ckptkit.live.resuming import nested
from ckptkit.live.snapshot import Snapshot
from ckptkit.live.tensors import dtype_of, torch_dtype
from ckptkit.live.topology import Topology
from ckptkit.model import DTYPES, Box


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """How a tensor is cut, and what of it this rank holds."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: str
    placements: Mapping[str, str]
    """By axis of the strategy; replicated along the others."""
    boxes: tuple[Box, ...]

    def __str__(self) -> str:
        boxes = " and ".join(f"{box.shape} at {box.offset}" for box in self.boxes) or "nothing"
        return f"{boxes} of {self.dtype} {self.shape}"


@dataclass(frozen=True, slots=True)
class ShardingMetadata:
    """What a shard is a part of, by the names that its tensors have in a checkpoint."""

    strategy: str
    rank: int
    world_size: int
    details: Mapping[str, Any]
    """What the wrappers say of precision, stages and sizes."""
    tensors: Mapping[str, TensorSharding]
    tied: Mapping[str, str]
    """Second names of tensors."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> ShardingMetadata:
        """What the snapshot of a rank is a part of."""
        topology = snapshot.topology
        return cls(
            str(topology.strategy),
            topology.rank,
            topology.strategy.world_size,
            snapshot.details,
            {held.name: _sharding(topology, held) for held in snapshot.tensors},
            {tied.name: tied.of for tied in snapshot.tied},
        )


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """What one rank holds; its tensors are the live ones where those lie as they are saved."""

    metadata: ShardingMetadata
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    """What `get_extra_state` gave, by name."""
    optimizers: Documents
    """Of each optimizer its kind, its groups with their options, and values that are no tensors."""

    @classmethod
    def of(cls, snapshot: Snapshot) -> LocalShard:
        """What the snapshot of a rank has."""
        values: Any = snapshot.objects.get("model", {})
        for name in snapshot.objects:
            if name.startswith(f"{WRAPPED}/"):
                raise UnsupportedTypeError(
                    "a tensor made of others is no part of a shard",
                    where=name.removeprefix(f"{WRAPPED}/"),
                    hint="save it with a Checkpointer",
                )
        tensors = {held.name: held.local for held in snapshot.tensors}
        return cls(ShardingMetadata.of(snapshot), tensors, values, snapshot.optimizers)

    def saved_state(self) -> SavedState:
        """What it has of optimizers, by parameter and key."""
        groups = [group for document in self.optimizers for group in document["groups"]]
        found: dict[str, dict[str, Any]] = {n: {} for group in groups for n in group["params"]}
        tensors = self.metadata.tensors
        for name, each in tensors.items():
            if name.startswith("optimizer/"):
                _, parameter, key = split(name)
                of = tensors.get(join("model", parameter))
                alike = of is not None and of.shape == each.shape
                item = Saved(each.shape, torch_dtype(DTYPES[each.dtype]), alike)
                found.setdefault(parameter, {})[key] = item
        for document in self.optimizers:
            for name, values in document["values"].items():
                found[name] = nested(found.get(name, {}), values, name)
        return found

    def objection(self, here: ShardingMetadata, group: str) -> str:
        """Why the tensors of a group are not those of the rank that is here; nothing where they
        are.
        """
        theirs = self.metadata
        mine = {name: each for name, each in here.tensors.items() if split(name)[0] == group}
        there = {name: each for name, each in theirs.tensors.items() if split(name)[0] == group}
        for name in sorted(mine.keys() | there.keys()):
            if mine.get(name) != there.get(name):
                return (
                    f"{name} is {mine.get(name, 'unknown')} here on rank {here.rank} of "
                    f"{here.strategy}, in the shard of rank {theirs.rank} of {theirs.strategy} "
                    f"it is {there.get(name, 'unknown')}"
                )
        return ""


def _sharding(topology: Topology, held: Held) -> TensorSharding:
    dtype = dtype_of(held.name, held.local).name
    placements = {axis: str(placement) for axis, placement in held.placements.items()}
    part = held.part(topology)
    return TensorSharding(held.shape, dtype, placements, part.boxes)
