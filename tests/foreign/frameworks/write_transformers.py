"""Write checkpoints with transformers: `python write_transformers.py OUT`.

A model that `save_pretrained` cuts into several files, what the Trainer leaves after three steps,
and what four ranks of FSDP and tensor parallelism save after three, their optimizer too. What is
wanted of them is what `from_pretrained` loads, and `load_optimizer_distributed` into a new one.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.multiprocessing.spawn import start_processes
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.distributed.checkpoint import (
    load_optimizer_distributed,
    save_optimizer_distributed,
)
from transformers.distributed.configuration_utils import DistributedConfig

CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def note(place: Path, out: Path) -> None:
    """Keep what transformers itself finds there."""
    model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
    found = {}
    for name, tensor in model.state_dict().items():
        is_brain = tensor.dtype == torch.bfloat16
        found[f"model/{name}"] = (tensor.view(torch.uint16) if is_brain else tensor).numpy()
    np.savez(out, **found)


def write_distributed(rank: int, port: int, out: Path) -> None:
    warnings.simplefilter("ignore")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo")
    sizes = DistributedConfig(fsdp_size=2, tp_size=2)
    model: Any = AutoModelForCausalLM.from_pretrained(
        out / "whole", dtype=torch.float32, distributed_config=sizes
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(8)[None] + rank // 2

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    model.save_pretrained(out / "distributed", distributed_checkpoint=True)
    save_optimizer_distributed(model, optimizer, str(out / "distributed-optimizer"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    step()
    load_optimizer_distributed(model, optimizer, str(out / "distributed-optimizer"))
    options = StateDictOptions(full_state_dict=True)
    states: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    if rank == 0:
        found = {f"optimizer/{n}/{k}": v.numpy() for n, s in states.items() for k, v in s.items()}
        np.savez(out / "distributed-optimizer.npz", **found)
    dist.barrier()
    dist.destroy_process_group()


def main(out: Path) -> None:
    torch.manual_seed(7)
    model: Any = LlamaForCausalLM(CONFIG)
    model.to(torch.bfloat16).save_pretrained(out / "sharded", max_shard_size="2KB")
    note(out / "sharded", out / "sharded.npz")
    tokens = torch.arange(8) % CONFIG.vocab_size
    arguments = TrainingArguments(
        output_dir=str(out / "trained"),
        per_device_train_batch_size=1,
        max_steps=3,
        save_steps=3,
        use_cpu=True,
        report_to=[],
    )
    examples = [{"input_ids": tokens, "labels": tokens}] * 4
    Trainer(LlamaForCausalLM(CONFIG), arguments, train_dataset=examples).train()
    place = out / "trained" / "checkpoint-3"
    (place / "training_args.bin").write_bytes(b"")  # it has the paths of this machine
    note(place, out / "trained.npz")
    LlamaForCausalLM(CONFIG).save_pretrained(out / "whole")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(write_distributed, (port, out), nprocs=4, start_method="spawn")
    shutil.rmtree(out / "whole")
    note(out / "distributed", out / "distributed.npz")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
