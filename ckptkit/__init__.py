"""Checkpoints of distributed training: fast to save, impossible to half-save, readable by
anyone.
"""

from __future__ import annotations

from ckptkit.checkpoint.check.state import (
    ArrayDifference,
    Diff,
    Digest,
    ObjectDifference,
    diff,
    digest,
)
from ckptkit.checkpoint.check.unpack import unpack
from ckptkit.checkpoint.check.verify import Finding, rebuild, verify
from ckptkit.checkpoint.ranks import FileBarrier, Ranks, ThreadBarrier
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.checkpoint import open_checkpoint as open  # noqa: A004
from ckptkit.checkpoint.reshard.engines import commit_packs
from ckptkit.checkpoint.reshard.plan import Resharded, ReshardPlan, plan_reshard, reshard
from ckptkit.checkpoint.reshard.selection import Selection
from ckptkit.checkpoint.reshard.target import Explained, explain_rules
from ckptkit.checkpoint.run.run import Run
from ckptkit.checkpoint.write.writer import Writer
from ckptkit.errors import CkptkitError
from ckptkit.format.objects import PerRank, Replicated, Split, Sum
from ckptkit.format.zarr_dtypes import register as _register
from ckptkit.model import Strategy
from ckptkit.storage import open_store
from ckptkit.version import __version__

_register()

__all__ = [
    "ArrayDifference",
    "Checkpoint",
    "CkptkitError",
    "Diff",
    "Digest",
    "Explained",
    "FileBarrier",
    "Finding",
    "ObjectDifference",
    "PerRank",
    "Ranks",
    "Replicated",
    "ReshardPlan",
    "Resharded",
    "Run",
    "Selection",
    "Split",
    "Strategy",
    "Sum",
    "ThreadBarrier",
    "Writer",
    "__version__",
    "commit_packs",
    "diff",
    "digest",
    "explain_rules",
    "open",
    "open_store",
    "plan_reshard",
    "rebuild",
    "reshard",
    "unpack",
    "verify",
]
