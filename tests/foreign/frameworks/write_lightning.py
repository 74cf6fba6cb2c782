"""Write checkpoints with Lightning: `python write_lightning.py OUT`.

Two ranks train on a CPU, under DDP and under ModelParallelStrategy (FSDP2). What is wanted is what
the job has when it saves, and what Lightning has loaded into a new one.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            for module in (self.net[0], self.net[2], self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().sum()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)]


class Wanted(pl.Callback):
    """Keeps what the job has when it begins."""

    def __init__(self) -> None:
        self.found: dict[str, np.ndarray[Any, Any]] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            self.found[f"model/{name}"] = whole(parameter)
            for key, value in trainer.optimizers[0].state[parameter].items():
                self.found[f"optimizer/{name}/{key}"] = whole(value)


def whole(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().numpy()


def trainer(kind: str, steps: int, *callbacks: pl.Callback) -> pl.Trainer:
    strategy: Any = DDPStrategy(process_group_backend="gloo")
    if kind == "fsdp2":
        strategy = ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(out: Path, kind: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    data = DataLoader(TensorDataset(torch.randn(32, 6)), batch_size=4)
    first = trainer(kind, 3)
    first.fit(Module(), data)
    place = out / (f"{kind}.ckpt" if kind == "ddp" else kind)
    first.save_checkpoint(place)
    wanted = Wanted()
    trainer(kind, 4, wanted).fit(Module(), data, ckpt_path=place)
    if dist.get_rank() == 0:
        np.savez(out / f"{kind}.npz", **wanted.found)  # type: ignore[arg-type]
    dist.barrier()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), sys.argv[2])
    else:
        for each in ("ddp", "fsdp2"):
            subprocess.run([sys.executable, __file__, sys.argv[1], each], check=True)
