"""What compression has left unsent, in checkpoints of jobs that may compress otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, leaving
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.errors import CkptkitError
from ckptkit.parallel.strategies.alike import room

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
    barrier = room("residuals", options.get("timeout", DEFAULT_TIMEOUT))
    with leaving(barrier):
        stored = options.get("storage_options")
        return bool(barrier.share(lambda: _has_residuals(location, stored)))


def _has_residuals(location: str | os.PathLike[str], stored: Mapping[str, Any] | None) -> bool:
    try:
        with open_checkpoint(location, storage_options=stored) as checkpoint:
            return any(item.name == RESIDUALS for item in checkpoint.manifest.objects)
    except CkptkitError:
        return True  # the load itself says what is wrong
