"""torchtitan's own trainer and its debug model, on a CPU: run as a program, by the interpreter of
an environment that has it; it prints the loss of each step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import IterableDataset

ROOT = Path(__file__).resolve().parents[2]

# What torchtitan asks of a device and of a newer torch, and a CPU or torch 2.13 does not have.
torch._utils._get_available_device_type = lambda: "cpu"
_cpu: Any = torch.cpu
_cpu.get_device_name = lambda _: "cpu"
_cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 34)
_cpu.current_device = lambda: 0
_cpu.memory_stats = lambda _: {}
_cpu.reset_peak_memory_stats = _cpu.empty_cache = lambda: None
_dist: Any = torch.distributed
if not hasattr(_dist, "set_timeout"):
    _dist.set_timeout = lambda *_: None

from torchtitan.components.checkpoint import CheckpointManager as Dcp  # noqa: E402 — after the above
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from ckptkit.plugins.torchtitan import CheckpointManager  # noqa: E402


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    """What FlexAttention computes here; it has no backward on a CPU."""
    known = {name: options[name] for name in ("scale", "enable_gqa")}
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, **known
    ), SimpleNamespace(lse=None)


class Tokens(IterableDataset[Any]):
    """Rows of tokens, shared out so that any number of ranks reads the same ones in a step."""

    def __init__(self, length: int, rank: int, size: int, start: int) -> None:
        self.length, self.rank, self.size, self.at = length, rank, size, start

    def __iter__(self) -> Iterator[Any]:
        while True:
            made = torch.Generator().manual_seed(self.at + self.rank)
            self.at += self.size
            row = torch.randint(0, 2048, (self.length + 1,), generator=made)
            yield {"input": row[:-1], "positions": torch.arange(self.length)}, row[1:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        start: int = 0

    def __init__(self, config: Any, **given: Any) -> None:
        rank, size = given["dp_rank"], given["dp_world_size"]
        super().__init__(
            Tokens(given["seq_len"], rank, size, config.start),
            dp_rank=rank,
            dp_world_size=size,
            batch_size=given["local_batch_size"],
            snapshot_every_n_steps=given["snapshot_every_n_steps"],
        )


class Words(BaseTokenizer):  # type: ignore[misc]
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def run(task: dict[str, Any]) -> None:
    FlexAttention._compiled_flex_attn = staticmethod(attend)
    manager: Any = Dcp if task.get("dcp") else CheckpointManager
    config = llama3_debugmodel()
    config.tokenizer = Words.Config()
    config.dataloader = Loader.Config(start=task.get("start", 0))
    config.model_spec.model.layers = config.model_spec.model.layers[: task.get("layers", 2)]
    config.optimizer.implementation = "foreach"
    config.lr_scheduler.total_steps = 6
    config.dump_folder = task["folder"]
    config.debug.enable_structured_logging = False
    config.debug.seed = 7
    training, parallelism = config.training, config.parallelism
    training.seq_len, training.steps = task.get("length", 64), task["steps"]
    training.global_batch_size = 4
    training.disable_cuda_graphs, training.mixed_precision_param = True, "float32"
    training.local_batch_size = task.get("batch", 2)
    parallelism.spmd_backend = "partial_dtensor"
    for name, value in task.get("parallelism", {}).items():
        setattr(parallelism, name, value)
    settings = {"enable": True, "interval": 3, "last_save_model_only": False}
    config.checkpoint = manager.Config(**{**settings, **task.get("checkpoint", {})})
    trainer = config.build()
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        if os.environ["RANK"] == "0":
            sys.stdout.write(f"loss {step} {float(loss)!r}\n")
            sys.stdout.flush()
        if step == task.get("killed_in"):
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.metrics_processor.log = log
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
