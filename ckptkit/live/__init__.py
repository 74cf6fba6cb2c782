"""Save and load inside a training loop, from any strategy into any other."""

from __future__ import annotations

import re

import torch

from ckptkit.errors import UsageError

_OLDEST_TORCH = (2, 11)
if tuple(map(int, re.findall(r"\d+", str(torch.__version__))[:2])) < _OLDEST_TORCH:
    # In one sentence, before anything asks it for what it lacks.
    raise UsageError(
        f"ckptkit.live needs torch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or newer",
        value=str(torch.__version__),
        hint="pip install -U torch; what needs no torch, such as `ckpt` and ckptkit.open, works",
    )

from ckptkit.format.objects import PerDataRank, PerRank, Replicated, Split, Sum
from ckptkit.live.checkpointer import Checkpointer, save
from ckptkit.live.comparison import Report
from ckptkit.live.restore import Restored, load
from ckptkit.live.sharded_optimizer import ShardedOptimizerState
from ckptkit.live.shards import (
    DistributedModel,
    LocalShard,
    ShardingMetadata,
    TensorSharding,
    save_distributed,
)
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.live.state.extra import Extra, WorldSizeError, rng_state, set_rng_state
from ckptkit.live.state_dict import load_state

__all__ = [
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
    "load",
    "load_state",
    "rng_state",
    "save",
    "save_distributed",
    "set_rng_state",
]
