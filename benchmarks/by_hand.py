"""The engines of torch as a careful user sets them up, without ckptkit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
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

MICROBATCHES = 4

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


def _zero2(model: Llama, batch: Batch) -> Step:
    return _sharded(model, batch, reshard_after_forward=False)


def _fsdp(model: Llama, batch: Batch) -> Step:
    return _sharded(model, batch)


def _hsdp(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    return _sharded(model, batch, mesh=mesh)


def _tp(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, cast("Any", _TP))
    return _looped(model, AdamW(model.parameters(), foreach=False), loss_of, batch)


def _tp_fsdp(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "fsdp"))
    parallelize_module(model, mesh["tp"], cast("Any", _TP))
    for unit in _units(model):
        fully_shard(unit, mesh=mesh["fsdp"])
    mine = _cut(batch, 2, mesh["fsdp"].get_local_rank())
    return _looped(model, AdamW(model.parameters(), foreach=False), loss_of, mine)


def _pp(model: Llama, batch: Batch) -> Step:
    stage = _Half(model, dist.get_rank())
    return _in_stages(stage, batch, dist.group.WORLD, dist.get_rank())


def _pp_fsdp(model: Llama, batch: Batch) -> Step:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    number = mesh["pp"].get_local_rank()
    stage = _Half(model, number)
    for layer in (*stage.layers, stage):
        fully_shard(layer, mesh=mesh["fsdp"])
    mine = _cut(batch, 2, mesh["fsdp"].get_local_rank())
    return _in_stages(stage, mine, mesh["pp"].get_group(), number)


# By strategy, the ranks and the set-up.
BY_HAND: dict[str, tuple[int, Callable[[Llama, Batch], Step]]] = {
    "ddp": (2, _ddp),
    "zero1": (2, _zero1),
    "zero2": (2, _zero2),
    "fsdp": (2, _fsdp),
    "tp": (2, _tp),
    "pp": (2, _pp),
    "ddp:2,fsdp": (4, _hsdp),
    "tp:2,fsdp": (4, _tp_fsdp),
    "pp:2,fsdp": (4, _pp_fsdp),
}


class _Half(nn.Module):
    """The first or the second stage of two."""

    def __init__(self, model: Llama, number: int) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.embed_tokens = None if number else model.embed_tokens
        self.layers = model.layers[half:] if number else model.layers[:half]
        self.norm = model.norm if number else None
        self.lm_head = model.lm_head if number else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.lm_head is None or self.norm is None else self.lm_head(self.norm(x))


def _in_stages(stage: _Half, batch: Batch, group: Any, number: int) -> Step:
    placed = PipelineStage(stage, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(placed, MICROBATCHES, loss_of)
    optimizer = AdamW(stage.parameters())
    pipelines = dist.get_world_size() // 2

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if number:
            schedule.step(target=batch[1], losses=losses)
        else:
            schedule.step(batch[0])
        optimizer.step()
        # As everybody logs it.
        total = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(total)
        return float(total) / pipelines

    return step


def _sharded(model: Llama, batch: Batch, **options: Any) -> Step:
    for unit in _units(model):
        fully_shard(unit, **options)
    return _looped(model, AdamW(model.parameters()), loss_of, _mine(batch))


def _units(model: Llama) -> Iterable[nn.Module]:
    return (model.embed_tokens, *model.layers, model.lm_head, model)


def _mine(batch: Batch) -> Batch:
    return _cut(batch, dist.get_world_size(), dist.get_rank())


def _cut(batch: Batch, shares: int, number: int) -> Batch:
    inputs, targets = (tensor.chunk(shares)[number] for tensor in batch)
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
