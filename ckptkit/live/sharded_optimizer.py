"""The state that an optimizer keeps on this rank, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckptkit.errors import CkptkitError, UnsupportedTypeError, UsageError
from ckptkit.format.names import join
from ckptkit.live.adapters import Entry
from ckptkit.live.exchange import Exchange
from ckptkit.live.held import Held
from ckptkit.live.optimizers.adapter import OptimizerAdapter
from ckptkit.live.optimizers.fresh import fresh_state
from ckptkit.live.optimizers.fsdp1 import FSDP1Optimizer
from ckptkit.live.optimizers.plain import PlainOptimizer
from ckptkit.live.optimizers.zero1 import Zero1Optimizer
from ckptkit.live.rules import HandCuts, RulesLike
from ckptkit.live.snapshot import Reading, Sources, parameter_names, topology_of
from ckptkit.live.tensors import local_of
from ckptkit.live.world import current_world
from ckptkit.live.wrapped import parts_of_tensor
from ckptkit.model import Owner

State = dict[str, Any]


class ShardedOptimizerState:
    """What an optimizer keeps for each parameter of a model: on every rank its own shard.

    Names are those of the model without wrappers. What `get` gives is the optimizer's own memory,
    and what is created or removed here is so in the optimizer. Every rank makes one; `create`,
    `gather` and `scatter` may communicate, so all ranks call them alike.
    """

    def __init__(
        self,
        model: object,
        optimizer: Optimizer,
        *,
        mesh: DeviceMesh | None = None,
        rules: RulesLike | None = None,
    ) -> None:
        sources = Sources.of(model, optimizer)
        assert sources.model is not None  # noqa: S101 — just passed
        self._adapter = _by_parameter(sources.optimizers[0])
        is_wrapped = isinstance(self._adapter, Zero1Optimizer)
        self._stepping: Optimizer = cast("Any", optimizer).optim if is_wrapped else optimizer
        self._states: MutableMapping[nn.Parameter, State] = self._adapter.state
        world = current_world()
        self._topology = topology_of(world, sources, mesh)
        self._exchange = Exchange(world, self._topology)
        self._rules = HandCuts.of(rules)
        self._is_staged = sources.model.is_staged
        entries = [e for e in sources.model.entries() if isinstance(e.value, nn.Parameter)]
        self._first = parameter_names(entries)
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        self._entries: dict[str, Entry] = {e.name: e for e in entries if e.value in stepped}

    @property
    def names(self) -> list[str]:
        """What the optimizer steps of this rank's model, tied parameters under their first name."""
        return [name for name, e in self._entries.items() if self._first[e.value] == name]

    def has(self, name: str) -> bool:
        """Whether this rank keeps anything for a parameter."""
        return bool(self._states.get(self._parameter(name)))

    def get(self, name: str) -> State:
        """What this rank keeps for a parameter, its tensors in the optimizer's own memory.

        Nothing before the first step, nor where another rank keeps it.
        """
        state = self._states.get(self._parameter(name), {})
        return {k: local_of(v) if torch.is_tensor(v) else v for k, v in state.items()}

    def create(self, name: str) -> State:
        """Make what the optimizer keeps for a parameter, as a first step without gradient would;
        nothing where another rank is to keep it.
        """
        if self.has(name):
            raise UsageError("there is state already", where=name, hint="remove it first")
        if self._keeps(name):
            parameter = self._parameter(name)
            fresh = fresh_state(self._stepping, parameter)
            if fresh:
                self._states[parameter] = fresh
        return self.get(name)

    def remove(self, name: str) -> None:
        """Forget what this rank keeps for a parameter, if it does."""
        self._states.pop(self._parameter(name), None)

    def release(self) -> None:
        """Forget everything: the memory is free, and the optimizer as before its first step."""
        for name in self.names:
            self.remove(name)

    def clone(self) -> ShardedOptimizerState:
        """A copy in memory of its own, which no optimizer steps."""
        twin = copy.copy(self)
        twin._states = {
            self._parameter(name): {
                key: value.detach().clone() if torch.is_tensor(value) else copy.deepcopy(value)
                for key, value in self._states[self._parameter(name)].items()
            }
            for name in self.names
            if self.has(name)
        }
        return twin

    def gather(self, name: str) -> State | None:
        """The whole state of a parameter, in host memory, on rank 0; None on the others.

        It is empty where no rank keeps any.
        """
        held, values = self._held(name)
        knows = name in self._entries
        plan = self._exchange.agree(
            self._exchange.speak(held, values=values, is_involved=knows), name
        )
        tensors = self._exchange.gather(plan, held)
        return None if tensors is None else tensors | plan.values

    def scatter(self, name: str, full: Mapping[str, Any] | None = None) -> None:
        """Take over the whole state of a parameter that rank 0 passes, as its `gather` gives it;
        what other ranks pass is ignored. An empty one removes what there is.

        Where it is the state of another kind of optimizer or of a parameter of another shape,
        every rank raises and nothing has changed.
        """
        offered = self._exchange.from_first(_offer(full))
        if isinstance(offered, str):
            raise UsageError(offered, where=name)
        keeps, knows = self._keeps(name), name in self._entries
        made = bool(offered) and keeps and not self.has(name)
        if made:
            self.create(name)
        held, values = self._held(name) if offered else ({}, {})
        problem = self._objection(offered, held, values) if offered and keeps else ""
        try:
            plan = self._exchange.agree(
                self._exchange.speak(held, problem=problem, is_involved=knows), name
            )
        except CkptkitError:
            if made:
                self.remove(name)
            raise
        if knows and not offered:
            self.remove(name)
        self._exchange.hand_out(plan, held, full or {})
        if values:
            mine = self._states[self._parameter(name)]
            mine |= {key: copy.deepcopy(offered[key]) for key in values}

    def _parameter(self, name: str) -> nn.Parameter:
        if name not in self._entries:
            raise UsageError(
                "the optimizer steps no parameter of this name on this rank",
                value=name,
                hint=f"such as {', '.join(self.names[:3])}; a stage has only its own parameters",
            )
        parameter: nn.Parameter = self._entries[name].value
        return parameter

    def _keeps(self, name: str) -> bool:
        """Whether the state of a parameter, or a shard of it, is this rank's to keep."""
        if name not in self._entries:
            return False
        parameter = self._parameter(name)
        entry = self._adapter.entry(name, "", parameter, parameter)
        placements = {} if entry.placements is None else entry.placements(self._topology)
        mesh = self._topology.strategy.mesh
        return all(
            placement.coord == self._topology.coordinate(mesh.index(axis))
            for axis, placement in placements.items()
            if isinstance(placement, Owner)
        )

    def _held(self, name: str) -> tuple[dict[str, Held], State]:
        """The tensors that this rank keeps for a parameter as the job holds them, and the rest."""
        if name not in self._entries:
            return {}, {}
        entry = self._entries[name]
        state = self._states.get(entry.value, {})
        reading = Reading(self._topology, self._rules, staged=self._is_staged)
        reading.add_model([entry])
        reading.add_optimizer(
            [self._adapter.entry(name, key, value, entry.value) for key, value in state.items()]
        )
        for key, value in state.items():
            if torch.is_tensor(value) and parts_of_tensor(value):
                raise UnsupportedTypeError(
                    "a tensor made of others cannot be gathered or scattered",
                    where=join("optimizer", name, key),
                    hint="save and load it with a Checkpointer",
                )
        found = {held.name: held for held in reading.tensors}
        tensors = {k: found[join("optimizer", name, k)] for k in state if torch.is_tensor(state[k])}
        return tensors, {key: value for key, value in state.items() if key not in tensors}

    def _objection(self, offered: State, held: Mapping[str, Held], values: State) -> str:
        """Why what rank 0 has is no state of this parameter here; nothing where it is one."""
        mine = sorted({*held, *values})
        if sorted(offered) != mine:
            keeps = ", ".join(mine) or "nothing for this parameter"
            return f"no state of {self._adapter.kind}, which keeps {keeps}: {_listed(offered)}"
        for key, value in offered.items():
            here = _Whole.of(held[key]) if key in held else None
            there = value if isinstance(value, _Whole) else None
            if here != there:
                return f"{key} is {here or 'no tensor'} here, rank 0 has {there or 'no tensor'}"
        return ""


@dataclass(frozen=True, slots=True)
class _Whole:
    """What rank 0 says of a tensor before it hands it out."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, held: Held) -> _Whole:
        return cls(held.shape, held.local.dtype)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


def _offer(full: Mapping[str, Any] | None) -> State | str:
    """What rank 0 tells of the state that it has, or what is wrong with that."""
    if full is None:
        return "rank 0 has to pass the whole state; an empty one removes what there is"
    if any(isinstance(value, DTensor) for value in full.values()):
        return "the state has DTensors; pass whole tensors: value.full_tensor()"
    return {
        key: _Whole(tuple(value.shape), value.dtype) if torch.is_tensor(value) else value
        for key, value in full.items()
    }


def _listed(offered: State) -> str:
    return f"rank 0 has {', '.join(sorted(offered))}"


def _by_parameter(adapter: OptimizerAdapter) -> PlainOptimizer:
    if isinstance(adapter, FSDP1Optimizer) or not isinstance(adapter, PlainOptimizer):
        raise UnsupportedTypeError(
            "the optimizer of an FSDP1 model keeps no state by parameter",
            value=adapter.kind,
            hint="use fully_shard (FSDP2), or save and load it whole with a Checkpointer",
        )
    return adapter
