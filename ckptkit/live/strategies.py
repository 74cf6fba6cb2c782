"""One checkpoint helper for each strategy, and saving without knowing which it is."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn.parallel import DataParallel

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.exchange import Exchange, Spoken
from ckptkit.live.handover import hand_over
from ckptkit.live.ranks import current_world
from ckptkit.live.shards import LocalShard, ShardingMetadata
from ckptkit.live.snapshot import Sources, parameter_names, take_snapshot, topology_of
from ckptkit.model import Strategy


class CheckpointHelper(Protocol):
    """Takes a rank's shard of one kind of model, and gives it back.

    Whatever else a model is wrapped in is part of the shard too, so for a hybrid all helpers that
    recognise it do the same. Every rank makes the same calls.
    """

    def recognises(self, model: object, optimizer: object = None) -> bool:
        """Whether a model is spread in this way."""

    def collect_local_shard(self, model: object, optimizer: object = None) -> LocalShard:
        """What this rank holds, in live memory: copy it to keep it."""

    def load_local_shard(self, model: object, shard: LocalShard, optimizer: object = None) -> None:
        """Take over a shard of the same rank of a job of the same layout."""

    def sharding_metadata(self, model: object, optimizer: object = None) -> ShardingMetadata:
        """What this rank's shard is a part of."""


class PlainHelper:
    """For a model that nothing spreads: every rank has the whole of it."""

    kinds: ClassVar[frozenset[str]] = frozenset()
    """A model of this kind spreads over an axis of one of these kinds."""

    def recognises(self, model: object, optimizer: object = None) -> bool:
        """Whether the model or its optimizer spreads over such an axis."""
        return self._knows(_kinds(_sources_of(model, optimizer)))

    def collect_local_shard(self, model: object, optimizer: object = None) -> LocalShard:
        """What this rank holds, in live memory: copy it to keep it."""
        return LocalShard.of(take_snapshot(current_world(), self._sources(model, optimizer)))

    def load_local_shard(self, model: object, shard: LocalShard, optimizer: object = None) -> None:
        """Take over a shard; where its layout is another on some rank, all raise, and the model
        has not changed.
        """
        world, sources = current_world(), self._sources(model, optimizer)
        exchange = Exchange(world, topology_of(world, sources))
        before = take_snapshot(world, Sources.of(model))
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

    def _sources(self, model: object, optimizer: object) -> Sources:
        sources = _sources_of(model, optimizer)
        kinds = _kinds(sources)
        if not self._knows(kinds):
            raise UnsupportedTypeError(
                f"{type(self).__name__} is not for this model",
                value=", ".join(sorted(kinds)) or "nothing spreads it",
                hint="helper_for(model, optimizer) finds the right one",
            )
        return sources


class DDPHelper(PlainHelper):
    """For `DistributedDataParallel`."""

    kinds = frozenset({"ddp"})


class FSDPHelper(PlainHelper):
    """For `fully_shard` and `FullyShardedDataParallel`: ZeRO of stage 2 or 3."""

    kinds = frozenset({"fsdp"})


class ZeroHelper(PlainHelper):
    """For `ZeroRedundancyOptimizer`: ZeRO of stage 1."""

    kinds = frozenset({"zero1"})


class TensorParallelHelper(PlainHelper):
    """For `parallelize_module`, and DTensors made by hand."""

    kinds = frozenset({"tp"})


class PipelineHelper(PlainHelper):
    """For stages and schedules of `torch.distributed.pipelining`."""

    kinds = frozenset({"pp"})


# What cuts a model into modules comes before what is done to each of these.
_HELPERS: tuple[PlainHelper, ...] = (
    PipelineHelper(),
    FSDPHelper(),
    TensorParallelHelper(),
    ZeroHelper(),
    DDPHelper(),
    PlainHelper(),
)
_FOREIGN = ("colossalai", "deepspeed", "fairscale", "megatron")


def helper_for(model: object, optimizer: object = None) -> CheckpointHelper:
    """The helper for the strategy of a model; only the optimizer tells ZeRO-1 from DDP."""
    sources = _sources_of(model, optimizer)
    _refuse_unknown(sources)
    kinds = _kinds(sources)
    return next(helper for helper in _HELPERS if helper._knows(kinds))


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


def _sources_of(model: object, optimizer: object) -> Sources:
    if model is None:
        raise UnsupportedTypeError("not a model", value=None, hint="pass what is to be saved")
    return Sources.of(model, optimizer)


def _kinds(sources: Sources) -> set[str]:
    """The kinds of axes over which a model and its optimizers are spread."""
    found = {group.kind for each in sources.optimizers for group in each.groups()}
    if sources.model is not None:
        found |= {group.kind for group in sources.model.groups()}
        found |= {"pp"} if sources.model.is_staged else set()
    return found


def _refuse_unknown(sources: Sources) -> None:
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


def _other_kinds(sources: Sources, shard: LocalShard) -> str:
    mine = ", ".join(each.kind for each in sources.optimizers)
    there = ", ".join(document["kind"] for document in shard.optimizers)
    if not mine or mine == there:
        return ""
    return f"the optimizer here is {mine}, the shard has the state of {there or 'none'}"
