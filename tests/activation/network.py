"""A small GPT with dropout, spread in four ways, and what a step of it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.live.network import DEVICE

WIDTH, HEADS, LENGTH, WORDS, BATCH = 32, 4, 16, 17, 8


class Block(nn.Module):
    """Attention and two layers, with dropout in both, and a buffer that counts forwards."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.forwards: torch.Tensor

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """The residual stream, and what the block adds to it."""
        self.forwards += 1
        y, head = self.norm1(x), x.shape[-1] // HEADS
        q, k, v = (
            cut(y).unflatten(-1, (-1, head)).transpose(1, 2) for cut in (self.q, self.k, self.v)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.o(y)) * scale
        return x + torch.as_tensor(self.dropout(self.down(gelu(self.up(self.norm2(x))))))


class Gpt(nn.Module):
    """Embedding, blocks and head; a stage of a pipeline lacks some."""

    def __init__(self, layers: int = 4, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleDict({str(n): Block(width, dropout) for n in range(layers)})
        self.head: nn.Module | None = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From words to scores, or what lies between."""
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, scale=1.5)
        return x if self.head is None else torch.as_tensor(self.head(x))


def gpt(layers: int = 4, width: int = WIDTH, dropout: float = 0.1) -> Gpt:
    """The same on every rank."""
    torch.manual_seed(3)
    return Gpt(layers, width, dropout).to(DEVICE)


def batch(batch_size: int = BATCH, length: int = LENGTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and those that follow."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (batch_size, length + 1), generator=generator).to(DEVICE)
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all words."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def by_torch(blocks: Iterable[nn.Module]) -> None:
    """Checkpoint each block as torch does by itself."""
    for block in blocks:
        plain = block.forward
        vars(block)["forward"] = lambda *args, plain=plain, **kwargs: checkpoint(
            plain, *args, use_reentrant=False, **kwargs
        )


Step = Callable[[], object]


def plain() -> tuple[Any, list[nn.Module], Step]:
    """One process."""
    model = gpt()
    return model, [model], _step(model)


def ddp() -> tuple[Any, list[nn.Module], Step]:
    """DistributedDataParallel."""
    model = DistributedDataParallel(gpt())
    return model, [model], _step(model)


def fsdp2() -> tuple[Any, list[nn.Module], Step]:
    """fully_shard."""
    model = gpt()
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    return model, [model], _step(model)


def tp(layers: int = 4, width: int = WIDTH) -> tuple[Any, list[nn.Module], Step]:
    """Blocks cut by tensor parallelism; what flows between them is replicated."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = gpt(layers, width)
    plan: dict[str, ParallelStyle] = {}
    for number in model.layers:
        plan |= {f"layers.{number}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"layers.{number}.{name}": RowwiseParallel() for name in ("o", "down")}
    parallelize_module(model, mesh, plan)
    return model, [model], _step(model)


def pipeline(kind: Any, microbatches: int = 4, layers: int = 4) -> tuple[Any, Any, Step]:
    """One stage on each rank: stage, schedule, step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = gpt(layers)
    if rank:
        model.embed = None
    if rank < ranks - 1:
        model.head = None
    each = -(-layers // ranks)
    for number in range(layers):
        if number // each != rank:
            del model.layers[str(number)]
    stage = PipelineStage(model, rank, ranks, torch.device(DEVICE))
    schedule = kind(stage, microbatches, loss_fn=loss_of)
    inputs, targets = batch()

    def step() -> object:
        first = (inputs,) if stage.is_first else ()
        return schedule.step(*first, target=targets if stage.is_last else None)

    return stage, schedule, step


def pp() -> tuple[Any, list[nn.Module], Step]:
    """GPipe."""
    stage, schedule, step = pipeline(ScheduleGPipe)
    return schedule, [stage.submod], step


def pp_1f1b() -> tuple[Any, list[nn.Module], Step]:
    """One forward, one backward."""
    stage, schedule, step = pipeline(Schedule1F1B)
    return schedule, [stage.submod], step


WAYS = {"plain": plain, "ddp": ddp, "fsdp2": fsdp2, "tp": tp, "pp": pp, "pp 1f1b": pp_1f1b}


def gradients(modules: list[nn.Module], step: Step) -> dict[str, torch.Tensor]:
    """The gradients and buffers of one step, of a fixed seed."""
    for module in modules:
        module.zero_grad()
    torch.manual_seed(11)
    step()
    found = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            grad = parameter.grad
            found[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
        found |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _step(model: nn.Module) -> Step:
    inputs, targets = batch()
    return lambda: loss_of(model(inputs), targets).backward()
