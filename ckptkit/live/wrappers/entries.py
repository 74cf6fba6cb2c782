"""What a wrapper says of the state of a model and its optimizers: one entry for each value, under
the name that the model's author gave, whatever wraps the model now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptkit.errors import LayoutError, UnsupportedTypeError
from ckptkit.live.state.lines import SharedOut


class StateMismatchError(LayoutError):
    """The step does not fit the objects it was to be loaded into."""


class ModelEntry(NamedTuple):
    """One item of a model's state under its canonical name; `value` is no tensor for what
    `get_extra_state` gives.
    """

    name: str
    value: Any
    is_parameter: bool
    shared: SharedOut | None = None
    """How ranks share it out, where the tensor itself does not know it."""
    source: Any = None
    """What the wrapper that made it has to know of it to take it over."""
    is_kept_alike: bool = True
    """Whether a parameter's replicas are kept alike, as far as some wrapper does that."""
    is_broadcast: bool = False
    """Whether some wrapper gives all replicas the first one's buffer before each forward pass."""


Names = Mapping[nn.Parameter, str]
"""The canonical name of every parameter of the model."""


class StateEntry(NamedTuple):
    """One value that an optimizer keeps for a parameter."""

    parameter: str
    key: str
    value: Any
    shared: SharedOut | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint holds for one key of one parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_like_parameter: bool
    """Whether it has an element for each of the parameter's."""
    is_wrapper: bool = False
    """Whether it is made of several tensors."""


SavedState = Mapping[str, Mapping[str, Any]]
"""By parameter and key; empty for a parameter that had no state. A list or a dictionary that an
optimizer keeps is one here too, with a `Saved` in the place of each tensor."""

# Each wrapper and the attribute at which it keeps what it wraps.
_WRAPPERS: tuple[tuple[type[nn.Module], str], ...] = (
    (DistributedDataParallel, "module"),
    (DataParallel, "module"),
    (FullyShardedDataParallel, "_fsdp_wrapped_module"),
    (CheckpointWrapper, "_checkpoint_wrapped_module"),
)
_COMPILED = "_orig_mod"


def canonical_names(submodules: Sequence[nn.Module]) -> Callable[[str], str]:
    """A function from the names that the wrapped model uses to those of the plain one.

    `submodules` are all of a model, as `every_module` has them: the model itself comes first.

    The wrappers whose hooks leave themselves out of a state dict are known too.
    """
    wrapped = {each: inner for each in submodules if (inner := _inner(each))}
    if not wrapped:
        return str

    def canonical(name: str) -> str:
        at: nn.Module | None = submodules[0]
        kept = []
        for node in name.split("."):
            # The name may leave out this wrapper, and those inside it.
            while at is not None and (inner := wrapped.get(at)) is not None and inner != node:
                at = at._modules[inner]
            if at is None or at not in wrapped:
                kept.append(node)
            at = None if at is None else at._modules.get(node)
        return ".".join(kept)

    return canonical


def every_module(module: nn.Module) -> list[nn.Module]:
    """A module and all inside of it, each once, as `modules()` has them: that asks one generator of
    each level for every one of thousands.
    """
    found: dict[nn.Module, None] = {}
    left = [module]
    while left:
        each = left.pop()
        if each not in found:
            found[each] = None
            left += [inner for inner in reversed(each._modules.values()) if inner is not None]
    return list(found)


@lru_cache(maxsize=256)
def _inner_of(kind: type[nn.Module]) -> str | None:
    return next((inner for wrapper, inner in _WRAPPERS if issubclass(kind, wrapper)), None)


def _inner(module: nn.Module) -> str | None:
    # By the type: some wrappers are abstract, and take long to say what they are no instance of.
    if inner := _inner_of(type(module)):  # type: ignore[arg-type]
        return inner
    # A compiled module is known by what it keeps: its class loads the compiler when imported.
    return _COMPILED if _COMPILED in module._modules else None


def state_of(module: nn.Module) -> dict[str, Any]:
    """The module's `state_dict`, its parameters themselves: optimizers know them by identity."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError as error:
        for name, each in module.named_modules():
            try:
                inspect.signature(each.state_dict).bind(destination={}, prefix="", keep_vars=True)
            except TypeError:
                raise UnsupportedTypeError(
                    "the state_dict() of this module does not take what torch passes to it",
                    where=name or "the model",
                    value=type(each).__qualname__,
                    hint="def state_dict(self, *args, **kwargs), which passes them on",
                ) from error
        raise


def parameter_names(entries: Iterable[ModelEntry]) -> dict[nn.Parameter, str]:
    """The name of each parameter; the first of several."""
    names: dict[nn.Parameter, str] = {}
    for entry in entries:
        if isinstance(entry.value, nn.Parameter):
            names.setdefault(entry.value, entry.name)
    return names
