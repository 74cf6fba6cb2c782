"""What one rank holds of a model and its optimizers, with what it is a part of; and saving without
knowing how a model is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.names import WRAPPED, join, split
from ckptkit.live.agree import Documents
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.exchange import Exchange, Spoken
from ckptkit.live.handover import hand_over
from ckptkit.live.ranks import current_world
from ckptkit.live.resuming import nested
from ckptkit.live.snapshot import Snapshot, take_snapshot, topology_of
from ckptkit.live.state.parts import LiveTensor
from ckptkit.live.state.tensors import dtype_of, torch_dtype
from ckptkit.live.state.topology import Topology
from ckptkit.live.wrappers.entries import Saved, SavedState, parameter_names
from ckptkit.live.wrappers.training import TrainingState
from ckptkit.model import DTYPES, Box, Strategy


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


def _sharding(topology: Topology, held: LiveTensor) -> TensorSharding:
    dtype = dtype_of(held.name, held.local).name
    placements = {axis: str(placement) for axis, placement in held.placements.items()}
    part = held.part(topology)
    return TensorSharding(held.shape, dtype, placements, part.boxes)


@dataclass(frozen=True, slots=True)
class CheckpointHelper:
    """Takes a rank's shard of one kind of model, and gives it back.

    Whatever else a model is wrapped in is part of the shard too, so for a hybrid all helpers that
    recognise it do the same. Every rank makes the same calls.
    """

    name: str
    kinds: frozenset[str] = frozenset()
    """A model of this kind spreads over an axis of one of these kinds; without any, over none."""

    def recognises(self, model: object, optimizer: object = None) -> bool:
        """Whether a model or its optimizer is spread in this way."""
        return self._knows(_kinds(_sources_of(model, optimizer)))

    def collect_local_shard(self, model: object, optimizer: object = None) -> LocalShard:
        """What this rank holds, in live memory: copy it to keep it."""
        return LocalShard.of(take_snapshot(current_world(), self._sources(model, optimizer)))

    def load_local_shard(self, model: object, shard: LocalShard, optimizer: object = None) -> None:
        """Take over a shard of the same rank of a job of the same layout; where that is another on
        some rank, all raise, and the model has not changed.
        """
        world, sources = current_world(), self._sources(model, optimizer)
        exchange = Exchange(world, topology_of(world, sources))
        before = take_snapshot(world, TrainingState.of(model))
        problem = shard.objection(ShardingMetadata.of(before), "model")
        exchange.agree(Spoken(problem=problem or _other_kinds(sources, shard)))
        names, saved = parameter_names(before.entries), shard.saved_state()
        for each in sources.optimizers:
            each.prepare(names, saved)
        snapshot = take_snapshot(world, sources)
        here = ShardingMetadata.of(snapshot)
        problem = shard.objection(here, "optimizer") if sources.optimizers else ""
        exchange.agree(Spoken(problem=problem))
        with torch.no_grad():
            for held in snapshot.tensors:
                held.local.copy_(shard.tensors[held.name])
        hand_over(sources, snapshot, shard.values, shard.optimizers)

    def sharding_metadata(self, model: object, optimizer: object = None) -> ShardingMetadata:
        """What this rank's shard is a part of."""
        snapshot = take_snapshot(current_world(), self._sources(model, optimizer))
        return ShardingMetadata.of(snapshot)

    def _knows(self, kinds: set[str]) -> bool:
        return bool(kinds & self.kinds) if self.kinds else not kinds

    def _sources(self, model: object, optimizer: object) -> TrainingState:
        sources = _sources_of(model, optimizer)
        kinds = _kinds(sources)
        if not self._knows(kinds):
            raise UnsupportedTypeError(
                f"the helper for {self.name} is not for this model",
                value=", ".join(sorted(kinds)) or "nothing spreads it",
                hint="helper_for(model, optimizer) finds the right one",
            )
        return sources


# What cuts a model into modules comes before what is done to each of these.
HELPERS = {
    "pp": CheckpointHelper("stages of a pipeline", frozenset({"pp"})),
    "fsdp": CheckpointHelper("fully_shard and FSDP1 (ZeRO-2 and ZeRO-3)", frozenset({"fsdp"})),
    "tp": CheckpointHelper("tensor parallelism", frozenset({"tp"})),
    "zero1": CheckpointHelper("ZeroRedundancyOptimizer (ZeRO-1)", frozenset({"zero1"})),
    "ddp": CheckpointHelper("DistributedDataParallel", frozenset({"ddp"})),
    "plain": CheckpointHelper("a model that nothing spreads"),
}
"""By the axis that it is for."""

_FOREIGN = ("colossalai", "deepspeed", "fairscale", "megatron")


def helper_for(model: object, optimizer: object = None) -> CheckpointHelper:
    """The helper for the strategy of a model; only the optimizer tells ZeRO-1 from DDP."""
    sources = _sources_of(model, optimizer)
    _refuse_unknown(sources)
    kinds = _kinds(sources)
    return next(helper for helper in HELPERS.values() if helper._knows(kinds))


def save_distributed(
    checkpointer: Checkpointer,
    model: object,
    optimizer: object = None,
    *,
    step: int,
    **others: Any,
) -> Strategy | None:
    """Save a step of a model of any known strategy, with what else `Checkpointer.save` takes.

    Gives the strategy that was found; None where the checkpointer was busy and skipped the step.
    """
    sources = _sources_of(model, optimizer)
    _refuse_unknown(sources)
    strategy = topology_of(current_world(), sources, checkpointer.mesh).strategy
    saved = checkpointer.save(step, model=model, optimizer=optimizer, **others)
    return strategy if saved else None


def _sources_of(model: object, optimizer: object) -> TrainingState:
    if model is None:
        raise UnsupportedTypeError("not a model", value=None, hint="pass what is to be saved")
    return TrainingState.of(model, optimizer)


def _kinds(sources: TrainingState) -> set[str]:
    """The kinds of axes over which a model and its optimizers are spread."""
    found = {line.kind for each in sources.optimizers for line in each.lines()}
    if sources.model is not None:
        found |= {line.kind for line in sources.model.lines()}
        found |= {"pp"} if sources.model.is_staged else set()
    return found


def _refuse_unknown(sources: TrainingState) -> None:
    modules: list[nn.Module] = [] if sources.model is None else sources.model.modules
    for module in (inner for outer in modules for inner in outer.modules()):
        library = type(module).__module__.partition(".")[0]
        if isinstance(module, DataParallel):
            raise UnsupportedTypeError(
                "DataParallel copies a model to several devices of one process: nothing is spread",
                value=type(module).__name__,
                hint="pass its `.module`, or use DistributedDataParallel",
            )
        if library in _FOREIGN:
            raise UnsupportedTypeError(
                f"how {library} spreads a model is not known here",
                value=type(module).__name__,
                hint="known are DistributedDataParallel, fully_shard, FullyShardedDataParallel, "
                "ZeroRedundancyOptimizer, parallelize_module and torch.distributed.pipelining",
            )


def _other_kinds(sources: TrainingState, shard: LocalShard) -> str:
    mine = ", ".join(each.kind for each in sources.optimizers)
    there = ", ".join(document["kind"] for document in shard.optimizers)
    if not mine or mine == there:
        return ""
    return f"the optimizer here is {mine}, the shard has the state of {there or 'none'}"
