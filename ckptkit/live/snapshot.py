"""All that one rank has of a job's state, read off the live objects: tensors with their layouts,
and plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import InvalidNameError, UnsupportedTypeError, UsageError
from ckptkit.format.names import ALIKE, DATA_RANK, WRAPPED, join
from ckptkit.format.objects import PerDataRank, PerRank, Replicated, Split, Sum
from ckptkit.live.state.entries import (
    Line,
    ModelEntry,
    StateEntry,
    check_upwards,
    dtensor_lines,
    kind_of,
    mesh_lines,
)
from ckptkit.live.state.extra import data_rank, said_share
from ckptkit.live.state.parts import (
    HandCuts,
    HowCut,
    LiveTensor,
    layout_of_part,
    part_name,
    record_of,
)
from ckptkit.live.state.ranks import World
from ckptkit.live.state.tensors import (
    as_spread,
    check_plain,
    checksum,
    is_plain,
    local_of,
    parts_of_tensor,
)
from ckptkit.live.state.topology import Topology
from ckptkit.live.state.trees import plain_extra, take_tensors, tensors_inline
from ckptkit.live.wrappers import Model, Training
from ckptkit.model import Placement, Shard, Stage, Strategy, Strided

Trees: TypeAlias = Mapping[str, tuple[Any, dict[str, torch.Tensor], bool]]
"""Of each nested dictionary what it has besides tensors, these by name, and whether the caller says
that they are replicated.
"""
SaidLayout: TypeAlias = tuple[tuple[int, ...], Mapping[str, Placement]]
"""The global shape of a tensor, and how the axes cut it."""

_NOT_CUT: Mapping[str, Placement] = {}
_NO_MEMORY = torch.empty(0, device="cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """What a snapshot found out of tensors, without their memory: `seen` is all that it follows
    from, in the order in which it was looked at.
    """

    topology: Topology
    seen: list[object]
    tensors: list[LiveTensor]
    tied: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """What one rank adds to a step."""

    topology: Topology
    tensors: list[LiveTensor]
    tied: dict[str, str]
    """Second names of tensors, with the first."""
    objects: dict[str, object]
    values: Mapping[str, Any]
    """What `get_extra_state` gave, by name."""
    optimizers: list[dict[str, Any]]
    """What optimizers say besides tensors, of this rank's parameters."""
    entries: list[ModelEntry]
    states: list[list[StateEntry]]
    trees: dict[str, torch.Tensor]
    """The tensors of nested dictionaries, whole."""
    spread: Strategy | None
    """How the job is spread; None where neither a model nor a mesh says it."""
    open_trees: dict[str, Any]
    """The nested dictionaries of which ranks may have keys of their own, tensors as marks."""
    made: Mapping[str, tuple[LiveTensor, Sequence[str]]]
    """By name the tensors that are made of others, which are among `tensors`, and their names."""
    outline: Outline | None
    """What a later snapshot may use again; None where there is something to look at each time."""
    collector: Collector


def take_snapshot(
    world: World,
    training: Training,
    *,
    mesh: DeviceMesh | None,
    rules: HandCuts,
    extra: Mapping[str, object] | None = None,
    ranks: Ranks | None = None,
    outlined: bool = False,
    last: Outline | None = None,
) -> Snapshot:
    """Look at everything; nothing is copied yet. `outlined` also makes the outline that the next
    call takes as `last`: where only values and their places in memory have changed since, all that
    was found out then is used again, and the outline stays the same object.
    """
    nested = _trees(training)
    trees = {name: tensor for _, inside, _ in nested.values() for name, tensor in inside.items()}
    objects: dict[str, object] = {
        f"extra/{n}": plain_extra(f"extra/{n}", v) for n, v in (extra or {}).items()
    }
    topology = topology_of(world, training, mesh, ranks, trees.values())
    if last is not None and last.topology == topology:
        topology = last.topology  # which knows what it has found out
    has_stages = training.model is not None and training.model.is_staged
    known = rules_of(training, rules)
    entries: list[ModelEntry] = []
    states: list[list[StateEntry]] = []
    documents: list[dict[str, Any]] = []
    if training.model is not None:
        _meet_before_collectives(training.model, topology, ranks)
        entries = training.model.entries()
        states, documents = _optimizers(training, entries)
    objects |= {group: skeleton for group, (skeleton, _, _) in nested.items()}

    seen: list[object] = [topology, known, has_stages]
    here = _look(seen, entries, states, nested) if outlined else None
    collector = Collector(topology, known, has_stages=has_stages, are_plain=here is not None)
    outline: Outline | None = None
    if last is not None and here is not None and last.seen == seen:
        # Nothing but memory is another.
        pairs = zip(last.tensors, here, strict=True)
        collector.tensors = [held.in_memory(local) for held, local in pairs]
        collector.tied, outline = last.tied, last
    else:
        collector.add_model(entries)
        for state in states:
            collector.add_optimizer(state)
        for _, inside, is_replicated in nested.values():
            collector.add_tree(inside, is_replicated=is_replicated)
        found = collector.tensors
        is_asked = collector.compared or collector.made or any(h.own is not None for h in found)
        if here is not None and not is_asked:
            # No memory is kept alive from one save to the next.
            bare = [held.in_memory(_NO_MEMORY) for held in found]
            outline = Outline(topology, seen, bare, collector.tied)
    objects |= collector.compared
    says_all = training.model is not None or mesh is not None or world.size == 1
    spread = topology.strategy if says_all else None
    for group, value in objects.items():
        if isinstance(value, PerDataRank):
            reader = getattr(training.stateful.get(group), "value", None)
            share = said_share(reader) or data_rank(spread, world.rank)
            objects[group] = PerRank({DATA_RANK: [*share, value.value]})
    closed = (PerRank, PerDataRank, Replicated)
    return Snapshot(
        topology=topology,
        tensors=collector.tensors,
        tied=collector.tied,
        objects=objects,
        # These have no tensors of their own.
        values={e.name: e.value for e in entries if not isinstance(e.value, torch.Tensor)},
        optimizers=documents,
        entries=entries,
        states=states,
        trees=trees,
        spread=spread,
        open_trees={
            n: objects[n] for n, v in training.stateful.items() if not isinstance(v, closed)
        },
        made=collector.made,
        outline=outline,
        collector=collector,
    )


def _look(
    seen: list[object],
    entries: Sequence[ModelEntry],
    states: Sequence[Sequence[StateEntry]],
    nested: Trees,
) -> list[torch.Tensor] | None:
    """Add to `seen` what tensors are, which takes much less time than to collect them, and return
    what this rank holds of them; None where some have no elements of their own, which are looked
    at each time.

    All that `Collector` asks of an entry or a tensor has to be in `seen`. Values need not be: they
    are read from where the tensors lie now.
    """
    tensors: list[torch.Tensor] = []
    seen.append(len(entries))
    first: dict[int, int] = {}  # which parameters and buffers are one tensor
    for number, entry in enumerate(entries):
        name, value, is_parameter, shared, _, is_kept, is_broadcast = entry
        is_tensor = isinstance(value, torch.Tensor)
        known = first.setdefault(id(value), number) if is_tensor else None
        seen += (name, is_parameter, shared, is_kept, is_broadcast, known)
        if known == number:
            if "_st_info" in value.__dict__:
                return None  # each time it becomes another DTensor
            tensors.append(value)
    for state in states:
        seen.append(len(state))
        for parameter, key, value, shared in state:
            is_tensor = isinstance(value, torch.Tensor)
            seen += (parameter, key, shared, is_tensor)
            if is_tensor:
                tensors.append(value)
    for _, inside, is_replicated in nested.values():
        seen += (len(inside), is_replicated, *inside)
        tensors += inside.values()
    here: list[torch.Tensor] = []
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # What is amiss with one is told by who collects it.
        if not is_plain(local):
            return None
        if isinstance(tensor, DTensor):
            spec = tensor._spec
            seen += (tensor.shape, tensor.dtype, spec.mesh, spec.placements)
        seen += (type(tensor), local.shape, local.dtype, local.device)
        here.append(local.detach() if local.requires_grad else local)
    return here


def _meet_before_collectives(model: Model, topology: Topology, ranks: Ranks | None) -> None:
    """Let all ranks be here where a model is read in collectives, which one that has failed would
    not come to. The stages of a pipeline, which may differ in that, have met for its topology.
    """
    if ranks is not None and model.needs_collectives and topology.pipeline is None:
        ranks.wait()


def with_optimizers(before: Snapshot, training: Training, ranks: Ranks) -> Snapshot | None:
    """What was seen without the optimizers of a training, together with these; `before` is used up.
    None where they say how the job is spread, or stages may: that takes another look at everything.
    """
    is_said = any(optimizer.lines() for optimizer in training.optimizers)
    if is_said or before.topology.pipeline is not None:
        return None
    if training.model is not None:
        _meet_before_collectives(training.model, before.topology, ranks)
    collector = before.collector
    states, documents = _optimizers(training, before.entries)
    for state in states:
        collector.add_optimizer(state)
    objects = before.objects | collector.compared
    return replace(before, objects=objects, optimizers=documents, states=states)


def _optimizers(
    training: Training, entries: Sequence[ModelEntry]
) -> tuple[list[list[StateEntry]], list[dict[str, Any]]]:
    """What optimizers keep of the parameters of a model: their entries, and what they say besides
    tensors.
    """
    names = training.names(entries)
    states: list[list[StateEntry]] = []
    documents: list[dict[str, Any]] = []
    for optimizer in training.optimizers:
        state = optimizer.entries(names)
        states.append(state)
        values: dict[str, dict[str, Any]] = {}
        for entry in state:
            if not isinstance(entry.value, torch.Tensor):
                values.setdefault(entry.parameter, {})[entry.key] = entry.value
        groups = optimizer.options(names)
        documents.append({"kind": optimizer.kind, "groups": groups, "values": values})
    return states, documents


def _trees(training: Training) -> Trees:
    """Asks each object for its state, once."""
    found: dict[str, tuple[Any, dict[str, torch.Tensor], bool]] = {}
    for group, value in training.stateful.items():
        if isinstance(value, (PerRank, PerDataRank)):
            # An array has one value for all ranks: the tensors of each go with its plain values.
            inline = tensors_inline(tree_of(value.value), join(group))
            found[group] = type(value)(inline), {}, False
        else:
            skeleton, tensors = take_tensors(tree_of(value), join(group))
            found[group] = skeleton, tensors, isinstance(value, Replicated)
    return found


def tree_of(value: object) -> Any:
    """The nested dictionary of an object with `state_dict`, of a list of them, or itself."""
    if isinstance(value, Replicated):
        return tree_of(value.value)
    if isinstance(value, (PerRank, PerDataRank, Sum, Split)):
        raise UsageError("Sum and Split values go into extra={…}", value=value)
    if hasattr(value, "state_dict"):
        return value.state_dict()
    return [tree_of(item) for item in value] if isinstance(value, list) else value


def topology_of(
    world: World,
    training: Training,
    mesh: DeviceMesh | None,
    ranks: Ranks | None = None,
    beside: Iterable[torch.Tensor] = (),
) -> Topology:
    """The topology of a job, read off its model, its optimizers and tensors `beside` them; `mesh`
    names what they do not. With `ranks` the stages of a pipeline, of which only some may have
    experts, find one for all.
    """
    lines: list[Line] = []
    if training.model is not None:
        mesh = training.model.mesh if mesh is None else mesh
        lines += training.model.lines()
    for optimizer in training.optimizers:
        lines += optimizer.lines()
    if mesh is not None:
        names = mesh.mesh_dim_names or ("",) * mesh.ndim
        found = mesh_lines(mesh, tuple(kind_of(name) or "ddp" for name in names))
        by_rank = {line.by_mesh for line in lines}
        for line in found:
            if line.by_mesh not in by_rank:  # what is cut by hand may go either way
                check_upwards(line.by_mesh, "mesh=")
        lines = [replace(line, is_assumed=not kind_of(line.name)) for line in found] + lines
    lines += dtensor_lines([t for t in beside if isinstance(t, DTensor)], fully_sharded=True)
    if ranks is not None and any(line.kind == "pp" and line.size > 1 for line in lines):
        docs = ranks.agree(
            [line.to_doc() for line in lines],
            lambda heard: list({tuple(line): line for lines in heard for line in lines}.values()),
        )
        lines = [*(Line.through(world.rank, doc) for doc in docs), *lines]
    return Topology.of(world.rank, world.size, lines)


def rules_of(training: Training, rules: HandCuts) -> HandCuts:
    """The rules of a call, or those that its model came with."""
    return rules if rules.said or training.model is None else training.model.rules


class Collector:
    """Collects tensors as the topology lays them out."""

    def __init__(
        self, topology: Topology, rules: HandCuts, *, has_stages: bool, are_plain: bool = False
    ) -> None:
        """`are_plain` says that all tensors have been found to have elements of their own."""
        self._topology = topology
        self._rules = rules
        self._are_plain = are_plain
        self._stage = _NOT_CUT
        if has_stages and topology.pipeline is not None:
            mesh, at = topology.strategy.mesh, topology.pipeline
            self._stage = {mesh.axes[at].name: Stage(mesh.coords(topology.rank)[at])}
        self._seen: dict[int, str] = {}
        self._locals: dict[str, tuple[int, ...]] = {}
        self._is_cut: dict[str, bool] = {}
        self._alike_along: dict[str, frozenset[str]] = {}
        self.compared: dict[str, object] = {}
        """By the name of an object: what the commit compares between all ranks that have it."""
        self.tensors: list[LiveTensor] = []
        self.tied: dict[str, str] = {}
        self.made: dict[str, tuple[LiveTensor, list[str]]] = {}
        """Tensors that are made of others, and the names of these."""

    def add_model(self, entries: Iterable[ModelEntry]) -> None:
        """Parameters and buffers; a tensor of two names is stored once."""
        replicas = self._topology.replicas
        for entry in entries:
            if not isinstance(entry.value, torch.Tensor):
                continue
            name = join("model", entry.name)
            known = self._seen.setdefault(id(entry.value), name)
            if known != name:
                parts = parts_of_tensor(entry.value)
                pairs = [(part_name(name, key), part_name(known, key)) for key in parts]
                self.tied |= pairs or [(name, known)]
                continue
            is_kept = entry.is_parameter and entry.is_kept_alike
            self._alike_along[name] = replicas if is_kept else frozenset()
            self._add(
                name,
                as_spread(entry.value, entry.value),
                "param" if entry.is_parameter else "buffer",
                said=self._said(name, entry),
                alike_along=self._alike_along[name],
                of_first=replicas if entry.is_broadcast else frozenset(),
            )

    def add_optimizer(self, entries: Iterable[StateEntry]) -> None:
        """What an optimizer keeps in tensors."""
        parameter = of = ""
        along: frozenset[str] = frozenset()
        for entry in entries:
            if entry.parameter != parameter:
                parameter = entry.parameter
                of = join("model", parameter)
                along = self._alike_along.get(of, self._topology.replicas)
            key: object = entry.key
            if not isinstance(key, str):
                problem = "optimizers keep state under names, which are text"
                raise UnsupportedTypeError(problem, where=of, value=key)
            if isinstance(entry.value, torch.Tensor):
                name = join("optimizer", parameter, key)
                said = self._said(name, entry)
                self._add(name, entry.value, "optimizer", said=said, alike_along=along, of=of)

    def add_tree(self, tensors: Mapping[str, torch.Tensor], *, is_replicated: bool) -> None:
        """The tensors of a nested dictionary, which the caller may have said to be replicated."""
        axes = frozenset(axis.name for axis in self._topology.strategy.mesh.axes)
        for name, tensor in tensors.items():
            self._add(name, tensor, "other", alike_along=axes if is_replicated else frozenset())

    def _said(self, name: str, entry: ModelEntry | StateEntry) -> SaidLayout | None:
        shared = entry.shared
        return None if shared is None else (shared.shape, self._topology.of_shared(name, shared))

    def _add(
        self,
        name: str,
        tensor: torch.Tensor,
        role: str,
        *,
        alike_along: frozenset[str],
        said: SaidLayout | None = None,
        of: str | None = None,
        of_first: frozenset[str] = frozenset(),
    ) -> None:
        """`said` is how it lies, where the tensor does not know that itself."""
        if name in self._is_cut:
            raise InvalidNameError(
                "two objects have a tensor of this name",
                value=name,
                hint="optimizers that share parameters go into state={…}, each under its own key",
            )
        parts: Mapping[str, torch.Tensor] = {}
        if not self._are_plain and not (parts := parts_of_tensor(tensor)):
            check_plain(name, tensor)
        topology = self._topology
        is_dtensor = isinstance(tensor, DTensor)
        placements = _NOT_CUT if role == "other" else self._stage
        own = None
        if isinstance(tensor, DTensor):
            of_mesh, axes, own = topology.of_dtensor(name, tensor)
            # Not a copy, where one will do: what is alike is known again by its place in memory.
            placements = {**placements, **of_mesh} if placements else of_mesh
            alike_along |= axes
        shape = tuple(tensor.shape)
        if said is not None:
            shape, cuts = said
            placements = {**placements, **cuts}
        local = local_of(tensor)
        ruled: Mapping[str, HowCut] = {}
        if self._rules.said:
            # What an optimizer keeps in another shape than the parameter's is cut as it says.
            is_like = self._locals.setdefault(of or name, local.shape) == local.shape
            if is_like or local.ndim:
                ruled = self._rules.find(name, local.shape, of=of if is_like else None)
        for axis in topology.strategy.mesh.axes if ruled else ():
            if axis.kind in ruled:
                size = 1 if is_dtensor else axis.size
                placement, whole = self._rules.placement(name, ruled[axis.kind], shape, size)
                shape = shape if is_dtensor else whole
                placements = {**placements, axis.name: placement}
        is_whole = role == "optimizer" and local.ndim and not parts and not is_dtensor
        if is_whole and self._is_cut.get(of or "") and not ruled and said is None:
            # Whether it is a part or the same on all ranks cannot be seen: the commit compares.
            self.compared[f"{ALIKE}/{name}"] = checksum(name, local)
        self._is_cut[name] = any(isinstance(p, (Shard, Strided)) for p in placements.values())
        held = LiveTensor(name, shape, placements, local, role, of, alike_along, of_first)
        if parts:
            self._add_parts(held, record_of(tensor), parts)
        elif own is not None and isinstance(tensor, DTensor):
            self.tensors.append(held._replace(own=own, tensor=tensor))
        else:
            self.tensors.append(held)

    def _add_parts(
        self, whole: LiveTensor, record: dict[str, Any], parts: Mapping[str, torch.Tensor]
    ) -> None:
        """The tensors that one is made of, cut as it is; rules may say of each how."""
        record = {**record, "shape": list(whole.shape)}  # cut by hand, it looks like a whole
        self.compared[f"{WRAPPED}/{whole.name}"] = record
        self.made[whole.name] = whole, [part_name(whole.name, key) for key in parts]
        for key, part in parts.items():
            name = part_name(whole.name, key)
            is_ruled = self._rules.find(name, tuple(part.shape))
            said = None if is_ruled else layout_of_part(name, key, part, whole)
            self._add(name, part, whole.role, said=said, alike_along=whole.alike_along, of=whole.of)
            if self._is_cut[whole.name] and not self._is_cut[name]:
                # Each rank may have made it of its own rows: the commit compares.
                self.compared[f"{ALIKE}/{name}"] = checksum(name, part)
