"""What others have of a checkpoint: a job of several ranks that loads it, and the libraries of the
formats that it is exported to.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptkit
from ckptkit.live import load, load_state
from tests.foreign.jobs import as_numpy

Arrays = Mapping[str, npt.NDArray[Any]]


def as_tensor(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """The elements of an array as torch has them."""
    kind: torch.dtype = getattr(torch, dtype)
    found = torch.empty(array.shape, dtype=kind)
    if found.numel():
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        found.view(-1).view(torch.uint8).copy_(torch.from_numpy(raw.copy()))
    return found


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module that has tensors of these names and shapes, with other values."""
    top = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        module = top
        for part in path:
            module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        other = torch.full_like(tensor, 7)
        # Past `register_parameter`: any name may be there, those of methods too.
        if tensor.is_floating_point() and tensor.ndim:
            module._parameters[last] = nn.Parameter(other)
        else:
            module._buffers[last] = other
    return top


def cut_last_dim(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let each parameter be a DTensor that ranks have columns of."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            assert parameter is not None
            place = [Shard(parameter.ndim - 1)]
            cut = distribute_tensor(parameter.detach(), mesh, place, src_data_rank=None)
            part._parameters[name] = nn.Parameter(cut, requires_grad=parameter.requires_grad)


def differing(place: str, arrays: Arrays) -> list[str]:
    """The tensors of a rank that are not its parts of these arrays when it has loaded a checkpoint:
    as a rank of FSDP, then as one of those that cut last dims, then whole.
    """
    with ckptkit.open(place) as checkpoint:
        kinds = {name: checkpoint.info(name).dtype.torch for name in arrays}
        has_optimizer = "optimizer" in checkpoint.objects
        documents = checkpoint.objects["optimizer"] if has_optimizer else []
    wanted = {name: as_tensor(array, kinds[name]) for name, array in arrays.items()}
    for name, values in (pair for each in documents for pair in each["values"].items()):
        # What counts steps in numbers does so in tensors from now on.
        wanted |= {f"optimizer/{name}/{key}": torch.tensor(value) for key, value in values.items()}
    model = {n.removeprefix("model/"): t for n, t in wanted.items() if n.startswith("model/")}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in wanted.items():
        group, _, rest = name.partition("/")
        if group == "optimizer" and has_optimizer:
            parameter, _, key = rest.partition("/")
            states.setdefault(parameter, {})[key] = tensor
    # What belongs to neither is in no job of torch's.
    known = ("model/", "optimizer/") if has_optimizer else ("model/",)
    asked = [name for name in wanted if name.startswith(known)]
    found: list[str] = []
    for spread in ("fsdp", "tp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(spread,))
        module = module_of(model)
        if spread == "fsdp":
            fully_shard(module, mesh=mesh)
        else:
            cut_last_dim(module, mesh)
        named = dict(module.named_parameters(remove_duplicate=False))
        # One group would have one weight decay for all.
        groups = [g["params"] for each in documents for g in each["groups"]]
        stepped = [[named[name] for name in group if name in states] for group in groups]
        stepped = [group for group in stepped if group]
        optimizer = torch.optim.AdamW([{"params": g} for g in stepped]) if stepped else None
        load(place, model=module, optimizer=optimizer)
        have = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
        for name in states:
            assert optimizer is not None
            state = optimizer.state[named[name]]
            have |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
        found += [f"{spread}: {name} is missing" for name in asked if name not in have]
        found += [f"{spread}: {n}" for n, t in have.items() if not _is_part(t, wanted.get(n))]
    whole = load_state(place)
    return found + [f"whole: {n}" for n in arrays if not _is_part(whole[n], wanted[n])]


def _is_part(mine: torch.Tensor, whole: torch.Tensor | None) -> bool:
    """Whether a tensor is, bit for bit, what this rank is to have of a whole one."""
    if whole is None or mine.shape != whole.shape or mine.dtype != whole.dtype:
        return False
    if isinstance(mine, DTensor):
        whole = distribute_tensor(whole, mine.device_mesh, mine.placements, src_data_rank=None)
        mine, whole = mine.to_local(), whole.to_local()
    return as_numpy(mine).tobytes() == as_numpy(whole).tobytes()


def exported(place: Path, folder: Path) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """What the library of each format loads of what a checkpoint is exported to, by our names; with
    the state of its optimizer too, where it has one and the format a place for that.
    """
    with ckptkit.open(place) as checkpoint:
        ways = [False, True] if "optimizer" in checkpoint.objects else [False]
    found = {}
    for to_format in ("hf", "safetensors"):
        out = folder / to_format
        done = ckptkit.export(place, out, to_format=to_format, max_file_size="2KB")
        files = sorted(out.glob("*.safetensors")) if to_format == "hf" else [out]
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        weights |= {name: weights[written] for name, written in done.tied}
        found[to_format] = _named({"model": weights})
    for optimizer in ways:
        which = "all of " if optimizer else ""
        out = folder / f"{which}torch"
        ckptkit.export(place, out, to_format="torch", optimizer=optimizer)
        loaded: Any = torch.load(out, weights_only=True)
        whole = loaded if optimizer else {"model": loaded}
        found[f"{which}torch"] = _named(whole)
        out = folder / f"{which}dcp"
        ckptkit.export(place, out, to_format="dcp", optimizer=optimizer, max_file_size="2KB")
        again = _emptied(whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process only
            load_dcp(again, checkpoint_id=out, no_dist=True)
        found[f"{which}dcp"] = _named(again)
    return found


def _emptied(tree: Any) -> Any:
    """The same tensors with other values, and nothing but tensors."""
    if isinstance(tree, torch.Tensor):
        return torch.full_like(tree, 7)
    items = {k: _emptied(v) for k, v in tree.items() if isinstance(v, (dict, torch.Tensor))}
    return {k: v for k, v in items.items() if not (isinstance(v, dict) and not v)}


def _named(state: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """The tensors of a model and of its optimizer by our names."""
    found = {f"model/{name}": as_numpy(tensor) for name, tensor in state["model"].items()}
    for name, values in state.get("optimizer", {}).get("state", {}).items():
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        found |= {f"optimizer/{name}/{key}": as_numpy(t) for key, t in tensors.items()}
    return found
