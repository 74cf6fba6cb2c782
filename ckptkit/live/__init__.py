"""Save and load inside a training loop, from any strategy into any other."""

from __future__ import annotations

from ckptkit.live import oldest_torch as oldest_torch  # isort: skip - before what it may lack
from ckptkit.live.checkpointer import Checkpointer
from ckptkit.live.distributed_model import DistributedModel, distributed_model
from ckptkit.live.extra import Extra, WorldSizeError
from ckptkit.live.functions import load, load_state, save
from ckptkit.live.loading import Restored
from ckptkit.live.report import Report
from ckptkit.live.rng import rng_state, set_rng_state
from ckptkit.live.sharded_optimizer import ShardedOptimizerState
from ckptkit.live.shards import (
    CheckpointHelper,
    LocalShard,
    ShardingMetadata,
    TensorSharding,
    helper_for,
    save_distributed,
)
from ckptkit.live.wrappers.entries import StateMismatchError
from ckptkit.model import PerDataRank, PerRank, Replicated, Split, Sum

__all__ = [
    "CheckpointHelper",
    "Checkpointer",
    "DistributedModel",
    "Extra",
    "LocalShard",
    "PerDataRank",
    "PerRank",
    "Replicated",
    "Report",
    "Restored",
    "ShardedOptimizerState",
    "ShardingMetadata",
    "Split",
    "StateMismatchError",
    "Sum",
    "TensorSharding",
    "WorldSizeError",
    "distributed_model",
    "helper_for",
    "load",
    "load_state",
    "rng_state",
    "save",
    "save_distributed",
    "set_rng_state",
]
