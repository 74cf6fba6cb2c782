"""Training whose workers come and go: kill one, and the others go on; start one, and it joins.

Run: ckpt launch --nnodes 1:4 --max-restarts 100 --rdzv-endpoint 127.0.0.1:29400
     examples/elastic.py
     (in up to 4 terminals)
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformer import LENGTH, TEXT, Transformer, loss_of

from ckptkit.live import Checkpointer
from ckptkit.parallel import ElasticTraining, GlobalSampler


def main() -> None:
    """Train up to a step, with as many ranks as there are."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/elastic")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with (
        Checkpointer(args.dir, keep_last=2, asynchronous=True) as ckpt,
        ElasticTraining(
            ckpt,
            model=model,
            optimizer=optimizer,
            sampler=GlobalSampler(len(TEXT) - LENGTH),
            batch=24,
            save_every=50,
        ) as training,
    ):
        print(
            f"rank {rank} of {ranks}, process {os.getpid()}: from step {training.step}", flush=True
        )
        for step in training.steps(args.steps):
            passages = TEXT[torch.tensor(step.samples)[:, None] + torch.arange(LENGTH + 1)]
            loss = loss_of(model(passages[:, :-1]), passages[:, 1:]) * step.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step.number % 10 == 0:
                print(f"step {step.number}: {ranks} ranks, loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
