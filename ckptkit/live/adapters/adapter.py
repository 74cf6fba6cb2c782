"""The questions asked about one way to spread a model over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import UnsupportedTypeError
from ckptkit.live.canonical import canonical_names
from ckptkit.live.flat import cut_before
from ckptkit.live.groups import Group
from ckptkit.live.tensors import as_spread
from ckptkit.live.topology import Topology
from ckptkit.model import Placement

Placements = Callable[[Topology], Mapping[str, Placement]]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One item of a model's state under its canonical name; `value` is no tensor for what
    `get_extra_state` gives.
    """

    name: str
    value: Any
    is_parameter: bool
    shape: tuple[int, ...] | None = None
    """The global shape, where the tensor itself does not know it."""
    placements: Placements | None = None
    """How the axes cut it, where the tensor itself does not know it."""
    source: Any = None
    """What the adapter that made it has to know of it in `absorb`."""
    is_kept_alike: bool = True
    """Whether a parameter's replicas are kept alike, as far as some wrapper does that."""
    is_broadcast: bool = False
    """Whether some wrapper gives all replicas the first one's buffer before each forward pass."""


class Adapter(Protocol):
    """One way to spread a model over ranks.

    A model may be wrapped in several ways at once: each adapter says what it knows, and nothing
    is assumed where none knows.
    """

    def recognises(self, module: nn.Module) -> bool:
        """Whether some part of the module is spread in this way."""

    def groups(self, module: nn.Module) -> list[Group]:
        """The lines of ranks that it joins."""

    def details(self, module: nn.Module) -> dict[str, Any]:
        """What a manifest should say: precision, stage, sizes, as the real objects have them."""

    def entries(self, module: nn.Module) -> list[Entry]:
        """The module's state, in memory that a load may fill."""

    def absorb(self, module: nn.Module, entries: list[Entry]) -> None:
        """Take over entries that were filled, where their memory is not the module's own."""


class InPlace:
    """Reads a module's state where it lies: DTensors and plain tensors."""

    def entries(self, module: nn.Module) -> list[Entry]:
        """The module's own tensors under their canonical names."""
        canonical = canonical_names(module)
        found = []
        state = {**state_of(module), **parameters_of_ddp(module)}
        for name, value in state.items():
            found.append(Entry(canonical(name), value, isinstance(value, nn.Parameter)))
        return found

    def absorb(self, module: nn.Module, entries: list[Entry]) -> None:
        """Hand over what `state_dict` made up: extra state and tensors of its hooks."""
        canonical = canonical_names(module)
        taken = parameters_of_ddp(module).values()
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers(), *taken)}
        made_up = {entry.name: entry.value for entry in entries if id(entry.value) not in own}
        if made_up:
            known = state_of(module)
            module.load_state_dict(
                {name: made_up[canonical(name)] for name in known if canonical(name) in made_up},
                strict=False,
            )


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


def dtensors(module: nn.Module) -> list[DTensorSpec]:
    """How the DTensors lie that are a module's parameters and buffers, or that DDP and FSDP1 keep
    plain parameters of.
    """
    tensors = [*module.parameters(), *module.buffers(), *parameters_of_ddp(module).values()]
    found = [as_spread(tensor, tensor) for tensor in tensors]
    # Gathered, those that are flat in FSDP1 are DTensors again.
    own = [t for t in found if isinstance(t, DTensor) and not _is_fsdp_flattened(t)]
    return [tensor._spec for tensor in own] + cut_before(module)


def ddp_wrappers(module: nn.Module) -> list[DistributedDataParallel]:
    """Those anywhere in a model; the older, composable `replicate` keeps its own beside it, from
    the first forward on.
    """
    states = (getattr(replicate.state(m), "_ddp", None) for m in module.modules())
    found = [*module.modules(), *states]
    return [each for each in found if isinstance(each, DistributedDataParallel)]


def parameters_of_ddp(module: nn.Module) -> dict[str, nn.Parameter]:
    """By name, the parameters that `DistributedDataParallel` has taken off modules. Of DTensors it
    makes plain parameters; from the first forward on modules have DTensors of the same memory
    instead, which are no parameters.
    """
    wrappers = ddp_wrappers(module)
    plain = [p for w in wrappers for p in w._module_parameters if hasattr(p, "_st_info")]
    at = {(p.data_ptr(), tuple(p.shape)): p for p in plain}
    found: dict[str, nn.Parameter] = {}
    for path, part in module.named_modules() if plain else ():
        for name, value in vars(part).items():
            local = value._local_tensor if isinstance(value, DTensor) else None
            if local is not None and (local.data_ptr(), tuple(local.shape)) in at:
                key = (local.data_ptr(), tuple(local.shape))
                found[f"{path}.{name}" if path else name] = at[key]
    return found
