"""Models whose state lies in their modules as it is: plain ones, and those of
DistributedDataParallel, `fully_shard` and tensor parallelism.

A model may be wrapped in several ways at once: each says what it knows, and nothing is assumed
where none knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import _is_fsdp_flattened
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.parallel import DistributedDataParallel

from ckptkit.live.state.entries import (
    Line,
    ModelEntry,
    canonical_names,
    dtensor_lines,
    kind_of,
    line_of,
    mesh_lines,
    state_of,
)
from ckptkit.live.state.tensors import as_spread, dtype_name
from ckptkit.live.wrappers.flat import fsdp1_units

Buffers: TypeAlias = dict[str, torch.Tensor | None]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Their `forward` need not exist, or need not be called by whoever iterates over them."""
_SHARDERS = ("fsdp", "zero1", "zero2", "zero3")


class Submodules(list[nn.Module]):
    """A module and all inside of it: of 10,000 what wraps them is looked for once."""

    @cached_property
    def ddp_wrappers(self) -> list[DistributedDataParallel]:
        """The older, composable `replicate` keeps its own beside the model, from the first forward
        on.
        """
        # Asked about a module that has none, torch leaves an empty record in it.
        states = [replicate.state(each) for each in self if STATE_KEY in vars(each)]
        inner = (getattr(state, "_ddp", None) for state in states)
        found = [*self, *(each for each in inner if each is not None)]
        # By the type, of which there are few: the class is abstract, and slow to ask.
        kinds = {
            kind for kind in set(map(type, found)) if issubclass(kind, DistributedDataParallel)
        }
        return [each for each in found if type(each) in kinds]

    @cached_property
    def ddp_parameters(self) -> dict[str, nn.Parameter]:
        """By name, the parameters that `DistributedDataParallel` has taken off modules. Of DTensors
        it makes plain parameters; from the first forward on modules have DTensors of the same
        memory instead, which are no parameters.
        """
        known = [p for wrapper in self.ddp_wrappers for p in wrapper._module_parameters]
        plain = {p for p in known if hasattr(p, "_st_info")}
        found: dict[str, nn.Parameter] = {}
        for path, each in self[0].named_modules() if plain else ():
            for name, value in vars(each).items():
                # Not by the place in memory: empty shards have none.
                of = value._local_tensor._base if isinstance(value, DTensor) else None
                if isinstance(of, nn.Parameter) and of in plain:
                    found[f"{path}.{name}" if path else name] = of
        return found

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The parameters and buffers of modules, and what DDP has taken off them; one that several
        have more than once.
        """
        kept = (
            by_name for each in self for by_name in (each._parameters, each._buffers) if by_name
        )
        own = [tensor for by_name in kept for tensor in by_name.values() if tensor is not None]
        return [*own, *self.ddp_parameters.values()]

    @cached_property
    def specs(self) -> list[DTensorSpec]:
        """How the DTensors lie that are parameters and buffers, or that DDP and FSDP1 keep plain
        parameters of.
        """
        found = [as_spread(each, each) for each in dict.fromkeys(self.tensors)]
        # Gathered, those that are flat in FSDP1 are DTensors again.
        own = [t for t in found if isinstance(t, DTensor) and not _is_fsdp_flattened(t)]
        specs = [tensor._spec for tensor in own]
        for unit in fsdp1_units(self):
            # How tensor parallelism has cut what is flat now.
            if unit._handle is not None:
                before = unit._handle.flat_param._param_extensions
                specs += [spec for spec in before if spec is not None]
        return specs

    @cached_property
    def param_groups(self) -> list[Any]:
        """What `fully_shard` gathers at once, each a group."""
        units = (each for each in self if isinstance(each, FSDPModule))
        return [group for each in units for group in own_param_groups(each)]

    @cached_property
    def fully_sharded_lines(self) -> list[Line]:
        """Those along which `fully_shard` cuts, and those along which it repeats (HSDP)."""
        meshes: dict[tuple[DeviceMesh, tuple[str, ...]], None] = {}
        for info in (group.mesh_info for group in self.param_groups):
            kinds = ["ddp"] * info.mesh.ndim
            if info.shard_mesh_dim is not None:
                kinds[info.shard_mesh_dim] = "fsdp"
            meshes[info.mesh, tuple(kinds)] = None
        # It cuts by the ranks of its group, which torch numbers upwards whatever the mesh does.
        return list(dict.fromkeys(line for each in meshes for line in mesh_lines(*each)))


def lines(submodules: Submodules) -> list[Line]:
    """The lines of ranks that the wrappers of a module and its DTensors join."""
    found = [line_of("ddp", wrapper.process_group) for wrapper in submodules.ddp_wrappers]
    found += submodules.fully_sharded_lines
    # What FSDP cuts says nothing of tensor parallelism.
    fsdp = _fsdp_ranks(submodules)
    own = dtensor_lines(submodules.specs)
    return found + [line for line in own if line.ranks not in fsdp]


def details(submodules: Submodules) -> dict[str, Any]:
    """What they say of precision, stages and sizes."""
    dtypes = {p.dtype for each in submodules for p in each._parameters.values() if p is not None}
    names = sorted(str(dtype_name(dtype)) for dtype in dtypes)
    found: dict[str, Any] = {"precision": {"parameters": names}}
    fsdp = _fsdp_ranks(submodules)
    dims = Counter[str]()  # how many tensors are cut along each, by others than FSDP
    others: dict[DeviceMesh, list[int]] = {}  # those of its dims along which these do
    for spec in submodules.specs:
        mesh = spec.device_mesh
        if mesh not in others:
            kinds = [kind_of(name) for name in mesh.mesh_dim_names or ("",) * mesh.ndim]
            along = enumerate(mesh_lines(mesh, ("tp",) * mesh.ndim))
            others[mesh] = [
                n
                for n, line in along
                if line.ranks not in fsdp and line.size > 1 and kinds[n] not in _SHARDERS
            ]
        cuts = (spec.placements[n] for n in others[mesh])
        dims.update(str(cut.dim) for cut in cuts if hasattr(cut, "dim"))
    if dims:
        found["tp"] = {"cut_dims": dict(sorted(dims.items()))}
    if groups := submodules.param_groups:
        # The outermost module stays gathered on its own, and often the last of several units.
        gathered = [group.post_forward_mesh_info is None for group in groups]
        policy = groups[0].mp_policy
        found["fsdp"] = {
            "zero_stage": 2 if all(gathered) else 3,
            "units": len(groups),
            "mixed_precision": {
                "parameters": dtype_name(policy.param_dtype),
                "reduction": dtype_name(policy.reduce_dtype),
                "output": dtype_name(policy.output_dtype),
            },
            "offload": type(groups[0].offload_policy).__name__,
        }
    for wrapper in submodules.ddp_wrappers[:1]:
        mixed = wrapper.mixed_precision
        found["ddp"] = {
            "bucket_bytes": int(wrapper.bucket_bytes_cap),
            "broadcast_buffers": bool(wrapper.broadcast_buffers),
            "gradient_as_bucket_view": bool(wrapper.gradient_as_bucket_view),
            "static_graph": bool(wrapper.static_graph),
            "mixed_precision": None if mixed is None else str(mixed),
        }
    return found


def entries(submodules: Submodules) -> list[ModelEntry]:
    """The module's own tensors under their canonical names. Of what `DistributedDataParallel`
    wraps it keeps those parameters alike that it knows; between two forward passes buffers such as
    running means differ, until the wrapper gives all ranks those of the first.
    """
    module, canonical = submodules[0], canonical_names(submodules)
    wrappers = submodules.ddp_wrappers
    kept = {id(p) for wrapper in wrappers for p in wrapper._module_parameters}
    broadcast = {
        id(buffer)
        for wrapper in wrappers
        if wrapper.broadcast_buffers
        for name, buffer in wrapper.module.named_buffers()
        if name not in wrapper.parameters_to_ignore
    }
    found = []
    for name, value in {**state_of(module), **submodules.ddp_parameters}.items():
        is_parameter = isinstance(value, nn.Parameter)
        entry = ModelEntry(
            canonical(name),
            value,
            is_parameter,
            is_kept_alike=not wrappers or not is_parameter or id(value) in kept,
            is_broadcast=not is_parameter and id(value) in broadcast,
        )
        found.append(entry)
    return found


def absorb(submodules: Submodules, entries: Sequence[ModelEntry]) -> None:
    """Hand over what `state_dict` made up: extra state and tensors of its hooks."""
    module = submodules[0]
    own = set(map(id, submodules.tensors))
    made_up = {entry.name: entry.value for entry in entries if id(entry.value) not in own}
    if made_up:
        canonical = canonical_names(submodules)
        known = {name: canonical(name) for name in state_of(module)}
        state = {name: made_up[own] for name, own in known.items() if own in made_up}
        module.load_state_dict(state, strict=False)


# `fully_shard` (FSDP2): parameters are DTensors.


def own_param_groups(module: FSDPModule) -> list[Any]:
    """What is gathered for a module, or for it and others, by the names of several torches."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    if several:  # asked for the one, torch raises where there are more
        return list(several)
    single = getattr(state, "_fsdp_param_group", None)
    return [single] if single else []


def _fsdp_ranks(submodules: Submodules) -> set[tuple[int, ...]]:
    """The lines of `fully_shard`, in the order of ranks and in that of its mesh."""
    lines = submodules.fully_sharded_lines
    return {ranks for line in lines for ranks in (line.ranks, line.by_mesh) if ranks}


# Buffers that a run of a model may change.


def buffers_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Buffers]]:
    """The buffers that each of the modules itself has."""
    return [(module, dict(module._buffers)) for module in modules if module._buffers]


def put_buffers(kept: Sequence[tuple[nn.Module, Buffers]]) -> None:
    """Let modules have these buffers, and no others."""
    for module, buffers in kept:
        own = module._buffers
        for name in own.keys() - buffers.keys():
            del own[name]
        for name, buffer in buffers.items():
            if own.get(name) is not buffer:
                own[name] = buffer


@contextmanager
def keeping_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have modules afterwards the buffers that they had: the same memory, with the same values."""
    before = buffers_of(modules)
    distinct = {
        id(each): each for _, named in before for each in named.values() if each is not None
    }
    copies = [(each, each.detach().clone()) for each in distinct.values()]
    try:
        yield
    finally:
        put_buffers(before)
        for buffer, copy in copies:
            # Not counted as a change: autograd may have saved the buffer itself.
            buffer.data.copy_(copy)


# Values on their way into a module.

_waits: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()


def settled_by(module: nn.Module, wait: Callable[[], None]) -> None:
    """Have `wait` called before the state of a module is saved or filled: values are on their way
    into its tensors while the training goes on.
    """
    _waits[module] = wait


def settle(submodules: Sequence[nn.Module]) -> None:
    """Wait for what is on its way into a module."""
    for each in submodules:
        if wait := _waits.get(each):
            wait()
