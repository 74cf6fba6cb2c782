"""Data parallel training with a learning rate schedule, and a look at what was saved.

Run: torchrun --nproc-per-node 2 examples/ddp.py
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformer import Transformer, batch, loss_of

from ckptkit.live import Checkpointer, load_state


def main() -> None:
    """Train up to a step, from the newest one that was saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/ddp")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # a line for each save and load
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0.1, total_iters=args.steps)
    with Checkpointer(args.dir, keep_last=2) as ckpt:
        restored = ckpt.restore(model=model, optimizer=optimizer, scheduler=scheduler)
        start = restored.step if restored else 0
        for step in range(start + 1, args.steps + 1):
            letters, targets = batch(step, rank, world)
            loss = loss_of(model(letters), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 10 == 0:
                if rank == 0:
                    rate = scheduler.get_last_lr()[0]
                    print(
                        f"step {step}: loss {loss.item():.3f}, learning rate {rate:.4f}", flush=True
                    )
                ckpt.save(step, model=model, optimizer=optimizer, scheduler=scheduler)
    if rank == 0:  # any process can read it, of any job or of none
        tensors = load_state(args.dir, names=["model/embed.weight"])
        same = torch.equal(tensors["model/embed.weight"], model.module.embed.weight)
        print(f"what was saved is what was trained: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
