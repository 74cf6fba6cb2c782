"""Pipeline parallel training: every rank has some layers, a checkpoint has them all.

Run:  torchrun --nproc-per-node 2 examples/pipeline.py
Then: torchrun --nproc-per-node 4 examples/pipeline.py --steps 80
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from transformer import Transformer, batch, loss_of

from ckptkit.live import Checkpointer

LAYERS = 4


def stage_of(rank: int, world: int) -> PipelineStage:
    """A rank's part of the model; what it keeps has the names that it has in the whole."""
    torch.manual_seed(0)
    model = Transformer(LAYERS)
    mine = range(rank * LAYERS // world, (rank + 1) * LAYERS // world)
    model.layers = nn.ModuleDict({str(n): model.layers[str(n)] for n in mine})
    if rank > 0:
        model.embed = model.place = None
    if rank < world - 1:
        model.head = None
    return PipelineStage(model, rank, world, torch.device("cpu"))


def main() -> None:
    """Train up to a step, from the newest one that was saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/pipeline")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = stage_of(rank, world)
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=0.01)
    with Checkpointer(args.dir, keep_last=2, asynchronous=True) as ckpt:
        restored = ckpt.restore(model=stage, optimizer=optimizer)
        start = restored.step if restored else 0
        for step in range(start + 1, args.steps + 1):
            letters, targets = batch(step)
            losses: list[torch.Tensor] = []
            given = (letters,) if stage.is_first else ()
            optimizer.zero_grad()
            schedule.step(*given, target=targets if stage.is_last else None, losses=losses)
            optimizer.step()
            if step % 10 == 0:
                if losses:
                    loss = torch.stack(losses).mean().item()
                    print(f"step {step}, pp:{world}: loss {loss:.3f}", flush=True)
                ckpt.save(step, model=stage, optimizer=optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
