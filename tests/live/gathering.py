"""The state of a job as torch and nothing of ckptkit says that it is: what is to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.live.strategies import Job

Arrays = Mapping[str, npt.NDArray[Any]]

_PREFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")
_RANK = 1 << 32


def held(job: Job) -> dict[str, torch.Tensor]:
    """All tensors of this rank's modules and of their optimizer; a collective."""
    if any(isinstance(module, FullyShardedDataParallel) for module in job.modules):
        return _of_fsdp1(job)
    found = {}
    for module in job.modules:
        for name, tensor in _named(module).items():
            found[f"model/{canonical(name)}"] = tensor
        for name, state in _states(job, module).items():
            found |= tensors_in(state, f"optimizer/{name}")
    return found


def tensors_in(tree: Any, path: str) -> dict[str, torch.Tensor]:
    """The tensors of nested containers, by their paths."""
    if torch.is_tensor(tree):
        return {path: tree}
    items = enumerate(tree) if isinstance(tree, (list, tuple)) else []
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items() if isinstance(tree, Mapping) else items:
        found |= tensors_in(value, f"{path}/{key}")
    return found


def _named(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's state; DDP takes DTensors off the modules' parameters, and leaves them as they
    are otherwise.
    """
    found = dict(module.state_dict())
    for path, part in module.named_modules() if isinstance(module, DistributedDataParallel) else ():
        found |= {f"{path}.{k}": v for k, v in vars(part).items() if isinstance(v, DTensor)}
    return found


def gathered(job: Job) -> Arrays:
    """The same, whole."""
    return {name: whole(tensor) for name, tensor in held(job).items()}


class Comparison:
    """Compares what a rank holds with whole tensors, as often as one likes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._places: dict[object, torch.Tensor] = {}

    def differences(self, whole: Arrays) -> list[str]:
        """The names of all that is not, bit for bit, this rank's part of the whole."""
        found = held(self._job)
        known = {parameter for parameter in found if parameter.startswith("model/")}
        wanted = {name for name in whole if self._parameter(name) in known}
        alike = {name for name in wanted & set(found) if self._is_part(found[name], whole[name])}
        return sorted((wanted | set(found)) - alike)

    def _parameter(self, name: str) -> str:
        kind, rest = name.split("/", 1)
        return name if kind == "model" else f"model/{rest.split('/')[0]}"

    def _is_part(self, mine: torch.Tensor, whole: npt.NDArray[Any]) -> bool:
        if mine.shape != whole.shape:
            return False
        if isinstance(mine, DTensor):
            whole = whole.reshape(-1)[self._places_of(mine).numpy()]
            mine = mine.to_local().flatten()
        return same(mine.detach().cpu().numpy(), whole)

    def _places_of(self, tensor: DTensor) -> torch.Tensor:
        """Where the elements of this rank are in the whole: torch is asked to gather numbers that
        say whose they are.
        """
        key = (tensor.shape, tensor.device_mesh, tensor.placements)
        if key not in self._places:
            local, rank = tensor.to_local(), dist.get_rank()
            numbers = torch.arange(local.numel(), device=local.device).reshape(local.shape)
            numbers += rank * _RANK
            spread = DTensor.from_local(
                numbers,
                tensor.device_mesh,
                tensor.placements,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            whole = spread.full_tensor().flatten().cpu()
            mine = (whole // _RANK == rank).nonzero().flatten()
            places = torch.empty(local.numel(), dtype=torch.int64)
            places[whole[mine] % _RANK] = mine
            self._places[key] = places
        return self._places[key]


def same(mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> bool:
    """Whether two arrays have the same shape, type and bits."""
    alike = mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return alike and mine.tobytes() == theirs.tobytes()


def canonical(name: str) -> str:
    """A name without what wrappers add to it."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def scramble(job: Job, *, forget: bool) -> None:
    """Overwrite all that a load should fill; `forget` the state of the optimizer altogether."""
    optimizer = job.optimizer
    state: Any = optimizer.state
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        state = optimizer.optim.state
    tensors = [t for module in job.modules for t in (*module.parameters(), *module.buffers())]
    tensors += [p for group in optimizer.param_groups for p in group["params"]]
    if forget:
        state.clear()
    else:
        tensors += [v for each in state.values() for v in each.values() if torch.is_tensor(v)]
    with torch.no_grad():
        for tensor in tensors:
            (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).fill_(-7)


def _states(job: Job, module: nn.Module) -> dict[str, dict[str, Any]]:
    """The state of the module's parameters, by name."""
    names: dict[torch.Tensor, str] = {p: canonical(name) for name, p in module.named_parameters()}
    optimizer = job.optimizer
    taken = {name: t for name, t in _named(module).items() if isinstance(t, DTensor)}
    if isinstance(module, DistributedDataParallel) and taken:
        of = {t._local_tensor.data_ptr(): (name, t) for name, t in taken.items()}
        names |= {p: canonical(of[p.data_ptr()][0]) for p in optimizer.state if p.data_ptr() in of}
        return {
            names[p]: {k: _like(v, of.get(p.data_ptr())) for k, v in state.items()}
            for p, state in optimizer.state.items()
        }
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return {names[p]: state for p, state in optimizer.state.items() if p in names}
    mine = {names[p]: state for p, state in optimizer.optim.state.items()}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return {name: state for states in of_ranks for name, state in states.items()}


def _like(value: Any, of: tuple[str, DTensor] | None) -> Any:
    """A value that is spread as a DTensor is, as one."""
    if of is None or value.shape != of[1]._local_tensor.shape:
        return value
    like = of[1]
    return DTensor.from_local(
        value, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _of_fsdp1(job: Job) -> dict[str, torch.Tensor]:
    options = StateDictOptions(full_state_dict=True)
    module = job.modules[0]
    if FullyShardedDataParallel.fsdp_modules(module)[0]._fsdp_extension is not None:
        return _of_sliced_fsdp1(job)
    model: Any = get_model_state_dict(module, options=options)
    found = {f"model/{canonical(name)}": tensor for name, tensor in model.items()}
    document = get_optimizer_state_dict(module, job.optimizer, options=options)
    states: Any = document["state"]
    for name, state in states.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                found[f"optimizer/{canonical(name)}/{key}"] = value
    return found


def _of_sliced_fsdp1(job: Job) -> dict[str, torch.Tensor]:
    """The same where the mesh is a part of another, and torch's own state dicts are not right: what
    the optimizer keeps is gathered in the place of the parameters.
    """
    module, parameters = job.modules[0], list(job.modules[0].parameters())
    states = [job.optimizer.state.get(p, {}) for p in parameters]
    found = {f"model/{name}": tensor for name, tensor in _summoned(module).items()}
    found |= {f"model/{canonical(name)}": buffer for name, buffer in module.named_buffers()}
    keys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(keys, [(k, v.ndim) for s in states for k, v in s.items()])
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for key, dims in dict.fromkeys(each for of_rank in keys for each in of_rank):
            for parameter, state in zip(parameters, states, strict=True):
                value = state.get(key, torch.tensor(0.0))
                parameter.copy_(value if dims else torch.full_like(parameter, float(value)))
            for name, tensor in _summoned(module).items():
                one = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                found[f"optimizer/{name}/{key}"] = tensor if dims else one.max()
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return found


def _summoned(module: nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        named = {canonical(name): p for name, p in module.named_parameters()}
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def whole(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The values of a tensor that may be cut."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return np.array(tensor.detach().cpu().numpy())
