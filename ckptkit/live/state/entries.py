"""What the wrappers of a model say: which ranks they join, and what for; and of the state of models
and optimizers, one entry for each value, under the name that the model's author gave.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Shard, _StridedShard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ckptkit.errors import LayoutError, StrategyError, UnsupportedTypeError

# The names that torch, torchtitan and transformers give to the dims of a mesh.
_KINDS = {
    **dict.fromkeys(("ddp", "dp", "dp_replicate", "replicate"), "ddp"),
    **dict.fromkeys(
        ("fsdp", "efsdp", "dp_shard", "dp_shard_cp", "dp_shard_mod_ep", "shard"), "fsdp"
    ),
    **dict.fromkeys(("pp", "pipe", "pipeline", "stage"), "pp"),
    **{kind: kind for kind in ("tp", "ep", "zero1", "zero2", "zero3")},
    "etp": "tp",
}


def kind_of(name: str) -> str:
    """The kind of axis that the name of a mesh's dim stands for; nothing where it is unknown."""
    return _KINDS.get(name.lower(), "")


@dataclass(frozen=True, slots=True)
class Line:
    """The ranks that one kind of parallelism joins, in their order along its axis."""

    kind: str
    ranks: tuple[int, ...]
    name: str = ""
    is_assumed: bool = False
    """Whether nothing says what these ranks have in common: they only fill a gap of the mesh."""

    by_mesh: tuple[int, ...] = ()
    """The same ranks in the order of a mesh, where that is not the order in which they cut."""

    @property
    def stride(self) -> int:
        """How far its ranks are apart."""
        return self.ranks[1] - self.ranks[0] if len(self.ranks) > 1 else 0

    @property
    def size(self) -> int:
        """How many ranks it joins."""
        return len(self.ranks)

    def to_doc(self) -> list[object]:
        """What it says of the lines of all ranks, as plain values."""
        return [self.kind, self.stride, self.size, self.name, self.is_assumed]

    @classmethod
    def through(cls, rank: int, doc: Sequence[Any]) -> Line:
        """The line through a rank that another rank has told of with `to_doc`."""
        kind, stride, size, name, is_assumed = doc
        first = rank - rank // max(stride, 1) % size * stride
        return cls(kind, tuple(first + stride * n for n in range(size)), name, is_assumed)

    def __post_init__(self) -> None:
        steps = {b - a for a, b in pairwise(self.ranks)}
        if len(steps) > 1 or any(step <= 0 for step in steps):
            raise StrategyError(
                f"the ranks of a {self.kind} group are not evenly spaced",
                value=self.ranks,
                hint="a step numbers the ranks of a mesh row by row: make the job's meshes so, as "
                "[[0, 1], [2, 3]] and [[0, 2], [1, 3]] are",
            )


@dataclass(frozen=True, slots=True)
class SharedOut:
    """How ranks of one line have a plain tensor of a shape together: each some of its rows, or one
    of them the whole of it.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    owner: int | None = None
    """The place in the line of the one that has it."""


def line_of(kind: str, process_group: dist.ProcessGroup | None, name: str = "") -> Line:
    """The line that a process group (None: the default one) is."""
    ranks = dist.get_process_group_ranks(process_group)
    return Line(kind, tuple(ranks), name)


def mesh_lines(mesh: DeviceMesh, kinds: tuple[str, ...]) -> list[Line]:
    """One line for each dim of a device mesh that this rank is in. Their ranks go upwards, as in
    torch's groups, whatever the order in the mesh is. Those that repeat do so for the DTensors of
    the mesh only: of other tensors nobody keeps the copies alike.
    """
    if mesh.get_coordinate() is None:
        return []
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    found = []
    for dim, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        line = ranks_along(mesh, dim)
        ranks = tuple(sorted(line))
        by_mesh = () if line == ranks else line
        found.append(Line(kind, ranks, name, kind in ("ddp", "zero1"), by_mesh))
    return found


def check_upwards(line: Sequence[int], where: str) -> None:
    """Refuse to cut along a line of ranks that torch reads in two orders."""
    if list(line) != sorted(line):
        raise StrategyError(
            "cut along ranks that do not go upwards: torch scatters and gathers there in the order "
            "of ranks, but DCP saves and loads in that of the mesh",
            where=where,
            value=tuple(line),
            hint="number the ranks upwards along the dims of a mesh that cut; those that repeat, "
            "and those of `fully_shard`, may go any way",
        )


def dtensor_lines(
    tensors: Sequence[DTensor | DTensorSpec], *, fully_sharded: bool = False
) -> list[Line]:
    """The lines of ranks of the meshes of some DTensors. The name of a dim says its kind, unless it
    says that it repeats and it does not: no axis along which something is cut is `ddp`. One without
    a name is `fsdp` where it is the first to cut rows and `fully_sharded`, otherwise `tp`.
    """
    distinct: dict[DeviceMesh, list[set[int]]] = {}
    for tensor in tensors:
        dims = distinct.setdefault(tensor.device_mesh, [set() for _ in tensor.placements])
        for dim, placement in zip(dims, tensor.placements, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                dim.add(placement.dim)
    found: list[Line] = []
    for mesh, dims in distinct.items():
        kinds = [kind_of(name) for name in mesh.mesh_dim_names or ("",) * mesh.ndim]
        for at, cut in enumerate(dims):
            if cut and kinds[at] in ("", "ddp"):
                rows = fully_sharded and 0 in cut and "fsdp" not in kinds
                kinds[at] = "fsdp" if rows else "tp"
        found += mesh_lines(mesh, tuple(kind or "ddp" for kind in kinds))
    return list(dict.fromkeys(replace(line, by_mesh=()) for line in found))


def ranks_along(mesh: DeviceMesh, dim: int) -> tuple[int, ...]:
    """The ranks on the line through this rank along one dim of a mesh."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None  # noqa: S101 — the caller has looked
    index = tuple(slice(None) if d == dim else at for d, at in enumerate(coordinate))
    line: torch.Tensor = mesh.mesh[index]
    return tuple(line.tolist())


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
    # By the type, of which there are few: some wrappers are abstract, and take long to say what
    # they are no instance of.
    wrappers = {
        kind: inner
        for kind in set(map(type, submodules))
        for wrapper, inner in _WRAPPERS
        if issubclass(kind, wrapper)
    }
    wrapped: dict[nn.Module, str] = {}
    for each in submodules:
        # A compiled module is known by what it keeps: its class loads the compiler.
        if inner := wrappers.get(type(each)):
            wrapped[each] = inner
        elif _COMPILED in each._modules:
            wrapped[each] = _COMPILED
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
