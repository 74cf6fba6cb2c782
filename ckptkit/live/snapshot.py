"""All that one rank has of a job's state, read off the live objects: tensors with their layouts,
and plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import InvalidNameError, UsageError
from ckptkit.format.names import ALIKE, WRAPPED, join, matches, pattern_list
from ckptkit.live.adapters import Entry
from ckptkit.live.extra import DataRanks
from ckptkit.live.groups import Group, check_upwards, dtensor_groups, kind_of, mesh_groups
from ckptkit.live.held import Held, Tied
from ckptkit.live.models import Model
from ckptkit.live.optimizers import OptimizerAdapter, StateEntry, optimizer_adapter
from ckptkit.live.ranks import World
from ckptkit.live.rules import HandCuts, HowCut
from ckptkit.live.tensors import as_spread, check_plain, checksum, local_of
from ckptkit.live.topology import Topology
from ckptkit.live.trees import plain_extra, take_tensors, without_tensors
from ckptkit.live.wrapped import always, layout_of_part, part_name, parts_of_tensor, record_of
from ckptkit.model import (
    PerDataRank,
    PerRank,
    Replicated,
    Shard,
    Split,
    Strategy,
    Strided,
    Sum,
)


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The objects of a job whose state is saved or loaded, as the caller passed them."""

    model: Model | None = None
    optimizers: Sequence[OptimizerAdapter] = ()
    stateful: Mapping[str, object] = field(default_factory=dict)
    """What has `state_dict`, and nested dictionaries, by the name of its group."""

    @classmethod
    def of(
        cls,
        model: object = None,
        optimizer: object = None,
        scheduler: object = None,
        dataloader: object = None,
        scaler: object = None,
        state: Mapping[str, object] | None = None,
        skip: Iterable[str] = (),
    ) -> Sources:
        """What is to be saved or loaded, checked for clashes, but for the groups to skip."""
        known = None if model is None else Model(model)
        modules: list[nn.Module] = known.modules if known else []
        if optimizer is not None and known is None:
            raise UsageError(
                "an optimizer without its model: its state is named after the parameters",
                hint="pass model=… too",
            )
        left = _skipped(skip, state or {})
        optimizer = None if "optimizer" in left else optimizer
        adapters = [optimizer_adapter(each, modules) for each in _several(optimizer)]
        stateful = dict(state or {})
        for name, value in (
            ("scheduler", scheduler),
            ("dataloader", dataloader),
            ("scaler", scaler),
        ):
            if value is None:
                continue
            if name in stateful:
                raise UsageError("passed twice", where=f"state[{name!r}]")
            stateful[name] = list(value) if isinstance(value, (list, tuple)) else value
        if dataloader is not None:
            stateful["dataloader"] = PerDataRank(stateful["dataloader"])
        for name in stateful:
            if name in ("model", "optimizer", "extra"):
                raise InvalidNameError(
                    "this group is ckptkit's own",
                    where="state",
                    value=name,
                    hint="pass model=…, optimizer=… or extra=…, or choose another key",
                )
        for name, value in stateful.items():
            _check_stateful(name, value)
        return cls(known, adapters, {n: v for n, v in stateful.items() if n not in left})


def _skipped(skip: Iterable[str], state: Iterable[str]) -> set[str]:
    """The groups that patterns of names mean; the model's values are what the others go with."""
    groups = {"optimizer", "scheduler", "dataloader", "scaler", *state}
    skip = pattern_list(skip, "skip")
    for pattern in skip:
        if not any(matches((pattern,), name, name) for name in groups):
            raise UsageError(
                "no group that can be skipped has this name",
                value=pattern,
                hint=f"these can: {', '.join(sorted(groups))}",
            )
    return {name for name in groups if matches(skip, name, name)}


def _check_stateful(name: str, value: object) -> None:
    """Refuse what a load could not give back: it fills objects and containers in place."""
    if isinstance(value, (Sum, Split)):
        return  # refused with a reason of its own
    inner = value.value if isinstance(value, (Replicated, PerRank, PerDataRank)) else value
    if not (hasattr(inner, "load_state_dict") or isinstance(inner, (dict, list, torch.Tensor))):
        raise UsageError(
            "neither an object with load_state_dict nor a dictionary, a list or a tensor",
            where=f"state[{name!r}]",
            value=inner,
            hint="plain values go into extra={…}",
        )


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What one rank adds to a step."""

    topology: Topology
    details: dict[str, Any]
    tensors: list[Held]
    tied: list[Tied]
    objects: dict[str, object]
    optimizers: list[dict[str, Any]]
    """What optimizers say besides tensors, of this rank's parameters."""
    entries: list[Entry]
    states: list[list[StateEntry]]
    trees: dict[str, torch.Tensor]
    """The tensors of nested dictionaries, whole."""
    spread: Strategy | None
    """How the job is spread; None where neither a model nor a mesh says it."""

    open_trees: dict[str, Any] = field(default_factory=dict)
    """The nested dictionaries of which ranks may have keys of their own, tensors as marks."""
    made: Mapping[str, tuple[Held, Sequence[str]]] = field(default_factory=dict)
    """By name the tensors that are made of others, which are among `tensors`, and their names."""

    @property
    def values(self) -> Mapping[str, Any]:
        """What `get_extra_state` gave, by name."""
        found: Any = self.objects.get("model", {})
        return found  # type: ignore[no-any-return]


def topology_of(
    world: World,
    sources: Sources,
    mesh: DeviceMesh | None = None,
    barrier: Ranks | None = None,
) -> Topology:
    """The topology of a job, read off its model and optimizers; `mesh` names what they do not. With
    a barrier the stages of a pipeline, of which only some may have experts, find one for all.
    """
    groups: list[Group] = []
    if mesh is None and sources.model is not None:
        mesh = sources.model.mesh
    if sources.model is not None:
        groups += sources.model.groups()
    for optimizer in sources.optimizers:
        groups += optimizer.groups()
    if mesh is not None:
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        found = mesh_groups(mesh, tuple(kind_of(name) or "ddp" for name in names))
        by_rank = {group.by_mesh for group in groups}
        for group in found:
            if group.by_mesh not in by_rank:  # what is cut by hand may go either way
                check_upwards(group.by_mesh, "mesh=")
        groups = [replace(g, is_assumed=not kind_of(g.name)) for g in found] + groups
    tensors = (t for _, by_name in _trees(sources.stateful).values() for t in by_name.values())
    spread = [t for t in tensors if isinstance(t, DTensor)]
    groups += dtensor_groups(spread, fully_sharded=True)
    if barrier is not None and any(group.kind == "pp" and group.size > 1 for group in groups):
        lines = barrier.agree([group.to_doc() for group in groups], _distinct)
        groups = [*(Group.through(world.rank, line) for line in lines), *groups]
    return Topology.of(world, groups)


def _distinct(heard: list[Any]) -> list[Any]:
    return list({tuple(line): line for lines in heard for line in lines}.values())


def rules_of(sources: Sources, rules: HandCuts | None) -> HandCuts:
    """The rules of a call, or those that its model came with."""
    if rules is not None and rules.said:
        return rules
    return HandCuts() if sources.model is None else sources.model.rules


def take_snapshot(
    world: World,
    sources: Sources,
    *,
    extra: Mapping[str, object] | None = None,
    mesh: DeviceMesh | None = None,
    rules: HandCuts | None = None,
    barrier: Ranks | None = None,
) -> Snapshot:
    """Look at everything; nothing is copied yet."""
    topology = topology_of(world, sources, mesh, barrier)
    staged = sources.model is not None and sources.model.is_staged
    reading = Reading(topology, rules_of(sources, rules), staged=staged)
    details: dict[str, Any] = {}
    says_all = sources.model is not None or mesh is not None or world.size == 1
    spread = topology.strategy if says_all else None
    data = DataRanks(world.rank, world.size, spread, spread)
    objects: dict[str, object] = {
        f"extra/{n}": plain_extra(f"extra/{n}", v) for n, v in (extra or {}).items()
    }
    documents: list[dict[str, Any]] = []
    entries: list[Entry] = []
    states: list[list[StateEntry]] = []
    trees: dict[str, torch.Tensor] = {}
    if sources.model is not None:
        details |= sources.model.details()
        entries = sources.model.entries()
        reading.add_model(entries)
        objects |= _extra_state(entries)
        names = parameter_names(entries)
        for optimizer in sources.optimizers:
            found = optimizer.entries(names)
            states.append(found)
            reading.add_optimizer(found)
            documents.append(_optimizer_document(optimizer, names, found))
    for group, (skeleton, tensors) in _trees(sources.stateful).items():
        objects[group] = skeleton
        trees |= tensors
        reading.add_tree(tensors, alike=isinstance(sources.stateful[group], Replicated))
    objects |= reading.alike
    closed = (PerRank, PerDataRank, Replicated)
    of_data = {name: v.value for name, v in objects.items() if isinstance(v, PerDataRank)}
    objects |= {name: data.kept(value) for name, value in of_data.items()}
    return Snapshot(
        topology,
        details,
        reading.tensors,
        reading.tied,
        objects,
        documents,
        entries,
        states,
        trees,
        spread,
        {n: objects[n] for n, v in sources.stateful.items() if not isinstance(v, closed)},
        reading.made,
    )


def parameter_names(entries: Iterable[Entry]) -> dict[nn.Parameter, str]:
    """The name of each parameter; the first of several."""
    names: dict[nn.Parameter, str] = {}
    for entry in entries:
        if isinstance(entry.value, nn.Parameter):
            names.setdefault(entry.value, entry.name)
    return names


class Reading:
    """Collects tensors as the topology lays them out."""

    def __init__(self, topology: Topology, rules: HandCuts, *, staged: bool) -> None:
        self._topology = topology
        self._rules = rules
        self._staged = staged
        self._seen: dict[int, str] = {}
        self._locals: dict[str, tuple[int, ...]] = {}
        self._is_cut: dict[str, bool] = {}
        self._alike_of: dict[str, frozenset[str]] = {}
        self.alike: dict[str, object] = {}
        """By the name of an object: what has to be the same on all ranks that have it."""
        self._names: set[str] = set()
        self.tensors: list[Held] = []
        self.tied: list[Tied] = []
        self.made: dict[str, tuple[Held, list[str]]] = {}
        """Tensors that are made of others, and the names of these."""

    def add_model(self, entries: Iterable[Entry]) -> None:
        """Parameters and buffers; a tensor of two names is stored once."""
        for entry in entries:
            if not torch.is_tensor(entry.value):
                continue
            name = join("model", entry.name)
            known = self._seen.setdefault(id(entry.value), name)
            if known != name:
                parts = parts_of_tensor(entry.value)
                pairs = [(part_name(name, key), part_name(known, key)) for key in parts]
                self.tied += [Tied(mine, of) for mine, of in pairs or [(name, known)]]
                continue
            role = "param" if entry.is_parameter else "buffer"
            alike = self._topology.replicas
            if not (entry.is_parameter and entry.is_kept_alike):
                alike = frozenset()
            self._alike_of[name] = alike
            first = self._topology.replicas if entry.is_broadcast else frozenset()
            value = as_spread(entry.value, entry.value)
            self._add(name, value, role, entry, alike=alike, of_first=first)

    def add_optimizer(self, entries: Iterable[StateEntry]) -> None:
        """What an optimizer keeps in tensors."""
        for entry in entries:
            if torch.is_tensor(entry.value):
                name = join("optimizer", entry.parameter, entry.key)
                of = join("model", entry.parameter)
                alike = self._alike_of.get(of, self._topology.replicas)
                self._add(name, entry.value, "optimizer", entry, of=of, alike=alike)

    def add_tree(self, tensors: Mapping[str, torch.Tensor], *, alike: bool) -> None:
        """The tensors of a nested dictionary, `alike` on all ranks if the caller says so."""
        axes = frozenset(axis.name for axis in self._topology.strategy.mesh.axes)
        for name, tensor in tensors.items():
            known = axes if alike else frozenset()
            self._add(name, tensor, "other", None, alike=known, staged=False)

    def _add(
        self,
        name: str,
        tensor: torch.Tensor,
        role: str,
        entry: Entry | StateEntry | None,
        *,
        alike: frozenset[str],
        staged: bool | None = None,
        of: str | None = None,
        of_first: frozenset[str] = frozenset(),
    ) -> None:
        if name in self._names:
            raise InvalidNameError(
                "two objects have a tensor of this name",
                value=name,
                hint="optimizers that share parameters go into state={…}, each under its own key",
            )
        self._names.add(name)
        parts = parts_of_tensor(tensor)
        if not parts:
            check_plain(name, tensor)
        topology = self._topology
        staged = self._staged if staged is None else staged
        placements = dict(topology.placements(name, tensor, staged=staged))
        if entry is not None and entry.placements is not None:
            placements |= entry.placements(topology)
        shape = tuple(tensor.shape) if entry is None or entry.shape is None else entry.shape
        local = local_of(tensor)
        alike |= topology.mesh_axes(tensor)
        # What an optimizer keeps in another shape than the parameter's is cut as it says itself.
        is_like = self._locals.setdefault(of or name, local.shape) == local.shape
        said: Mapping[str, HowCut] = {}
        if is_like or local.ndim:
            said = self._rules.find(name, local.shape, of=of if is_like else None)
        for axis in topology.strategy.mesh.axes:
            if axis.kind in said:
                size = 1 if isinstance(tensor, DTensor) else axis.size
                placement, whole = self._rules.placement(name, said[axis.kind], shape, size)
                shape = shape if isinstance(tensor, DTensor) else whole
                placements[axis.name] = placement
        if role == "optimizer" and local.ndim and not parts and not isinstance(tensor, DTensor):
            says = said or (entry is not None and entry.placements is not None)
            if self._is_cut.get(of or "") and not says:
                # Whether it is a part or the same on all ranks cannot be seen: the commit compares.
                self.alike[f"{ALIKE}/{name}"] = checksum(name, local)
        self._is_cut[name] = any(isinstance(p, (Shard, Strided)) for p in placements.values())
        held = Held(name, shape, placements, local, role, of, alike, of_first)
        if parts:
            self._add_parts(held, record_of(tensor), parts, staged=staged)
        else:
            self.tensors.append(self._as_it_lies(held, tensor))

    def _as_it_lies(self, held: Held, tensor: torch.Tensor) -> Held:
        """With the rank's own part, where no placements say what that is."""
        own = self._topology.own_part(held.name, tensor)
        if own is None or not isinstance(tensor, DTensor):
            return held
        return replace(held, own=own, tensor=tensor)

    def _add_parts(
        self,
        whole: Held,
        record: dict[str, Any],
        parts: Mapping[str, torch.Tensor],
        *,
        staged: bool,
    ) -> None:
        """The tensors that one is made of, cut as it is; rules may say of each how."""
        record = {**record, "shape": list(whole.shape)}  # cut by hand, it looks like a whole
        self.alike[f"{WRAPPED}/{whole.name}"] = record
        self.made[whole.name] = whole, [part_name(whole.name, key) for key in parts]
        for key, part in parts.items():
            name = part_name(whole.name, key)
            entry = StateEntry("", key, part)
            if not self._rules.find(name, tuple(part.shape)):
                shape, cuts = layout_of_part(name, key, part, whole)
                entry = StateEntry("", key, part, shape, always(cuts))
            self._add(name, part, whole.role, entry, alike=whole.alike, staged=staged, of=whole.of)
            if self._is_cut[whole.name] and not self._is_cut[name]:
                # Each rank may have made it of its own rows: the commit compares.
                self.alike[f"{ALIKE}/{name}"] = checksum(name, part)


def _optimizer_document(
    optimizer: OptimizerAdapter, names: Mapping[nn.Parameter, str], entries: Sequence[StateEntry]
) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not torch.is_tensor(entry.value):
            values.setdefault(entry.parameter, {})[entry.key] = entry.value
    return {"kind": optimizer.kind, "groups": optimizer.options(names), "values": values}


def _extra_state(entries: Iterable[Entry]) -> dict[str, object]:
    """What `get_extra_state` gave, which has no tensors of its own."""
    found = {entry.name: entry.value for entry in entries if not torch.is_tensor(entry.value)}
    return {"model": found} if found else {}


def _trees(stateful: Mapping[str, object]) -> dict[str, tuple[Any, dict[str, torch.Tensor]]]:
    found: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    for group, value in stateful.items():
        if isinstance(value, (PerRank, PerDataRank)):
            # An array has one value for all ranks: the tensors of each go with its plain values.
            found[group] = (type(value)(without_tensors(tree_of(value.value), join(group))), {})
        else:
            found[group] = take_tensors(tree_of(value), join(group))
    return found


def tree_of(value: object) -> Any:
    """The nested dictionary of an object with `state_dict`, of a list of them, or itself."""
    if isinstance(value, Replicated):
        return tree_of(value.value)
    if isinstance(value, (PerRank, PerDataRank, Sum, Split)):
        raise UsageError("Sum and Split values go into extra={…}", value=value)
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, list):
        return [tree_of(item) for item in value]
    return value


def _several(optimizer: object) -> list[object]:
    if optimizer is None:
        return []
    if isinstance(optimizer, Mapping):
        return list(optimizer.values())
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
