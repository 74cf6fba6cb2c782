"""A model and its optimizers as ranks have them: what this rank holds with what that is a part of,
for any strategy, and the whole on rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import UnsupportedTypeError
from ckptkit.format.names import WRAPPED, in_group, join, split
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.comparison import Report
from ckptkit.live.exchange import Exchange
from ckptkit.live.resume import completed, hand_over, made_of, trained_by
from ckptkit.live.snapshot import Snapshot, take_snapshot, topology_of
from ckptkit.live.state.entries import Saved, SavedState, StateMismatchError
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.ranks import Documents, current_world, meeting
from ckptkit.live.state.tensors import dtype_of, torch_dtype
from ckptkit.live.wrappers import Model, Training
from ckptkit.model import DTYPES, Box, Strategy

StateDict: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TensorSharding:
    """How a tensor is cut, and what of it this rank holds."""

    shape: tuple[int, ...]
    """The shape of the whole tensor."""
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
    made: Mapping[str, Any] = field(default_factory=dict)
    """Of tensors that are made of others what they are, by name; the others are among `tensors`."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalShard:
    """What one rank holds; its tensors are the live ones where those lie as they are saved."""

    metadata: ShardingMetadata
    tensors: Mapping[str, torch.Tensor]
    values: Mapping[str, Any]
    """What `get_extra_state` gave, by name."""
    optimizers: Documents
    """Of each optimizer its kind, its groups with their options, and values that are no tensors."""

    def saved_state(self) -> SavedState:
        """What it has of optimizers, by parameter and key."""
        found: dict[str, dict[str, Saved]] = {name: {} for name in trained_by(self.optimizers)}
        tensors = self.metadata.tensors
        for name, each in tensors.items():
            if name.startswith("optimizer/"):
                _, parameter, key = split(name)
                of = tensors.get(join("model", parameter))
                alike = of is not None and of.shape == each.shape
                item = Saved(each.shape, torch_dtype(DTYPES[each.dtype]), alike)
                found.setdefault(parameter, {})[key] = item
        made = made_of(self.metadata.made)
        return {
            name: completed(kept, made.get(name, {}), self.optimizers, name)
            for name, kept in found.items()
        }

    def objection(self, here: ShardingMetadata, group: str) -> str:
        """Why the tensors of a group are not those of the rank that is here; nothing where they
        are.
        """
        theirs = self.metadata
        mine, there = (
            {n: each for n, each in (*of.tensors.items(), *of.made.items()) if split(n)[0] == group}
            for of in (here, theirs)
        )
        for name in sorted(mine.keys() | there.keys()):
            if mine.get(name) != there.get(name):
                return (
                    f"{name} is {mine.get(name, 'unknown')} here on rank {here.rank} of "
                    f"{here.strategy}, in the shard of rank {theirs.rank} of {theirs.strategy} "
                    f"it is {there.get(name, 'unknown')}"
                )
        return ""


_FOREIGN = ("colossalai", "deepspeed", "fairscale", "megatron")


class DistributedModel:
    """A model that ranks have together, by the names that it has without wrappers, and its
    optimizer.

    Every rank has one, and all make the same calls; an error of one is raised on all. State is a
    dictionary of tensors, and of what `get_extra_state` gives; a shard has what optimizers keep
    too, and says what it is a part of. How the model is spread is read off it at each call.

    Whatever takes a model takes this, and then knows its mesh and rules too. It is made of a model
    wrapped in whatever way a Checkpointer saves, or of what `as_distributed` returned.
    """

    def __init__(
        self,
        model: object,
        optimizer: object = None,
        *,
        mesh: DeviceMesh | None = None,
        rules: RulesLike | None = None,
    ) -> None:
        known, said = Model(model), HandCuts.of(rules)
        _refuse_unknown(known.modules)
        self.model: Any = model
        """What was passed."""
        self.mesh = known.mesh if mesh is None else mesh
        self.rules = said if said.said else known.rules
        self._optimizer = optimizer
        self._world = current_world()
        topology = topology_of(self._world, self._training(), self.mesh)
        self._exchange = Exchange(self._world, topology)
        self.strategy = topology.strategy
        """How it is spread; only the optimizer tells ZeRO-1 from DDP."""
        self.world_size = self._world.size
        self.rank = self._world.rank

    def local_shard(self) -> LocalShard:
        """What this rank holds of model and optimizer, in live memory: copy it to keep it."""
        training = self._training()
        snapshot = self._snapshot(training)
        tensors = {held.name: held.local for held in snapshot.tensors}
        metadata = _metadata(snapshot, training)
        return LocalShard(metadata, tensors, snapshot.values, snapshot.optimizers)

    def load_local_shard(self, shard: LocalShard) -> None:
        """Take over a shard of the same rank of a job of the same layout; where that is another on
        some rank, all raise, and the model has not changed.
        """
        with self._meeting() as ranks:
            training = self._training()
            before = self._snapshot(replace(training, optimizers=()))
            problem = shard.objection(_metadata(before, training), "model")
            mine = ", ".join(each.kind for each in training.optimizers)
            there = ", ".join(document["kind"] for document in shard.optimizers)
            if not problem and mine and mine != there:
                problem = f"the optimizer here is {mine}, "
                problem += f"the shard has the state of {there or 'none'}"
            ranks.wait()
            self._exchange.agree({}, problem=problem)
            names, saved = training.names(before.entries), shard.saved_state()
            for each in training.optimizers:
                each.prepare(names, saved)
            ranks.wait()  # of FSDP1 the optimizer is looked at in a collective
            snapshot = self._snapshot(training)
            here = _metadata(snapshot, training)
            problem = shard.objection(here, "optimizer") if training.optimizers else ""
            ranks.wait()
            self._exchange.agree({}, problem=problem)
            with torch.no_grad():
                for held in snapshot.tensors:
                    held.local.copy_(shard.tensors[held.name])
            hand_over(training, snapshot, shard.values, shard.optimizers)

    def local_state_dict(self) -> StateDict:
        """What this rank holds, in the model's own memory where it has it as it is."""
        _, held, tied, values = self._look(Training(Model(self.model)))
        tensors = {name: each.local for name, each in held.items()}
        return tensors | {name: tensors[of] for name, of in tied.items()} | values

    def full_state_dict(self) -> StateDict | None:
        """All of it, in host memory, on rank 0; None on the others."""
        with self._meeting() as ranks:
            _, held, tied, values = self._look(Training(Model(self.model)))
            ranks.wait()
            plan = self._exchange.agree(held, values=values, tied=tied)
            tensors = self._exchange.gather(plan, held)
        if tensors is None:
            return None
        return tensors | {name: tensors[of] for name, of in plan.tied.items()} | plan.values

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `local_state_dict` gave on this rank of a job of the same layout."""
        with self._meeting() as ranks:
            training = Training(Model(self.model))
            snapshot, held, tied, values = self._look(training)
            known = {n: (tuple(h.local.shape), h.local.dtype) for n, h in held.items()}
            problem = _objection(known, tied, values, state)
            ranks.wait()
            self._exchange.agree({}, problem=problem)
            with torch.no_grad():
                for name, each in held.items():
                    each.local.copy_(_tensor(state, name, tied))
            hand_over(training, snapshot, {name: state[name] for name in values}, [])

    def load_full_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Take over what rank 0 has of `full_state_dict`; what others pass is ignored."""
        with self._meeting() as ranks:
            training = Training(Model(self.model))
            snapshot, held, tied, values = self._look(training)
            ranks.wait()
            plan = self._exchange.agree(held, values=values, tied=tied)
            given: StateDict = {}
            if state is None:
                problem = "rank 0 has to pass the whole state"
            else:
                known = {n: (s[0].shape, s[0].torch_dtype) for n, s in plan.tensors.items()}
                problem = _objection(known, plan.tied, plan.values, state)
                given = {} if problem else {name: state[name] for name in plan.values}
            ranks.wait()
            problem, given = self._exchange.from_first((problem, given))
            if problem:
                raise StateMismatchError(problem)
            wholes = {}
            if self._world.rank == 0 and state is not None:
                wholes = {name: _tensor(state, name, plan.tied) for name in plan.tensors}
            self._exchange.hand_out(plan, held, wholes)
            hand_over(training, snapshot, given, [])

    def _meeting(self) -> AbstractContextManager[Ranks]:
        """Ranks, to be waited for before each collective: one that has failed would not come."""
        return meeting(self._world, "model", failure="the state of the model did not move")

    def _training(self) -> Training:
        return Training.of(model=self.model, optimizer=self._optimizer)

    def _snapshot(self, training: Training) -> Snapshot:
        return take_snapshot(self._world, training, mesh=self.mesh, rules=self.rules)

    def _look(
        self, training: Training
    ) -> tuple[Snapshot, dict[str, LiveTensor], dict[str, str], StateDict]:
        """What this rank has, by the names that the model's author gave: tensors, second names of
        such, and other values.
        """
        snapshot = self._snapshot(training)
        names = {join("model", entry.name): entry.name for entry in snapshot.entries}
        held = {names[each.name]: each for each in snapshot.tensors}
        tied = {names[name]: names[of] for name, of in snapshot.tied.items()}
        tensors = held.keys() | tied.keys()
        others = {e.name: e.value for e in snapshot.entries if e.name not in tensors}
        return snapshot, held, tied, others


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
    strategy = DistributedModel(model, optimizer, mesh=checkpointer.mesh).strategy
    saved = checkpointer.save(step, model=model, optimizer=optimizer, **others)
    return strategy if saved else None


def _refuse_unknown(modules: Sequence[nn.Module]) -> None:
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


def _metadata(snapshot: Snapshot, training: Training) -> ShardingMetadata:
    """What the snapshot of a rank is a part of."""
    topology = snapshot.topology
    tensors: dict[str, TensorSharding] = {}
    for held in snapshot.tensors:
        dtype = dtype_of(held.name, held.local).name
        placements = {axis: str(placement) for axis, placement in held.placements.items()}
        boxes = held.part(topology).boxes
        tensors[held.name] = TensorSharding(held.shape, dtype, placements, boxes)
    return ShardingMetadata(
        str(topology.strategy),
        topology.rank,
        topology.strategy.world_size,
        training.details(),
        tensors,
        snapshot.tied,
        in_group(WRAPPED, snapshot.objects),
    )


def _objection(
    known: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tied: Mapping[str, str],
    values: Mapping[str, Any],
    state: Mapping[str, Any],
) -> str:
    """How a state differs from the shapes and dtypes here; nothing where it does not."""
    report = Report(unexpected=sorted(state.keys() - known.keys() - tied.keys() - values.keys()))
    report.missing += sorted(values.keys() - state.keys())
    for name, (shape, dtype) in known.items():
        tensor = _tensor(state, name, tied)
        if tensor is None:
            report.missing.append(name)
        elif not torch.is_tensor(tensor) or isinstance(tensor, DTensor):
            report.unexpected.append(f"{name}, which is a {type(tensor).__name__}")
        elif tuple(tensor.shape) != shape:
            report.reshaped.append(f"{name}: {tuple(tensor.shape)}, here {shape}")
        elif tensor.dtype != dtype:
            report.cast.append(f"{name}: {tensor.dtype}, here {dtype}")
    return "" if report.is_exact else f"the state does not fit\n{report}"


def _tensor(state: Mapping[str, Any], name: str, tied: Mapping[str, str]) -> Any:
    """A tensor under any of its names; None where the state has it under none."""
    names = [name, *(other for other, of in tied.items() if of == name)]
    return next((state[each] for each in names if each in state), None)
