"""All ranks open the same step, even while others are being saved."""

from __future__ import annotations

import os

from ckptkit.checkpoint.barrier import Barrier
from ckptkit.checkpoint.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.run import Run


def open_together(barrier: Barrier, location: str | os.PathLike[str]) -> Checkpoint:
    """Open the step that rank 0 finds at a location, which may be a run."""
    if barrier.rank == 0:
        checkpoint = open_checkpoint(location)
        barrier.share(_step_in_run(checkpoint))
        return checkpoint
    step = barrier.share("")
    return Run(location).open(int(step)) if step else open_checkpoint(location)


def _step_in_run(checkpoint: Checkpoint) -> str:
    """The number of the step where the location was a run; nothing where it was the step."""
    return str(checkpoint.step) if checkpoint.prefix else ""
