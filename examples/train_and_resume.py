"""Train a small transformer; kill it at any time, and go on under another strategy.

Run:  torchrun --nproc-per-node 4 examples/train_and_resume.py --strategy fsdp
Then: torchrun --nproc-per-node 4 examples/train_and_resume.py --strategy tp:2,fsdp:2
"""

from __future__ import annotations

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformer import BATCH, LENGTH, TP_PLAN, Transformer, batch, loss_of

from ckptkit.live import Checkpointer, PerDataRank, Sum, rng_state, set_rng_state


def axes_of(strategy: str) -> dict[str, int]:
    """The axes of a strategy; one without a size gets the ranks that are left."""
    said = {n: int(size or 0) for n, _, size in (a.partition(":") for a in strategy.split(","))}
    left = dist.get_world_size() // math.prod(size or 1 for size in said.values())
    return {name: said[name] or left for name in sorted(said, key=["ddp", "fsdp", "tp"].index)}


def spread(model: Transformer, axes: dict[str, int]) -> torch.nn.Module:
    """The model as torch's own engines spread it over the ranks."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], TP_PLAN)
    if "fsdp" in axes:
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh["ddp", "fsdp"] if "ddp" in axes else mesh["fsdp"])
    return DistributedDataParallel(model) if list(axes) == ["ddp"] else model


def main() -> None:
    """Train up to a step, from the newest one that was saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp", help="ddp, fsdp, ddp:2,fsdp, tp, tp:2,fsdp")
    parser.add_argument("--dir", default="runs/sonnets", help="where the checkpoints are")
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world, axes = dist.get_rank(), dist.get_world_size(), axes_of(args.strategy)
    tp = axes.get("tp", 1)  # so many ranks read the same passages
    torch.manual_seed(0)
    model = spread(Transformer(), axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    start = tokens = 0
    with Checkpointer(args.dir, keep_last=3, asynchronous=True) as ckpt:
        if restored := ckpt.restore(model=model, optimizer=optimizer):
            start, tokens = restored.step, restored.extra["tokens"]
            set_rng_state(restored.extra.get("rng"))
        if rank == 0:
            print(f"{args.strategy}: from step {start}, kill -9 {os.getpid()} stops it", flush=True)
        for step in range(start + 1, args.steps + 1):
            letters, targets = batch(step, rank // tp, world // tp)
            loss = loss_of(model(letters), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens += BATCH * LENGTH // world
            dist.all_reduce(loss.detach_())
            if step % 10 == 0 and rank == 0:
                print(f"step {step}: loss {loss.item() / world:.3f}", flush=True)
            if step % 20 == 0:
                extra = {"tokens": Sum(tokens), "rng": PerDataRank(rng_state())}
                ckpt.save(step, model=model, optimizer=optimizer, extra=extra)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
