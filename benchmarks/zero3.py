"""A checkpoint of DeepSpeed's ZeRO-3: `python zero3.py OUT LAYERS WIDTH`, by an interpreter that
has DeepSpeed, which does not go together with what else is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from typing import Any

RANKS = 2


def worker(rank: int, port: int, out: str, layers: int, width: int) -> None:
    """Train a step, and save."""
    import deepspeed  # noqa: PLC0415
    import torch  # noqa: PLC0415

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    torch.manual_seed(7)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    parameters: Any = net.parameters()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=parameters, config=config)
    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    engine.save_checkpoint(out)


def main(out: str, layers: int, width: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [
        spawn.Process(target=worker, args=(rank, port, out, layers, width)) for rank in range(RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
