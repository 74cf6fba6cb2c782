"""DeepSpeed engines whose checkpoints are the steps of a run: `save_checkpoint(engine, "runs/7b")`
and `load_checkpoint(engine, "runs/7b")`.
"""

from __future__ import annotations

from ckptkit.plugins.deepspeed.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
