"""The state that an optimizer keeps on this rank, parameter by parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.errors import CkptkitError, LayoutError, UnsupportedTypeError, UsageError
from ckptkit.format.names import join
from ckptkit.live.exchange import Exchange
from ckptkit.live.snapshot import Collector, rules_of, topology_of
from ckptkit.live.state.entries import (
    ModelEntry,
    StateEntry,
    canonical_names,
    every_module,
)
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.ranks import World, current_world
from ckptkit.live.state.tensors import local_of, parts_of_tensor
from ckptkit.live.wrappers import Training
from ckptkit.live.wrappers.fsdp1 import FlatPart, FSDP1Optimizer
from ckptkit.live.wrappers.optimizers import PlainOptimizer, fresh_state

State = dict[str, Any]

_NOT_ALONE = "its state is a part of that of a flat parameter"


class ShardedOptimizerState:
    """What an optimizer keeps for each parameter of a model: on every rank its own shard.

    Names are those of the model without wrappers. What `get` gives is the optimizer's own memory,
    and what is created or removed here is so in the optimizer. Every rank makes one; `create`,
    `gather` and `scatter` may communicate, so all ranks call them alike.

    `model` may also be parameters: one, a list of them (whose names are then their numbers), or
    pairs of name and parameter. With `group` the job is the ranks of that process group.

        state = ShardedOptimizerState(model, optimizer)
        whole = state.gather("layers.0.up.weight")  # on rank 0, None on the others
        state.scatter("layers.0.up.weight", whole)
    """

    def __init__(
        self,
        model: object,
        optimizer: Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        rules: RulesLike | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        given = _given(model)
        training = Training.of(model=model if given is None else given, optimizer=optimizer)
        assert training.model is not None  # noqa: S101 — just passed
        self._adapter = training.optimizers[0]
        self.kind = self._adapter.kind
        """The class of the optimizer, of the one inside where it is wrapped."""
        world = current_world() if group is None else _world_of(group)
        self.rank = world.rank
        """The number of this rank."""
        self._topology = topology_of(world, training, mesh)
        self.strategy = self._topology.strategy
        """How the job spreads it: the kind of each axis, and its size."""
        axes = self.strategy.mesh.axes
        self.shards = math.prod(axis.size for axis in axes if axis.kind != "ddp")
        """Over how many ranks it is cut or shared out; replicas are not counted."""
        self._exchange = Exchange(world, self._topology, group)
        self._rules = rules_of(training, HandCuts.of(rules))
        self._is_staged = training.model.is_staged
        stepped = {p for g in optimizer.param_groups for p in g["params"]}
        self._parts: dict[str, FlatPart | _OwnPart] = {}
        if isinstance(self._adapter, FSDP1Optimizer):
            flat_parts = self._adapter.flat_parts
            self._parts |= flat_parts
            inside = {part.piece.holder for part in flat_parts.values()}
            entries = []  # of those that lie in no flat one
            for module in training.model.modules:
                canonical = canonical_names(every_module(module))
                entries += [
                    ModelEntry(canonical(name), parameter, is_parameter=True)
                    for name, parameter in module.named_parameters()
                    if parameter not in inside and not isinstance(parameter, FlatParameter)
                ]
        else:
            entries = [e for e in training.model.entries() if isinstance(e.value, nn.Parameter)]
        first = training.names(entries)
        if given is None:
            self._adapter.names_of(first, list(stepped))  # refuses those of another model
        elif unknown := [e.name for e in entries if e.value not in stepped]:
            raise UsageError("the optimizer does not step this parameter", where=unknown[0])
        for e in entries:
            if e.value in stepped:
                self._parts[e.name] = _OwnPart(self._adapter, e, first[e.value])

    @property
    def names(self) -> list[str]:
        """What the optimizer steps of this rank's model, tied parameters under their first name."""
        return [name for name, part in self._parts.items() if part.name == name]

    def has(self, name: str) -> bool:
        """Whether this rank keeps anything for a parameter."""
        part = self._part(name)
        return bool(self._adapter.state.get(part.parameter)) and part.is_kept_here

    def get(self, name: str) -> State:
        """What this rank keeps for a parameter, its tensors in the optimizer's own memory: with
        FSDP1 the elements that it has, in one dim.

        Nothing before the first step, nor where another rank keeps it.
        """
        if not self.has(name):
            return {}
        part = self._part(name)
        return {
            key: part.elements(local_of(value)) if torch.is_tensor(value) else value
            for key, value in self._adapter.state[part.parameter].items()
        }

    def create(self, name: str) -> State:
        """Make what the optimizer keeps for a parameter, as a first step without gradient would;
        nothing where another rank is to keep it. A flat parameter of FSDP1 gets it as a whole.
        """
        if self.has(name):
            raise UsageError("there is state already", where=name, hint="remove it first")
        part = self._part(name)
        if part.is_kept_here and (fresh := fresh_state(self._adapter.stepping, part.parameter)):
            self._adapter.state[part.parameter] = fresh
        return self.get(name)

    def put(self, name: str, values: Mapping[str, Any]) -> None:
        """Take over what `get` gave for a parameter, on this rank of a job of the same layout; what
        is not there yet is created, and where that was nothing, what there is is removed.
        """
        had = self.has(name)
        if not values:
            if had:
                self.remove(name)
            return
        mine = self.get(name) if had else self.create(name)
        here, given = (
            {key: tuple(each.shape) if torch.is_tensor(each) else None for key, each in of.items()}
            for of in (mine, values)
        )
        # Compared before anything is copied, which would repeat what is too small.
        if here.keys() != given.keys() or any(given[key] not in (None, here[key]) for key in given):
            if not had:
                self._adapter.state.pop(self._part(name).parameter, None)
            raise LayoutError("the optimizer keeps other things", where=name, value=(here, given))
        plain = {key: value for key, value in values.items() if not torch.is_tensor(value)}
        for key in values.keys() - plain.keys():
            mine[key].copy_(values[key])
        # Only tensors are the optimizer's own memory in `mine`.
        self._part(name).take([], plain)

    def remove(self, name: str) -> None:
        """Forget what this rank keeps for a parameter, if it does."""
        part = self._part(name)
        if not part.is_alone:
            raise UsageError(
                _NOT_ALONE,
                where=name,
                hint="release() forgets all; FSDP with use_orig_params=True keeps them apart",
            )
        self._adapter.state.pop(part.parameter, None)

    def release(self) -> None:
        """Forget everything: the memory is free, and the optimizer as before its first step."""
        for part in self._parts.values():
            self._adapter.state.pop(part.parameter, None)

    def clone(self) -> ShardedOptimizerState:
        """A copy in memory of its own, which no optimizer steps."""
        twin, adapter = copy.copy(self), cast("Any", copy.copy(self._adapter))
        stepped = dict.fromkeys(part.parameter for part in self._parts.values())
        adapter.copied = {
            parameter: {
                key: value.detach().clone() if torch.is_tensor(value) else copy.deepcopy(value)
                for key, value in self._adapter.state[parameter].items()
            }
            for parameter in stepped
            if self._adapter.state.get(parameter)
        }
        twin._adapter = adapter
        twin._parts = {n: replace(part, adapter=adapter) for n, part in self._parts.items()}
        return twin

    def gather(self, name: str) -> State | None:
        """The whole state of a parameter, in host memory, on rank 0; None on the others.

        It is empty where no rank keeps any.
        """
        held, values, _ = self._held(name)
        is_involved = name in self._parts
        plan = self._exchange.agree(held, values=values, is_involved=is_involved, where=name)
        tensors = self._exchange.gather(plan, held)
        return None if tensors is None else tensors | plan.values

    def scatter(self, name: str, full: Mapping[str, Any] | None = None) -> None:
        """Take over the whole state of a parameter that rank 0 passes, as its `gather` gives it;
        what other ranks pass is ignored. An empty one removes what there is.

        Where it is the state of another kind of optimizer or of a parameter of another shape,
        every rank raises and nothing has changed. What is no tensor, and steps that are counted
        in one, a flat parameter of FSDP1 has once: the last that it was given counts.
        """
        # Rank 0 tells what is wrong with its state, the tensors, and the rest.
        problem, wholes, others = "", dict[str, str](), State()
        if full is None:
            problem = "rank 0 has to pass the whole state; an empty one removes what there is"
        elif any(isinstance(value, DTensor) for value in full.values()):
            problem = "the state has DTensors; pass whole tensors: value.full_tensor()"
        else:
            wholes = {k: _whole(v.shape, v.dtype) for k, v in full.items() if torch.is_tensor(v)}
            others = {key: value for key, value in full.items() if key not in wholes}
        problem, wholes, others = self._exchange.from_first((problem, wholes, others))
        if problem:
            raise UsageError(problem, where=name)
        offered: State = wholes | others
        part = self._parts.get(name)
        knows, keeps = part is not None, part is not None and part.is_kept_here
        if not offered:
            problem = "" if part is None or part.is_alone else _NOT_ALONE
            self._exchange.agree({}, problem=problem, is_involved=knows, where=name)
            if knows:
                self.remove(name)
            return
        # Made before the ranks agree, as only what is there says whether the state fits; taken back
        # where they do not.
        made = keeps and not self.has(name)
        if made:
            self.create(name)
        held, values, entries = self._held(name)
        if keeps:
            problem = self._objection(offered, wholes, held, values)
        try:
            plan = self._exchange.agree(held, problem=problem, is_involved=knows, where=name)
        except CkptkitError:
            if made and part is not None:
                self._adapter.state.pop(part.parameter, None)
            raise
        self._exchange.hand_out(plan, held, full or {})
        if part is not None:
            part.take(entries, {key: copy.deepcopy(offered[key]) for key in values})

    def _part(self, name: str) -> FlatPart | _OwnPart:
        if name not in self._parts:
            raise UsageError(
                "the optimizer steps no parameter of this name on this rank",
                value=name,
                hint=f"such as {', '.join(self.names[:3])}; a stage has only its own parameters",
            )
        return self._parts[name]

    def _held(self, name: str) -> tuple[dict[str, LiveTensor], State, list[StateEntry]]:
        """The tensors that this rank keeps for a parameter as the job holds them, and the rest;
        and what they were read from. A collective where FSDP1 has cut it.
        """
        part = self._parts.get(name)
        if part is None:
            return {}, {}, []
        reading = Collector(self._topology, self._rules, has_stages=self._is_staged)
        if isinstance(part, _OwnPart):
            reading.add_model([part.entry])
        found = part.entries()
        reading.add_optimizer(found)
        for each in found:
            if torch.is_tensor(each.value) and parts_of_tensor(each.value):
                raise UnsupportedTypeError(
                    "a tensor made of others cannot be gathered or scattered",
                    where=join("optimizer", each.parameter, each.key),
                    hint="save and load it with a Checkpointer",
                )
        by_name = {held.name: held for held in reading.tensors}
        tensors = {
            e.key: by_name[join("optimizer", e.parameter, e.key)]
            for e in found
            if torch.is_tensor(e.value)
        }
        return tensors, {e.key: e.value for e in found if e.key not in tensors}, found

    def _objection(
        self,
        offered: State,
        wholes: Mapping[str, str],
        held: Mapping[str, LiveTensor],
        values: State,
    ) -> str:
        """Why what rank 0 has is no state of this parameter here; nothing where it is one."""
        mine = sorted({*held, *values})
        if sorted(offered) != mine:
            keeps = ", ".join(mine) or "nothing for this parameter"
            there = ", ".join(sorted(offered))
            return f"no state of {self.kind}, which keeps {keeps}: rank 0 has {there}"
        for key in offered:
            here = _whole(held[key].shape, held[key].local.dtype) if key in held else ""
            given = wholes.get(key, "")
            if here != given:
                return f"{key} is {here or 'no tensor'} here, rank 0 has {given or 'no tensor'}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class _OwnPart:
    """What an optimizer has on this rank of a parameter that it steps itself; a `FlatPart` is what
    it has of one that lies in a flat one.
    """

    adapter: PlainOptimizer
    entry: ModelEntry
    name: str
    """The first, where it has several."""

    is_alone: ClassVar[bool] = True

    @property
    def parameter(self) -> nn.Parameter:
        parameter: nn.Parameter = self.entry.value
        return parameter

    @property
    def is_kept_here(self) -> bool:
        return self.adapter.keeps(self.parameter)

    def elements(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def entries(self) -> list[StateEntry]:
        name, parameter = self.entry.name, self.parameter
        state = self.adapter.state.get(parameter, {})
        return [self.adapter.entry(name, key, value, parameter) for key, value in state.items()]

    def take(self, _: Sequence[StateEntry], values: State) -> None:
        if values:
            self.adapter.state[self.parameter] |= values


def _whole(shape: Sequence[int], dtype: torch.dtype) -> str:
    """What rank 0 says of a tensor before it hands it out."""
    return f"{dtype} {tuple(shape)}"


def _given(model: object) -> nn.Module | None:
    """Parameters that were passed instead of a model, as one; None where it is a model."""
    if isinstance(model, nn.Parameter):
        model = [model]
    if isinstance(model, Mapping):
        model = list(model.items())
    elif isinstance(model, Iterator):
        model = list(model)
    if not isinstance(model, (list, tuple)) or not model:
        return None
    if all(isinstance(each, nn.Parameter) for each in model):
        model = [(str(number), each) for number, each in enumerate(model)]
    if not all(isinstance(each, tuple) and isinstance(each[-1], nn.Parameter) for each in model):
        return None
    if any(isinstance(parameter, FlatParameter) for _, parameter in model):
        raise UnsupportedTypeError(
            "a flat parameter of FSDP1 does not say how it is cut", hint="pass its model"
        )
    found = nn.Module()
    # Not by register_parameter, which takes no dots.
    found._parameters.update(dict(model))
    return found


def _world_of(group: dist.ProcessGroup) -> World:
    if not isinstance(group, dist.ProcessGroup):  # what new_group gives to the other ranks
        raise UsageError("this rank is not in the process group", where="group")
    ranks = dist.get_process_group_ranks(group)
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        raise UsageError(
            "the ranks of the group are not numbered one after another",
            where="group",
            value=ranks,
            hint="leave group= out: what is spread over some of the job's ranks is seen from "
            "the model",
        )
    return World(group.rank(), len(ranks))
