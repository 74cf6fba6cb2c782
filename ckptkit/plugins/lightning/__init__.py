"""Lightning saves and loads through ckptkit: strategies whose ranks all write, and a CheckpointIO
for those that let one rank write.
"""

from __future__ import annotations

from ckptkit.plugins.framework import Framework

# What the strategies override. A release that calls it otherwise would save without us, unnoticed.
_OVERRIDDEN = (
    *("save_checkpoint", "load_checkpoint", "remove_checkpoint", "teardown"),
    *("lightning_module_state_dict", "load_model_state_dict", "optimizer_state"),
    *("load_optimizer_state_dict", "lightning_restore_optimizer", "restore_checkpoint_after_setup"),
)
Framework("lightning", "2.6", "lightning").check(
    {"lightning.pytorch.strategies": [f"Strategy.{name}" for name in _OVERRIDDEN]}
)

# Only what is known to be there is imported.
from ckptkit.plugins.lightning.paths import step_at  # noqa: E402
from ckptkit.plugins.lightning.strategies import (  # noqa: E402
    CkptkitCheckpointIO,
    CkptkitDDPStrategy,
    CkptkitFSDPStrategy,
    CkptkitModelParallelStrategy,
    CkptkitSingleDeviceStrategy,
)

__all__ = [
    "CkptkitCheckpointIO",
    "CkptkitDDPStrategy",
    "CkptkitFSDPStrategy",
    "CkptkitModelParallelStrategy",
    "CkptkitSingleDeviceStrategy",
    "step_at",
]
