"""The engines of torch as a careful user sets them up, without ckptkit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks.networks import Layered, Llama, loss_of

Step: TypeAlias = Callable[[], float]
Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_TP = {
    "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    **{f"layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def layer_by_layer() -> Step:
    """FSDP of a thousand tiny layers, each wrapped."""
    model = Layered()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters())
    return _looped(model, optimizer, nn.functional.mse_loss, (torch.randn(8, 64),) * 2)


def _ddp(model: Llama, batch: Batch) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _looped(wrapped, AdamW(wrapped.parameters()), loss_of, _mine(batch))


def _zero1(model: Llama, batch: Batch) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  # it warns

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), cast("Any", AdamW))
    return _looped(wrapped, optimizer, loss_of, _mine(batch))


def _fsdp(model: Llama, batch: Batch) -> Step:
    units: Iterable[nn.Module] = (model.embed_tokens, *model.layers, model.lm_head, model)
    for unit in units:
        fully_shard(unit)
    return _looped(model, AdamW(model.parameters()), loss_of, _mine(batch))


def _tp(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, cast("Any", _TP))
    return _looped(model, AdamW(model.parameters(), foreach=False), loss_of, batch)


BY_HAND: dict[str, Callable[[Llama, Batch], Step]] = {
    "ddp": _ddp,
    "zero1": _zero1,
    "fsdp": _fsdp,
    "tp": _tp,
}


def _mine(batch: Batch) -> Batch:
    inputs, targets = (tensor.chunk(dist.get_world_size())[dist.get_rank()] for tensor in batch)
    return inputs, targets


def _looped(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    batch: Batch,
) -> Step:
    def step() -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        # As everybody logs it.
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step
