"""A plan of tensor parallelism, tried out on an example before it is used."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from ckptkit.errors import LayoutError
from ckptkit.parallel.strategies.batches import mapped, tensors_of
from ckptkit.parallel.strategies.tensor_parallel import parallelize

_OUTPUT = "the output"


def try_out(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, ParallelStyle],
    example: Any,
    device: torch.device,
) -> None:
    """Raise, on all ranks, where the cut model does not give on the example what the whole one
    does, or a layer gets something else than its columns of what it gets there.

    Both are copies: nothing of the model changes.
    """
    fed = [name for name, style in plan.items() if _takes_columns(style)]
    here = next(model.parameters()).device
    example = mapped(example, lambda tensor: _of_first_rank(tensor, mesh, device))
    whole = _Trial(_copied(model, model.parameters()), fed)
    whole.run(mapped(example, lambda tensor: tensor.to(here)))
    cut = _Trial(_copied(model, _parameters_of(model, plan)), fed)
    parallelize(cut.model, mesh, plan)
    cut.model.to(device)
    problem: Exception | None = None
    try:
        cut.run(example)
    except Exception as error:  # noqa: BLE001 — the model's own, of any kind
        problem = error
    place = _first_of_all([*fed, _OUTPUT], whole.differing(cut, mesh), device)
    if place is not None:
        raise LayoutError(
            "cut by these rules, the model does not give on the example what it gives whole",
            where=place,
            hint="between layers that are cut each column has to go its own way, unlike in a "
            "softmax or a norm: let the rules replicate this layer and those that feed it",
        ) from problem


class _Trial:
    """A copy of a model, and what it and some of its layers get and give in a run."""

    def __init__(self, model: nn.Module, watched: Sequence[str]) -> None:
        self.model = model.eval()
        self._given: dict[str, list[torch.Tensor]] = {name: [] for name in (*watched, _OUTPUT)}
        for name in watched:
            # Before torch's own hook, which makes a DTensor of what it takes for columns.
            note = _noting(self._given[name])
            model.get_submodule(name).register_forward_pre_hook(note, prepend=True)

    def run(self, example: Any) -> None:
        """Run on an example: named inputs, several, or one."""
        inputs = example if isinstance(example, (tuple, list)) else (example,)
        with torch.no_grad(), torch.random.fork_rng():
            is_named = isinstance(example, Mapping)
            output = self.model(**example) if is_named else self.model(*inputs)
        self._given[_OUTPUT] = tensors_of(output)

    def differing(self, cut: _Trial, mesh: DeviceMesh) -> list[str]:
        """Where a cut model went another way than this one."""
        return [name for name in self._given if not self._agrees(cut, name, mesh)]

    def _agrees(self, cut: _Trial, name: str, mesh: DeviceMesh) -> bool:
        wanted, found = self._given[name], cut._given[name]
        if name != _OUTPUT:
            wanted = [each.chunk(mesh.size(), -1)[mesh.get_local_rank()] for each in wanted]
        return len(wanted) == len(found) and all(map(_is_close, found, wanted))


def _noting(given: list[torch.Tensor]) -> Any:
    def note(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        given.append(inputs[0])

    return note


def _takes_columns(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)


def _of_first_rank(tensor: torch.Tensor, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    there = tensor.to(device, copy=True).contiguous()
    dist.broadcast(there, group=mesh.get_group(), group_src=0)
    return there


def _parameters_of(model: nn.Module, plan: Iterable[str]) -> list[nn.Parameter]:
    return [p for name in plan for p in model.get_submodule(name).parameters(recurse=False)]


def _copied(model: nn.Module, shared: Iterable[nn.Parameter]) -> nn.Module:
    """A copy that has some parameters together with the model, as they may be large."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in shared})


def _is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether nothing but rounding differs, which adds up from layer to layer."""
    if found.shape != wanted.shape or not wanted.is_floating_point():
        return found.shape == wanted.shape
    found = found.to(wanted.device)
    alike = (found == wanted) | (found.isnan() & wanted.isnan())
    apart = torch.where(alike, 0, found - wanted).double().norm()
    size = wanted[wanted.isfinite()].double().norm()
    return bool(apart <= math.sqrt(torch.finfo(wanted.dtype).eps) * size)


def _first_of_all(
    places: Sequence[str], differing: Iterable[str], device: torch.device
) -> str | None:
    """The first of the places at which any rank differs."""
    first = min((places.index(place) for place in differing), default=len(places))
    number = torch.tensor(first, device=device)
    dist.all_reduce(number, dist.ReduceOp.MIN)
    return [*places, None][int(number)]
