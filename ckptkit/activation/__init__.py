"""Activations between forward and backward: kept, recomputed, moved, or shared by ranks."""

from __future__ import annotations

from ckptkit.activation.memory import (
    ActivationMeter,
    MemoryStats,
    kept_bytes,
    peak_bytes,
)
from ckptkit.activation.parallelism import PipelineActivations, TensorParallelPolicy
from ckptkit.activation.policy import Checkpointed, checkpoint_activations
from ckptkit.activation.recompute import Undo
from ckptkit.activation.store import ActivationStore, DistributedActivationStore
from ckptkit.activation.transport import ThreadTransport, Transport

__all__ = [
    "ActivationMeter",
    "ActivationStore",
    "Checkpointed",
    "DistributedActivationStore",
    "MemoryStats",
    "PipelineActivations",
    "TensorParallelPolicy",
    "ThreadTransport",
    "Transport",
    "Undo",
    "checkpoint_activations",
    "kept_bytes",
    "peak_bytes",
]
