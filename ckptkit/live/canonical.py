"""The names of a model's tensors as the model's author wrote them, whatever wraps it now."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

# Each wrapper and the attribute at which it keeps what it wraps.
_WRAPPERS: tuple[tuple[type[nn.Module], str], ...] = (
    (DistributedDataParallel, "module"),
    (DataParallel, "module"),
    (FullyShardedDataParallel, "_fsdp_wrapped_module"),
    (CheckpointWrapper, "_checkpoint_wrapped_module"),
)
_COMPILED = "_orig_mod"


def canonical_names(model: nn.Module) -> Callable[[str], str]:
    """A function from the names that the wrapped model uses to those of the plain one.

    The wrappers whose hooks leave themselves out of a state dict are known too.
    """

    def canonical(name: str) -> str:
        at: nn.Module | None = model
        kept = []
        for node in name.split("."):
            # The name may leave out this wrapper, and those inside it.
            while at is not None and (inner := _inner(at)) is not None and inner != node:
                at = at._modules[inner]
            if at is None or _inner(at) is None:
                kept.append(node)
            at = None if at is None else at._modules.get(node)
        return ".".join(kept)

    return canonical


def _inner(module: nn.Module) -> str | None:
    for kind, inner in _WRAPPERS:
        if isinstance(module, kind):
            return inner
    # A compiled module is known by what it keeps: its class loads the compiler when imported.
    return _COMPILED if _COMPILED in module._modules else None
