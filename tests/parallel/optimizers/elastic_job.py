"""What each worker of an elastic job runs; it writes down what it does, for the test to read."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # what DDP would import when it is made
import torch.distributed as dist
import torch.distributed.run
from torch.nn.parallel import DistributedDataParallel

from ckptkit.live import Checkpointer
from ckptkit.parallel import ElasticTraining, GlobalSampler
from tests.parallel.optimizers.problem import network

SIZE, BATCH, STEPS = 50, 12, 40


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """All samples."""
    inputs = torch.randn(SIZE, 24, generator=torch.Generator().manual_seed(0))
    return inputs, torch.sin(inputs[:, :4].sum(1, keepdim=True))


def main(place: str, *arguments: str) -> None:
    """A torchrun, an example, or the job of these tests."""
    if place == "-m":
        if known := os.environ.get("AGENT"):
            new = Path(f"{known}.new")
            new.write_text(str(os.getpid()))
            new.rename(known)
        torch.distributed.run.main(list(arguments[1:]))
    elif place.endswith(".py"):
        sys.argv = [place, *arguments]
        sys.path.insert(0, str(Path(place).parent))
        runpy.run_path(place, run_name="__main__")
    else:
        train(place, *arguments)


def train(place: str, replicas: str, seconds: str) -> None:
    """Train, write a line for each step that was done, and stop at the one that `limit` says."""
    folder, timeout = Path(place), float(seconds)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    began = torch.tensor(time.time(), dtype=torch.float64)
    dist.broadcast(began, 0)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    inputs, targets = data()
    with (
        Checkpointer(folder / "run", asynchronous=True, timeout=timeout) as checkpointer,
        ElasticTraining(
            checkpointer,
            model=model,
            optimizer=optimizer,
            sampler=GlobalSampler(SIZE),
            batch=BATCH,
            save_every=15,
            replicas=replicas or None,
            timeout=timeout,
        ) as training,
        (folder / f"{os.getpid()}.jsonl").open("w", buffering=1) as log,
    ):
        head = {"ranks": ranks, "began": began.item()}
        print(json.dumps(head | {"from": training.step}), file=log)
        for step in training.steps(STEPS):
            model.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs[step.samples]), targets[step.samples])
            (loss * step.weight).backward()
            optimizer.step()
            said = {"step": step.number, "rank": rank, "samples": step.samples}
            said |= {"loss": loss.item() * len(step.samples) / BATCH}
            print(json.dumps(head | said), file=log)
            while step.number >= int((folder / "limit").read_text()):
                time.sleep(0.02)
    dist.destroy_process_group()
