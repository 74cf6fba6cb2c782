"""The repeated blocks of a model: what is kept, recomputed or moved as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

from ckptkit.errors import UsageError
from ckptkit.live.wrappers.entries import canonical_names

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
Wanted = type[nn.Module] | Sequence[type[nn.Module] | str]


def blocks_of(model: nn.Module, wanted: Wanted | None = None) -> dict[str, nn.Module]:
    """The blocks of a model by name, in their order.

    They are what lies in its outermost lists; or the outermost modules of a class, or whose names
    match a pattern. One of several names has its first.
    """
    found = dict(_listed(model, "") if wanted is None else _matching(model, wanted))
    canonical = canonical_names(model)
    blocks: dict[str, nn.Module] = {}
    for name, outer in found.items():
        block = _unsharded(outer)
        if _is_checkpointed(block) or _is_within_checkpointed(model, name):
            raise UsageError(
                "a block is checkpointed already",
                where=canonical(name),
                hint="undo that, or leave it so",
            )
        if not any(block is each for each in blocks.values()):
            blocks[canonical(name)] = block
    return blocks


def _listed(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    is_list = isinstance(module, _CONTAINERS)
    for name, child in module.named_children():
        where = f"{prefix}{name}"
        if is_list and not isinstance(child, _CONTAINERS):
            if next(child.children(), None) is not None:
                yield where, child
        else:
            yield from _listed(child, f"{where}.")


def _matching(model: nn.Module, wanted: Wanted) -> Iterator[tuple[str, nn.Module]]:
    given: Any = (wanted,) if isinstance(wanted, (type, str)) else wanted
    each = tuple(given) if isinstance(given, Iterable) else ()
    if not each or not all(isinstance(one, (type, str)) for one in each):
        raise UsageError(
            "blocks= takes a class, or a list of classes and of patterns of names", value=wanted
        )
    kinds = tuple(kind for kind in each if isinstance(kind, type))
    patterns = [pattern for pattern in each if isinstance(pattern, str)]
    canonical = canonical_names(model)
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in taken) or not name:
            continue
        plain = canonical(name)
        if isinstance(module, kinds) or any(_matches(plain, pattern) for pattern in patterns):
            taken.append(name)
            yield name, module


def _matches(name: str, pattern: str) -> bool:
    """Whether a name has the parts of a pattern; a star stands within one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _unsharded(block: nn.Module) -> nn.Module:
    # What is recomputed lies within FSDP1, whose own hooks are to run once.
    while isinstance(block, FullyShardedDataParallel):
        block = block.module
    return block


def _is_within_checkpointed(model: nn.Module, name: str) -> bool:
    """Whether the block, or what it lies in, is wrapped by torch's own checkpointing."""
    parts = name.split(".")
    outer = [model.get_submodule(".".join(parts[:count])) for count in range(len(parts))]
    return any(isinstance(each, CheckpointWrapper) for each in outer)


def _is_checkpointed(block: nn.Module) -> bool:
    forward = vars(block).get("forward")
    return isinstance(block, CheckpointWrapper) or hasattr(forward, "plain_forward")
