"""The objects of a training whose state is saved or loaded: its model, one module or the stages of
a pipeline that this rank has, its optimizers, and what has a `state_dict` of its own.

How models and optimizers are spread over ranks is in the chapters: `modules` and `optimizers` for
most, `fsdp1` with `flat` for FullyShardedDataParallel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.optim import Optimizer

from ckptkit.errors import InvalidNameError, UnsupportedTypeError, UsageError
from ckptkit.format.names import ALIKE, WRAPPED, check_named, matches, pattern_list
from ckptkit.format.objects import PerDataRank, PerRank, Replicated, Split, Sum
from ckptkit.live.state.entries import (
    Line,
    ModelEntry,
    canonical_names,
    every_module,
    kind_of,
    line_of,
    parameter_names,
)
from ckptkit.live.state.parts import HandCuts
from ckptkit.live.wrappers import fsdp1, modules
from ckptkit.live.wrappers.flat import has_fsdp1
from ckptkit.live.wrappers.optimizers import PlainOptimizer, Zero1Optimizer


class TrainingObjects(TypedDict, total=False):
    """The objects of a training, as saves and loads take them; None counts as left out."""

    model: object
    """A module, wrapped or not; a pipeline's stage or schedule, or a list of this rank's stages."""
    optimizer: object
    """One of torch's, or a list or a dictionary of such; only together with its model."""
    scheduler: object
    dataloader: object
    """What reads data: its state belongs to this rank's share of that."""
    scaler: object
    state: Mapping[str, object] | None
    """By names of their own, other objects with `state_dict`, and nested dictionaries."""


@dataclass(frozen=True, slots=True, eq=False)
class Training:
    """The objects of a job whose state is saved or loaded, as the caller passed them."""

    model: Model | None = None
    optimizers: Sequence[PlainOptimizer] = ()
    stateful: Mapping[str, object] = field(default_factory=dict)
    """What has `state_dict`, and nested dictionaries, by the name of its group."""

    @classmethod
    def of(cls, skip: Iterable[str] = (), **objects: Unpack[TrainingObjects]) -> Training:
        """What is to be saved or loaded, checked for clashes, but for the groups to skip."""
        # What is misspelt would not be saved, or left as it was.
        for unknown in objects.keys() - TrainingObjects.__optional_keys__:
            raise TypeError(f"got an unexpected keyword argument {unknown!r}")
        model, optimizer = objects.get("model"), objects.get("optimizer")
        state = objects.get("state")
        state = {} if state is None else state
        check_named(state, "state")
        known = None if model is None else Model(model)
        if optimizer is not None and known is None:
            raise UsageError(
                "an optimizer without its model: its state is named after the parameters",
                hint="pass model=… too",
            )
        # A pattern of names may mean several groups; the model's values are what others go with.
        groups = {"optimizer", "scheduler", "dataloader", "scaler", *state}
        skip = pattern_list(skip, "skip")
        for pattern in skip:
            if not any(matches((pattern,), name, name) for name in groups):
                raise UsageError(
                    "no group that can be skipped has this name",
                    value=pattern,
                    hint=f"these can: {', '.join(sorted(groups))}",
                )
        left = {name for name in groups if matches(skip, name, name)}
        stepped: list[object] = [optimizer]
        if optimizer is None or "optimizer" in left:
            stepped = []
        elif isinstance(optimizer, Mapping):
            stepped = list(optimizer.values())
        elif isinstance(optimizer, (list, tuple)):
            stepped = list(optimizer)
        optimizers = [_optimizer(each, known) for each in stepped]
        stateful = dict(state)
        for name in ("scheduler", "dataloader", "scaler"):
            if (value := objects.get(name)) is not None:
                if name in stateful:
                    raise UsageError("passed twice", where=f"state[{name!r}]")
                stateful[name] = list(value) if isinstance(value, (list, tuple)) else value
        if objects.get("dataloader") is not None:
            stateful["dataloader"] = PerDataRank(stateful["dataloader"])
        for name, value in stateful.items():
            _check_stateful(name, value)
        return cls(known, optimizers, {n: v for n, v in stateful.items() if n not in left})

    def names(self, entries: Sequence[ModelEntry]) -> dict[nn.Parameter, str]:
        """The name of each parameter of the model's entries, and of each that an optimizer steps:
        hooks of `state_dict` may show others in its place, such as the thirds of a projection.
        """
        names = parameter_names(entries)
        stepped = (parameter for each in self.optimizers for parameter in each.parameters())
        if self.model is not None and not all(parameter in names for parameter in stepped):
            for each in self.model.submodules:
                canonical = canonical_names(each)
                for name, parameter in each[0].named_parameters():
                    names.setdefault(parameter, canonical(name))
        return names

    def details(self) -> dict[str, Any]:
        """What a manifest should say of the model."""
        return {} if self.model is None else self.model.details()


def _optimizer(optimizer: object, model: Model | None) -> PlainOptimizer:
    if not isinstance(optimizer, Optimizer):
        raise UnsupportedTypeError(
            "not an optimizer",
            value=type(optimizer).__name__,
            hint="pass torch optimizers; what has only state_dict() goes into state={…}",
        )
    # Whoever has one has imported it; importing it here would take a while, and warns.
    zero1 = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero1 is not None and isinstance(optimizer, zero1.ZeroRedundancyOptimizer):
        found: PlainOptimizer = Zero1Optimizer(optimizer)
    elif model is not None and model.needs_collectives:
        found = fsdp1.FSDP1Optimizer(optimizer, model.modules)
    else:
        found = PlainOptimizer(optimizer)
    # State is saved by parameter: what some optimizers keep for all of them would be lost.
    keys: Iterable[object] = found.state
    if other := [key for key in keys if not isinstance(key, torch.Tensor)]:
        raise UnsupportedTypeError(
            f"the {found.kind} keeps state that belongs to no parameter",
            where="optimizer",
            value=other[0],
            hint='state={"optimizer state": optimizer} in place of optimizer=… takes all that its '
            "state_dict() has; the next job then has to be spread as this one",
        )
    return found


def _check_stateful(name: str, value: object) -> None:
    """Refuse what a load could not give back: it fills objects and containers in place."""
    # Below the last three are values that a step has beside these objects.
    top = name.partition("/")[0]
    if name in ("model", "optimizer") or top in ("extra", WRAPPED, ALIKE):
        raise InvalidNameError(
            "this group is ckptkit's own",
            where="state",
            value=name,
            hint="pass model=…, optimizer=… or extra=…, or choose another key",
        )
    inner = value.value if isinstance(value, (Replicated, PerRank, PerDataRank)) else value
    if isinstance(inner, (Sum, Split)):
        raise UsageError("Sum and Split values go into extra={…}", value=inner)
    if not (hasattr(inner, "load_state_dict") or isinstance(inner, (dict, list, torch.Tensor))):
        raise UsageError(
            "neither an object with load_state_dict nor a dictionary, a list or a tensor",
            where=f"state[{name!r}]",
            value=inner,
            hint="plain values go into extra={…}",
        )


class Model:
    """All modules whose state is saved below `model/`, under one set of names."""

    def __init__(self, model: object) -> None:
        self.mesh: DeviceMesh | None = None
        self.rules = HandCuts()
        self.extra_shapes: Mapping[str, tuple[int, ...]] = {}
        """For a load: by name the shapes of tensors that `get_extra_state` gave when it was saved.
        They may be others each time, and modules take over all of it."""
        # A `DistributedModel`, and what `as_distributed` returns: a module, stages or a schedule,
        # and the mesh that names its axes; None where the model's own tensors say it all.
        while (
            not isinstance(model, nn.Module) and hasattr(model, "model") and hasattr(model, "mesh")
        ):
            # Without the rules a part that was cut by hand would be taken for the whole.
            self.mesh, self.rules = model.mesh, getattr(model, "rules", self.rules)
            model = model.model
        given: list[object] = [model]
        if isinstance(model, PipelineScheduleSingle):
            given = [model._stage]
        elif isinstance(model, PipelineScheduleMulti):
            given = list(model._stages)
        elif isinstance(model, (list, tuple)):
            given = list(model)
        self._stages = [each for each in given if isinstance(each, _PipelineStageBase)]
        self.modules: list[nn.Module] = []
        for each in given:
            module = each.submod if isinstance(each, _PipelineStageBase) else each
            if not isinstance(module, nn.Module):
                raise UnsupportedTypeError(
                    "not a model",
                    value=type(module).__name__,
                    hint="pass a module, a PipelineStage, a schedule, or a list of this rank's "
                    "stages; what has only state_dict() goes into state={…}",
                )
            self.modules.append(module)
        self._names: list[set[str]] = []
        # One module may be one stage, of another library's pipeline: the mesh that it comes with
        # says so.
        axes = self.mesh.mesh_dim_names or () if self.mesh is not None else ()
        self.is_staged = bool(self._stages) or len(self.modules) > 1
        self.is_staged |= any(kind_of(axis) == "pp" for axis in axes)

    @cached_property
    def submodules(self) -> list[modules.Submodules]:
        """Each module and all inside of it. Walked once, as there may be 100,000: every call looks
        at a Model of its own, and modules may change between two.
        """
        return [modules.Submodules(every_module(module)) for module in self.modules]

    @cached_property
    def needs_collectives(self) -> bool:
        """Whether its state, and that of its optimizers, is read in collectives."""
        return any(map(has_fsdp1, self.submodules))

    def lines(self) -> list[Line]:
        """The lines of ranks that wrappers, DTensors and stages join."""
        found: list[Line] = []
        for each in self.submodules:
            found += fsdp1.lines(each) + modules.lines(each)
        found += [line_of("pp", stage.group) for stage in self._stages]
        return list(dict.fromkeys(found))

    def details(self) -> dict[str, Any]:
        """What a manifest should say of precision, stages and sizes, as the real objects have them;
        this rank's modules alike.
        """
        found: dict[str, Any] = {}
        for each in self.submodules[:1]:
            found |= modules.details(each) | fsdp1.details(each)
        if self._stages:
            stage = self._stages[0]
            found["pipeline"] = {"stages": stage.num_stages, "ranks": stage.group_size}
        return found

    def entries(self) -> list[ModelEntry]:
        """The state of all modules, in memory that a load may fill."""
        found: dict[str, ModelEntry] = {}
        self._names = []
        for each in self.submodules:
            modules.settle(each)
            kind = fsdp1 if has_fsdp1(each) else modules
            own = kind.entries(each)
            self._names.append({entry.name for entry in own})
            if shapes := self.extra_shapes:
                own = [
                    entry._replace(value=entry.value.new_empty(shapes[entry.name]))
                    if entry.name in shapes and type(entry.value) is torch.Tensor
                    else entry
                    for entry in own
                ]
            for entry in own:
                if entry.name in found and entry.value is not found[entry.name].value:
                    raise InvalidNameError(
                        "two stages of this rank have a tensor of this name",
                        value=entry.name,
                        hint="stages keep the names of the whole model, as torch's do",
                    )
                found[entry.name] = entry
        return list(found.values())

    def absorb(self, entries: Sequence[ModelEntry]) -> None:
        """Let the modules take over what was filled, where its memory is not their own."""
        for each, names in zip(self.submodules, self._names, strict=True):
            mine = [entry for entry in entries if entry.name in names]
            kind = fsdp1 if has_fsdp1(each) else modules
            kind.absorb(each, mine)
