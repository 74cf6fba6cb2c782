"""The state of a model spread over ranks: this rank's part of it, or all of it on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptkit.format.names import join
from ckptkit.live.exchange import Exchange, Plan, Spread
from ckptkit.live.handover import hand_over
from ckptkit.live.ranks import current_world
from ckptkit.live.report import Report
from ckptkit.live.snapshot import Snapshot, take_snapshot, topology_of
from ckptkit.live.state.parts import HandCuts, LiveTensor, RulesLike
from ckptkit.live.wrappers.entries import StateMismatchError
from ckptkit.live.wrappers.training import Model, TrainingState
from ckptkit.model import Strategy

StateDict = dict[str, Any]


class DistributedModel(Protocol):
    """A model that ranks have together, by the names that it has without wrappers.

    Every rank has one, and all make the same calls; an error of one is raised on all. State is a
    dictionary of tensors, and of what `get_extra_state` gives.
    """

    @property
    def model(self) -> Any:
        """What was passed to `distributed_model`."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh that was passed with it."""

    @property
    def strategy(self) -> Strategy:
        """How it is spread."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    def local_state_dict(self) -> StateDict:
        """What this rank holds, in the model's own memory where it has it as it is."""

    def full_state_dict(self) -> StateDict | None:
        """All of it, in host memory, on rank 0; None on the others."""

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `local_state_dict` gave on this rank of a job of the same layout."""

    def load_full_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        """Take over what rank 0 has of `full_state_dict`; what others pass is ignored."""


def distributed_model(
    model: object,
    *,
    mesh: DeviceMesh | None = None,
    rules: RulesLike | None = None,
) -> DistributedModel:
    """A model as its ranks have it, wrapped in whatever way a Checkpointer saves; also what
    `as_distributed` returned.

    Whatever takes a model takes what this returns, and then knows its mesh and rules too.
    """
    return _LiveModel(model, mesh, HandCuts.of(rules))


class _LiveModel:
    """A model whose layout is read off it at each call."""

    def __init__(self, model: object, mesh: DeviceMesh | None, rules: HandCuts) -> None:
        known = Model(model)
        self.model = model
        self.mesh = known.mesh if mesh is None else mesh
        self.rules = rules if rules.said else known.rules
        self._world = current_world()
        self._sources = TrainingState(known)
        self._topology = topology_of(self._world, self._sources, self.mesh)
        self._exchange = Exchange(self._world, self._topology)

    @property
    def strategy(self) -> Strategy:
        return self._topology.strategy

    @property
    def world_size(self) -> int:
        return self._world.size

    @property
    def rank(self) -> int:
        return self._world.rank

    def local_state_dict(self) -> StateDict:
        state = _State(self._look())
        tensors = {name: held.local for name, held in state.held.items()}
        return tensors | {name: tensors[of] for name, of in state.tied.items()} | state.values

    def full_state_dict(self) -> StateDict | None:
        state = _State(self._look())
        plan = self._exchange.agree(
            self._exchange.speak(state.held, values=state.values, tied=state.tied)
        )
        tensors = self._exchange.gather(plan, state.held)
        if tensors is None:
            return None
        return tensors | {name: tensors[of] for name, of in plan.tied.items()} | plan.values

    def load_local_state_dict(self, state: Mapping[str, Any]) -> None:
        snapshot = self._look()
        mine = _State(snapshot)
        known = {
            name: Spread(tuple(held.local.shape), held.local.dtype, ())
            for name, held in mine.held.items()
        }
        problem = _objection(known, mine.tied, mine.values, state)
        self._exchange.agree(self._exchange.speak({}, problem=problem))
        with torch.no_grad():
            for name, held in mine.held.items():
                held.local.copy_(_tensor(state, name, mine.tied))
        self._absorb(snapshot, {name: state[name] for name in mine.values})

    def load_full_state_dict(self, state: Mapping[str, Any] | None = None) -> None:
        snapshot = self._look()
        mine = _State(snapshot)
        plan = self._exchange.agree(
            self._exchange.speak(mine.held, values=mine.values, tied=mine.tied)
        )
        problem, values = self._exchange.from_first(_offer(plan, state))
        if problem:
            raise StateMismatchError(problem)
        wholes = {}
        if self._world.rank == 0 and state is not None:
            wholes = {name: _tensor(state, name, plan.tied) for name in plan.tensors}
        self._exchange.hand_out(plan, mine.held, wholes)
        self._absorb(snapshot, values)

    def _look(self) -> Snapshot:
        return take_snapshot(self._world, self._sources, mesh=self.mesh, rules=self.rules)

    def _absorb(self, snapshot: Snapshot, values: Mapping[str, Any]) -> None:
        hand_over(self._sources, snapshot, values, [])


class _State:
    """What a snapshot has of a model, by the names that the model's author gave."""

    def __init__(self, snapshot: Snapshot) -> None:
        names = {join("model", entry.name): entry.name for entry in snapshot.entries}
        self.held: dict[str, LiveTensor] = {names[held.name]: held for held in snapshot.tensors}
        self.tied = {names[tied.name]: names[tied.of] for tied in snapshot.tied}
        tensors = self.held.keys() | self.tied.keys()
        self.values = {e.name: e.value for e in snapshot.entries if e.name not in tensors}


def _offer(plan: Plan, state: Mapping[str, Any] | None) -> tuple[str, StateDict]:
    """What is wrong with the state that rank 0 has, and what of it is no tensor."""
    if state is None:
        return "rank 0 has to pass the whole state", {}
    known = {name: spreads[0] for name, spreads in plan.tensors.items()}
    problem = _objection(known, plan.tied, plan.values, state)
    return problem, {} if problem else {name: state[name] for name in plan.values}


def _objection(
    known: Mapping[str, Spread],
    tied: Mapping[str, str],
    values: Mapping[str, Any],
    state: Mapping[str, Any],
) -> str:
    """How a state differs from what is known here; nothing where it does not."""
    report = Report(unexpected=sorted(state.keys() - known.keys() - tied.keys() - values.keys()))
    report.missing += sorted(values.keys() - state.keys())
    for name, spread in known.items():
        tensor = _tensor(state, name, tied)
        if tensor is None:
            report.missing.append(name)
        elif not torch.is_tensor(tensor) or isinstance(tensor, DTensor):
            report.unexpected.append(f"{name}, which is a {type(tensor).__name__}")
        elif tuple(tensor.shape) != spread.shape:
            report.reshaped.append(f"{name}: {tuple(tensor.shape)}, here {spread.shape}")
        elif tensor.dtype != spread.dtype:
            report.cast.append(f"{name}: {tensor.dtype}, here {spread.dtype}")
    return "" if report.is_exact else f"the state does not fit\n{report}"


def _tensor(state: Mapping[str, Any], name: str, tied: Mapping[str, str]) -> Any:
    """A tensor under any of its names; None where the state has it under none."""
    names = [name, *(other for other, of in tied.items() if of == name)]
    return next((state[each] for each in names if each in state), None)
