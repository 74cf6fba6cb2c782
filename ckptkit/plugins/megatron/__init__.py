"""Megatron-Core with its steps in ckptkit: `SaveStrategy` and `LoadStrategy` are what its
`dist_checkpointing.save` and `load` take as `sharded_strategy`; `load` finds the newest step.
"""

from __future__ import annotations

from ckptkit.plugins.megatron.load import LoadStrategy, load
from ckptkit.plugins.megatron.save import SaveStrategy

__all__ = ["LoadStrategy", "SaveStrategy", "load"]
