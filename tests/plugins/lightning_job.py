"""A small training by Lightning, as each rank of a job of the pool runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptkit.plugins.lightning import (
    CkptkitCheckpointIO,
    CkptkitDDPStrategy,
    CkptkitFSDPStrategy,
    CkptkitModelParallelStrategy,
    CkptkitSingleDeviceStrategy,
)
from ckptkit.plugins.torchdata import ElasticDataLoader

BATCH = 8
"""Of all ranks together, so that all sizes train alike."""


class PoolEnvironment(ClusterEnvironment):
    """The ranks of a job of the pool, which are there already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        return 1

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        """It is known."""

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        """It is known."""

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Samples(Dataset[torch.Tensor]):
    """Thirty-two: four steps an epoch."""

    def __init__(self) -> None:
        self.all = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.all)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.all[at]


class Small(pl.LightningModule):
    """Two layers, spread as the strategy wants them."""

    def __init__(self, width: int = 12, **more: object) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.Linear(width, 4))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, CkptkitFSDPStrategy):
            # Lightning's own wrapping asks for a device, and takes what is wrapped as it is.
            cpu = torch.device("cpu")
            net: Any = FullyShardedDataParallel(self.net, device_id=cpu, use_orig_params=True)
            self.net = net
        if not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        assert self.device_mesh is not None
        if self.device_mesh["tensor_parallel"].size() > 1:
            plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.device_mesh["data_parallel"].size() > 1:
            for module in (self.net[0], self.net[2], self.net):
                fully_shard(module, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        mean = loss.detach().clone()
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses.append(mean.item())
        self.log("loss", mean)
        self.log("left", -float(self.global_step))  # the first are the best
        return loss

    def validation_step(self, batch: torch.Tensor, _: int) -> None:
        self.log("val", self.net(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def strategy_of(layout: str, **options: Any) -> tuple[Strategy, list[Any]]:
    """A strategy by the name of its layout, and the plugins that go with it."""
    gloo: Any = {"process_group_backend": "gloo"}
    match layout:
        case "single":
            return CkptkitSingleDeviceStrategy(**options), []
        case "ddp":
            return CkptkitDDPStrategy(**gloo, **options), []
        case "io":
            return DDPStrategy(**gloo), [CkptkitCheckpointIO(**options)]
        case "fsdp1":
            return CkptkitFSDPStrategy(**gloo, **options), []
    sizes = (2, 1) if layout == "fsdp2" else (1, 2)
    made = CkptkitModelParallelStrategy(*sizes, **gloo, **options)
    return made, []


def shares_of(layout: str) -> tuple[int, int]:
    """How many shares of the data there are, and which is this rank's."""
    return (1, 0) if layout in ("single", "tp") else (dist.get_world_size(), dist.get_rank())


def trainer_of(
    layout: str, folder: Path | str, steps: int, options: dict[str, Any] | None = None, **more: Any
) -> pl.Trainer:
    """A trainer that saves after every third step."""
    strategy, plugins = strategy_of(layout, **(options or {}))
    kept = {"save_top_k": -1, "every_n_train_steps": 3} | more
    callbacks: list[Any] = [ModelCheckpoint(folder, **kept)]
    environment = [] if layout == "single" else [PoolEnvironment()]
    return pl.Trainer(
        accelerator="cpu",
        devices=1 if layout == "single" else dist.get_world_size(),
        strategy=strategy,
        plugins=[*plugins, *environment],
        callbacks=[*callbacks, *plugins],
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def loader_of(layout: str) -> ElasticDataLoader:
    """The share of the samples that is this rank's."""
    shares, mine = shares_of(layout)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Samples(), shares, mine, seed=3)
    return ElasticDataLoader(Samples(), BATCH // shares, sampler=sampler)


def train(
    layout: str,
    folder: str,
    steps: int,
    resume: str | None = None,
    options: dict[str, Any] | None = None,
    kept: dict[str, Any] | None = None,
) -> list[float]:
    """The losses of all ranks together, from where the checkpoint was."""
    module = Small()
    trainer = trainer_of(layout, folder, steps, options, **(kept or {}))
    trainer.fit(module, loader_of(layout), ckpt_path=resume)
    return module.losses


class Numbers(Samples):
    """The samples are their own numbers."""

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((6,), float(at))


class Reading(Small):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def training_step(self, batch: torch.Tensor, at: int) -> torch.Tensor:
        self.given += batch[:, 0].int().tolist()
        return super().training_step(batch, at)


def given(
    layout: str,
    folder: str,
    steps: int,
    resume: str | None = None,
    kind: str = "ElasticDataLoader",
) -> list[int]:
    """The samples that this rank reads, four in a batch."""
    shares, mine = shares_of(layout)
    sampler: Any = DistributedSampler(Numbers(), shares, mine, seed=3)
    kinds = {"ElasticDataLoader": ElasticDataLoader, "StatefulDataLoader": StatefulDataLoader}
    module, loader = Reading(), kinds[kind](Numbers(), 4, sampler=sampler)
    trainer_of(layout, folder, steps).fit(module, loader, ckpt_path=resume)
    return module.given
