"""The model of a job as this rank has it: one module, or its stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase

from ckptkit.errors import InvalidNameError, UnsupportedTypeError
from ckptkit.live.adapters import Entry, adapters_for, entries_of
from ckptkit.live.groups import Group, group_of
from ckptkit.live.pending import settle
from ckptkit.live.rules import HandCuts


@runtime_checkable
class HasModel(Protocol):
    """What has a model that ranks have together, and the mesh that names its axes: what
    `distributed_model` and `as_distributed` return.
    """

    @property
    def model(self) -> Any:
        """The wrapped module, or a pipeline's stages or schedule."""

    @property
    def mesh(self) -> DeviceMesh | None:
        """None where the model's own tensors say it all."""


class Model:
    """All modules whose state is saved below `model/`, under one set of names."""

    def __init__(self, model: object) -> None:
        self.mesh: DeviceMesh | None = None
        self.rules = HandCuts()
        while isinstance(model, HasModel) and not isinstance(model, nn.Module):
            # Without the rules a part that was cut by hand would be taken for the whole.
            self.mesh, self.rules = model.mesh, getattr(model, "rules", self.rules)
            model = model.model
        self._stages: list[_PipelineStageBase] = []
        self.modules = [self._module(part) for part in _parts(model)]
        self._names: dict[int, set[str]] = {}
        self.is_staged = bool(self._stages) or len(self.modules) > 1

    def groups(self) -> list[Group]:
        """The lines of ranks that wrappers, DTensors and stages join."""
        found = [
            g for module in self.modules for a in adapters_for(module) for g in a.groups(module)
        ]
        found += [group_of("pp", stage.group) for stage in self._stages]
        return list(dict.fromkeys(found))

    def details(self) -> dict[str, Any]:
        """What the wrappers say of precision, stages and sizes; this rank's modules alike."""
        found: dict[str, Any] = {}
        for module in self.modules[:1]:
            for adapter in reversed(adapters_for(module)):
                found |= adapter.details(module)
        if self._stages:
            stage = self._stages[0]
            found["pipeline"] = {"stages": stage.num_stages, "ranks": stage.group_size}
        return found

    def entries(self) -> list[Entry]:
        """The state of all modules."""
        found: dict[str, Entry] = {}
        for number, module in enumerate(self.modules):
            settle(module)
            own = entries_of(module)
            self._names[number] = {entry.name for entry in own}
            for entry in own:
                if entry.name in found and entry.value is not found[entry.name].value:
                    raise InvalidNameError(
                        "two stages of this rank have a tensor of this name",
                        value=entry.name,
                        hint="stages keep the names of the whole model, as torch's do",
                    )
                found[entry.name] = entry
        return list(found.values())

    def absorb(self, entries: Sequence[Entry]) -> None:
        """Let the modules take over what was filled."""
        for number, module in enumerate(self.modules):
            names = self._names[number]
            adapters_for(module)[0].absorb(module, [e for e in entries if e.name in names])

    def _module(self, part: object) -> nn.Module:
        if isinstance(part, _PipelineStageBase):
            self._stages.append(part)
            part = part.submod
        if not isinstance(part, nn.Module):
            raise UnsupportedTypeError(
                "not a model",
                value=type(part).__name__,
                hint="pass a module, a PipelineStage, a schedule, or a list of this rank's stages; "
                "what has only state_dict() goes into state={…}",
            )
        return part


def _parts(model: object) -> list[object]:
    if isinstance(model, PipelineScheduleSingle):
        return [model._stage]
    if isinstance(model, PipelineScheduleMulti):
        return list(model._stages)
    if isinstance(model, (list, tuple)):
        return list(model)
    return [model]
