"""Write checkpoints with accelerate: `python write_accelerate.py OUT`.

Two ranks train on a CPU, under FSDP2 and under DDP, and save all of their state. What is wanted of
it is what `load_state` brings back into the job. accelerate shards on GPUs only: where it looks for
them it is told that the CPU is one.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes


def accelerator(kind: str) -> Accelerator:
    if kind == "ddp":
        return Accelerator(cpu=True)
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="size_based_wrap",
        min_num_params=1,
        cpu_ram_efficient_loading=False,
    )
    return Accelerator(fsdp_plugin=plugin)


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().numpy()


def train(rank: int, port: int, out: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))
    adam = torch.optim.AdamW(plain.parameters(), lr=0.01)
    job = accelerator(kind)
    model, optimizer, scheduler = job.prepare(
        plain, adam, torch.optim.lr_scheduler.StepLR(adam, step_size=2)
    )
    for step in range(3):
        torch.manual_seed(step)
        job.backward(model(torch.randn(4, 6)).square().sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    job.save_state(str(out / kind))
    job.wait_for_everyone()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    job.load_state(str(out / kind))
    wanted: dict[str, np.ndarray[Any, Any]] = {}
    inner = model.module if kind == "ddp" else model
    for name, parameter in inner.named_parameters():
        wanted[f"model/{name}"] = whole(parameter)
        if kind != "ddp":
            for key, value in optimizer.optimizer.state[parameter].items():
                wanted[f"optimizer/{name}/{key}"] = whole(value)
    if rank == 0:
        np.savez(out / f"{kind}.npz", **wanted)  # type: ignore[arg-type]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for kind in ("fsdp2", "ddp"):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        start_processes(train, (port, Path(sys.argv[1]), kind), nprocs=2, start_method="spawn")
