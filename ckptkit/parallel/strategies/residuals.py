"""What compression has left unsent, in checkpoints of jobs that may compress otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ckptkit.checkpoint.checkpoint import open_checkpoint
from ckptkit.errors import CkptkitError

RESIDUALS = "compression"
"""The group of a checkpoint that they are in."""

log = logging.getLogger("ckptkit.parallel")


class Residuals:
    """The state of a compression, which that of another one leaves as it is."""

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def state_dict(self) -> dict[str, Any]:
        """What the compression keeps."""
        found: dict[str, Any] = self._compression.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over, if it is of the same compression."""
        if state.get("spec") != self._compression.spec:
            log.info(
                "residuals of %s are of no use to %s", state.get("spec"), self._compression.spec
            )
            return
        self._compression.load_state_dict(state)


def has_residuals(location: str | os.PathLike[str], options: Mapping[str, Any]) -> bool:
    """Whether a step has any, as rank 0 sees it."""
    found = [False]
    if dist.get_rank() == 0:
        stored = options.get("storage_options")
        try:
            with open_checkpoint(location, storage_options=stored) as checkpoint:
                found = [any(item.name == RESIDUALS for item in checkpoint.manifest.objects)]
        except CkptkitError:
            found = [True]  # the load itself says what is wrong
    dist.broadcast_object_list(found)
    return found[0]
