"""What one rank of a training job holds: a model of the tensors, spread by FSDP2 or by tensor
parallelism, and the AdamW that trains it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard

from benchmarks.state import MOMENTS, Tensor

_BITS = {2: torch.int16, 4: torch.int32}

_COLWISE = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    *("mlp.gate_proj", "mlp.up_proj"),
)
_ROWWISE = ("self_attn.o_proj", "mlp.down_proj")


class Training:
    """The job as one rank sees it; every element has the same value under every strategy."""

    def __init__(self, strategy: str, tensors: list[Tensor], rank: int, world_size: int) -> None:
        self.rank = rank
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=(strategy,))
        self.model = _spread(model_of(tensors), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)
        parameters = dict(self.model.named_parameters())
        for parameter in parameters.values():
            # An optimizer of its own making would keep moments of the parameter's dtype.
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                **{key: _like(parameter, torch.float32) for key in MOMENTS},
            }
        state = self.optimizer.state
        self.tensors: dict[str, torch.Tensor] = {
            **{f"model/{name}": p.detach() for name, p in parameters.items()},
            **{
                f"optimizer/{name}/{key}": state[p][key]
                for name, p in parameters.items()
                for key in (*MOMENTS, "step")
            },
        }
        self.local = [_local(self.tensors[tensor.name]) for tensor in tensors]
        for number, tensor in enumerate(tensors):
            _fill(self.tensors[tensor.name], seed=number)

    @property
    def nbytes(self) -> int:
        """The bytes of parameters and moments on this rank."""
        return sum(tensor.nbytes for tensor in self.local)

    def flat(self) -> list[npt.NDArray[np.uint8]]:
        """The memory of each parameter and moment, as bytes."""
        return [tensor.view(-1).view(torch.uint8).numpy() for tensor in self.local]


def model_of(tensors: list[Tensor]) -> nn.Module:
    """The modules that have these parameters, without memory yet."""
    root = nn.Module()
    for tensor in tensors:
        if tensor.of is None:
            *path, name, _ = tensor.name.removeprefix("model/").split(".")
            parent = root
            for step in path:
                if not hasattr(parent, step):
                    parent.add_module(step, nn.Module())
                parent = parent.get_submodule(step)
            parent.add_module(name, _module(name, tensor))
    return root


def _module(name: str, tensor: Tensor) -> nn.Module:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if len(tensor.shape) == 1:
        return nn.RMSNorm(tensor.shape[0], device="meta", dtype=dtype)
    rows, columns = tensor.shape
    if name == "embed_tokens":
        return nn.Embedding(rows, columns, device="meta", dtype=dtype)
    return nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)


def _spread(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if mesh.mesh_dim_names == ("tp",):
        plan: dict[str, ParallelStyle] = {"embed_tokens": RowwiseParallel()}  # cuts the vocabulary
        plan |= {f"layers.*.{name}": ColwiseParallel() for name in _COLWISE}
        plan |= {f"layers.*.{name}": RowwiseParallel() for name in _ROWWISE}
        parallelize_module(model, mesh, plan)
    else:
        for layer in model.get_submodule("layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def _like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def filled(tensor: Tensor, seed: int) -> torch.Tensor:
    """A tensor whole, as all ranks together have it."""
    whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
    _fill(whole, seed)
    return whole


def _fill(tensor: torch.Tensor, seed: int) -> None:
    """Bits that follow from where in the whole tensor an element is."""
    local = _local(tensor)
    bits = local.view(_BITS[local.element_size()])
    limits = torch.iinfo(bits.dtype)
    generator = torch.Generator().manual_seed(seed)
    keys = []
    for dim, extent in enumerate((*tensor.shape, 1)[:2]):
        size = (extent,)
        key = torch.randint(limits.min, limits.max, size, generator=generator, dtype=bits.dtype)
        keys.append(_mine(key, tensor, dim))
    torch.bitwise_xor(keys[0][:, None], keys[1][None, :], out=bits.view(len(keys[0]), -1))


def _mine(key: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """What this rank has of something that goes along a dim."""
    if isinstance(tensor, DTensor):
        (placement,) = tensor.placements
        if isinstance(placement, Shard) and placement.dim == dim:
            mesh = tensor.device_mesh
            return key.chunk(mesh.size())[mesh.get_local_rank()]
    return key
