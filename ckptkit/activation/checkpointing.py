"""The one-liner: what is done with the activations of a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.activation.applied import Checkpointed, Undo, Way
from ckptkit.activation.blocks import Wanted, blocks_of
from ckptkit.activation.budget import fit
from ckptkit.activation.copies import Copies
from ckptkit.activation.offload import Offload, Offloaded
from ckptkit.activation.partition import Partition, group_for
from ckptkit.activation.policy import Policy
from ckptkit.activation.recompute import Recomputed, selective
from ckptkit.errors import UsageError
from ckptkit.live.wrappers.training import Model

_OPTIONS = {
    "step": ("budget", "what a budget measures"),
    "group": ("partition", "who shares a partition"),
    "pin_memory": ("offload", "about the host memory of offload"),
}


def checkpoint_activations(
    model: Any,
    policy: str | Policy = "full",
    *,
    blocks: Wanted | None = None,
    step: Callable[[], object] | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    pin_memory: bool | None = None,
) -> Checkpointed:
    """Hold fewer activations between forward and backward; gives the model, and `undo`.

    "full" recomputes every block, "every:n" the first of n, "selective" what is cheap in each,
    "budget:2GiB" those that save enough at the least time, as measured in some runs of `step` (a
    forward and a backward, which leaves no trace), "offload" moves activations to host memory, and
    "partition" recomputes every block from an input of which each tensor-parallel rank of `group`
    keeps a piece. Where there are ranks, a budget is for each of them, and all call this together.
    The model is a module, what a pipeline has on this rank, or what `as_distributed` gives.
    """
    parsed = Policy.parse(policy)
    _check_given(parsed, step=step, group=group, pin_memory=pin_memory)
    whole = Model(_modules_of(model))
    modules = whole.modules
    found = _blocks_of_all(modules, blocks)
    if not found and not whole.is_staged:  # a stage may have none
        raise UsageError(
            "the model has no such blocks",
            where=type(modules[0]).__name__,
            value=blocks,
            hint="blocks= takes their class, or patterns of names such as ['layers.*']",
        )
    undo = Undo()
    if parsed.kind == "budget":
        if not callable(step):
            raise UsageError(
                "a budget needs a step to measure",
                value=step,
                hint="pass step=lambda: loss_of(model(inputs), targets).backward()",
            )
        fit(modules, found, parsed.budget, step, undo)
        return Checkpointed(model, undo)
    if parsed.kind == "every":
        found = dict(list(found.items())[:: parsed.every])
    undo.put(found, _way(parsed, modules, group, pin_memory=pin_memory))
    return Checkpointed(model, undo)


def _check_given(policy: Policy, **given: object) -> None:
    for name, value in given.items():
        kind, what = _OPTIONS[name]
        if value is not None and policy.kind != kind:
            raise UsageError(f"{name}= is {what}", value=str(policy))


def _blocks_of_all(modules: list[nn.Module], wanted: Wanted | None) -> dict[str, nn.Module]:
    """Those of one module by name; stages of one rank may have blocks of equal names."""
    found: dict[str, nn.Module] = {}
    for number, module in enumerate(modules):
        for name, block in blocks_of(module, wanted).items():
            if not any(block is each for each in found.values()):
                found[f"stage {number}: {name}" if name in found else name] = block
    return found


def _modules_of(model: Any) -> Any:
    """What `as_distributed` gives stands on parallel, as this does not: known by what it has."""
    is_around = hasattr(model, "modules") and hasattr(model, "strategy")
    return model.model if is_around and not isinstance(model, nn.Module) else model


def _way(
    policy: Policy,
    modules: list[nn.Module],
    group: dist.ProcessGroup | DeviceMesh | None,
    *,
    pin_memory: bool | None,
) -> Way:
    if policy.kind == "offload":
        offload = Offload(pin_memory=pin_memory)
        return lambda _, block, plain: Offloaded(block, plain, offload)
    if policy.kind == "partition":
        partition = Partition(group_for(modules[0], group))
        return lambda name, block, plain: Recomputed(
            block, plain, around=partial(partition.around, name)
        )
    contexts, copies = selective if policy.kind == "selective" else None, Copies()
    return lambda _, block, plain: Recomputed(block, plain, contexts=contexts, copies=copies)
