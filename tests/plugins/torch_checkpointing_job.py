"""A training that torch_checkpointing saves: as a program, one that is killed in its fifth step."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import (
    AsyncCheckpointSaverConfig,
    CheckpointSaverConfig,
    SyncCheckpointSaverConfig,
)
from torch_checkpointing.staging import CheckpointStagerConfig

from ckptkit.plugins.torch_checkpointing import CkptkitStorageConfig

IN_PLACE: CheckpointSaverConfig = SyncCheckpointSaverConfig()
BEHIND: CheckpointSaverConfig = AsyncCheckpointSaverConfig(
    staging_config=CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False),
    # It imports torch, which takes long on a busy machine.
    process_config=CheckpointProcessConfig(subprocess_init_timeout_secs=150),
)


class Training:
    """Two layers, their optimizer and a scheduler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 600))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def step(self, number: int) -> float:
        """Train one step; its loss."""
        torch.manual_seed(number)
        loss: torch.Tensor = self.model(torch.rand(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """What torch_checkpointing is given."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def go_on(self, state: dict[str, Any]) -> None:
        """Take what was loaded; the model has been filled in place."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def manager_of(
    storage: CkptkitStorageConfig, save: CheckpointSaverConfig = IN_PLACE
) -> CheckpointManager:
    """A manager whose checkpoints lie there."""
    return CheckpointManager.Config(storage_config=storage, save=save).build()


def be_killed(location: str, options: dict[str, Any]) -> None:
    """Train, save the third step in the background, and die in the fifth."""
    training = Training()
    manager = manager_of(CkptkitStorageConfig(location, options), BEHIND)
    for number in range(1, 6):
        training.step(number)
        if number == 3:
            saving = manager.save("step-3", training.state())
            assert saving is not None
            saving.result()
    # The save of the fourth step has begun, and never ends.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    be_killed(*json.loads(sys.argv[1]))
