"""The one-liner: what is done with the activations of a model's blocks, as people write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.activation.budget import fit
from ckptkit.activation.offload import HostMemory, Offloaded
from ckptkit.activation.partition import Partition, group_for
from ckptkit.activation.recompute import BufferCopies, Recomputed, Undo, selective
from ckptkit.errors import UsageError
from ckptkit.live.state.entries import canonical_names, every_module
from ckptkit.live.wrappers.modules import CONTAINERS
from ckptkit.live.wrappers.training import Model
from ckptkit.model.document import parse_size

_PLAIN = ("full", "selective", "offload", "partition")
_HINT = f"there are {', '.join(_PLAIN)}, every:2 and budget:2GiB"
_EVERY = re.compile(r"[1-9]\d{0,5}", re.ASCII)
_OPTIONS = {
    "step": ("budget", "what a budget measures"),
    "group": ("partition", "who shares a partition"),
    "pin_memory": ("offload", "about the host memory of offload"),
}
BlockChoice = type[nn.Module] | Sequence[type[nn.Module] | str]


def checkpoint_activations(
    model: Any,
    policy: str = "full",
    *,
    blocks: BlockChoice | None = None,
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
    kind, number = _parsed(policy)
    for name, value in (("step", step), ("group", group), ("pin_memory", pin_memory)):
        wanted, what = _OPTIONS[name]
        if value is not None and kind != wanted:
            raise UsageError(f"{name}= is {what}", value=policy)
    whole = Model(model)
    found: dict[str, nn.Module] = {}
    for stage, module in enumerate(whole.modules):
        for name, block in _blocks_of(module, blocks).items():
            if not any(block is each for each in found.values()):
                # Stages of one rank may have blocks of equal names.
                found[f"stage {stage}: {name}" if name in found else name] = block
    if not found and not whole.is_staged:  # a stage may have none
        raise UsageError(
            "the model has no such blocks",
            where=type(whole.modules[0]).__name__,
            value=blocks,
            hint="blocks= takes their class, or patterns of names such as ['layers.*']",
        )
    undo = Undo()
    if kind == "budget":
        if not callable(step):
            raise UsageError(
                "a budget needs a step to measure",
                value=step,
                hint="pass step=lambda: loss_of(model(inputs), targets).backward()",
            )
        fit(whole.modules, found, number, step, undo)
    elif kind == "offload":
        memory = HostMemory(pin=pin_memory)
        undo.put(found, lambda _, block, plain: Offloaded(block, plain, memory))
    else:
        contexts, copies = selective if kind == "selective" else None, BufferCopies()
        is_cut = kind == "partition"
        partition = Partition(group_for(whole.modules[0], group)) if is_cut else None

        def recomputed(name: str, block: nn.Module, plain: Callable[..., Any]) -> Recomputed:
            around = nullcontext if partition is None else partial(partition.around, name)
            return Recomputed(block, plain, contexts=contexts, around=around, copies=copies)

        every = number if kind == "every" else 1
        undo.put(dict(list(found.items())[::every]), recomputed)
    return Checkpointed(model, undo)


class Checkpointed(NamedTuple):
    """`model, undo = checkpoint_activations(...)`.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> model, undo = checkpoint_activations(model, "full", blocks=nn.Linear)
    >>> undo()
    """

    model: Any
    undo: Undo


def _parsed(policy: str) -> tuple[str, int]:
    """The kind of a policy; of "every:n" the n with it, of "budget:2GiB" the bytes."""
    kind, colon, amount = str(policy).partition(":")
    if kind in _PLAIN and not colon:
        return kind, 1
    if kind == "every" and _EVERY.fullmatch(amount):
        return kind, int(amount)
    if kind == "budget" and colon:
        return kind, parse_size(amount)
    raise UsageError("no policy for activations", value=policy, hint=_HINT)


def _blocks_of(model: nn.Module, wanted: BlockChoice | None) -> dict[str, nn.Module]:
    """The blocks of a model by name, in their order.

    They are what lies in its outermost lists; or the outermost modules of a class, or whose names
    match a pattern. One of several names has its first.
    """
    canonical = canonical_names(every_module(model))
    found = _listed(model, "") if wanted is None else _matching(model, wanted, canonical)
    blocks: dict[str, nn.Module] = {}
    for name, outer in found:
        block = outer
        # What is recomputed lies within FSDP1, whose own hooks are to run once.
        while isinstance(block, FullyShardedDataParallel):
            block = block.module
        parts = name.split(".")
        around = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts))]
        is_checkpointed = hasattr(vars(block).get("forward"), "plain_forward")
        if is_checkpointed or any(isinstance(each, CheckpointWrapper) for each in (*around, block)):
            raise UsageError(
                "a block is checkpointed already",
                where=canonical(name),
                hint="undo that, or leave it so",
            )
        if not any(block is each for each in blocks.values()):
            blocks[canonical(name)] = block
    return blocks


def _listed(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, CONTAINERS)
    for name, child in module.named_children():
        where = f"{prefix}{name}"
        if is_list and not isinstance(child, CONTAINERS):
            # A single norm or projection in a list is no block.
            if next(child.children(), None) is not None:
                yield where, child
        else:
            yield from _listed(child, f"{where}.")


def _matching(
    model: nn.Module, wanted: BlockChoice, canonical: Callable[[str], str]
) -> Iterator[tuple[str, nn.Module]]:
    given: Any = (wanted,) if isinstance(wanted, (type, str)) else wanted
    each = tuple(given) if isinstance(given, Iterable) else ()
    if not each or not all(isinstance(one, (type, str)) for one in each):
        raise UsageError(
            "blocks= takes a class, or a list of classes and of patterns of names", value=wanted
        )
    kinds = tuple(kind for kind in each if isinstance(kind, type))
    patterns = [pattern.split(".") for pattern in each if isinstance(pattern, str)]
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in taken) or not name:
            continue
        parts = canonical(name).split(".")
        # A star stands within one part of a name.
        if isinstance(module, kinds) or any(
            len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))
            for pattern in patterns
        ):
            taken.append(name)
            yield name, module
