"""Checkpoints of distributed training: fast to save, impossible to half-save, readable by
anyone.
"""

from __future__ import annotations

from ckptkit.checkpoint.barrier import Barrier, FileBarrier, ThreadBarrier
from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.checkpoint import open_checkpoint as open  # noqa: A004
from ckptkit.checkpoint.rebuild import rebuild
from ckptkit.checkpoint.run import Run
from ckptkit.checkpoint.unpack import unpack
from ckptkit.checkpoint.verify import Finding, verify
from ckptkit.checkpoint.writer import Writer
from ckptkit.errors import CkptkitError
from ckptkit.format.zarr_dtypes import register as _register
from ckptkit.model import PerRank, Replicated, Split, Strategy, Sum
from ckptkit.version import __version__

_register()

__all__ = [
    "Barrier",
    "Checkpoint",
    "CkptkitError",
    "FileBarrier",
    "Finding",
    "PerRank",
    "Replicated",
    "Run",
    "Split",
    "Strategy",
    "Sum",
    "ThreadBarrier",
    "Writer",
    "__version__",
    "open",
    "rebuild",
    "unpack",
    "verify",
]
