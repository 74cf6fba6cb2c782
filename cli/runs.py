"""Opening a run, or saying why a location is none."""

from __future__ import annotations

import ckptkit
from ckptkit.errors import UsageError


def open_run(location: str) -> ckptkit.Run:
    """A run that has at least one step, committed or not."""
    run = ckptkit.Run(location)
    if not run.steps() and not run.listing():
        # Raises what is right for an empty place, and for a step that is not committed.
        ckptkit.open(location).close()
        raise UsageError(
            "a step, not a run",
            where=run.location,
            hint=f"`ckpt show {location}` shows it; a run is the folder that it is in",
        )
    return run
