"""Opening a run, or saying why a location is none."""

from __future__ import annotations

from ckptkit.cli.storage import Options

import ckptkit
from ckptkit.errors import UsageError


def open_run(location: str, storage_options: Options | None = None) -> ckptkit.Run:
    """A run that has at least one step, committed or not."""
    run = ckptkit.Run(location, storage_options=storage_options)
    if run.latest() is None and not run.listing():
        # Raises what is right for an empty place, and for a step that is not committed.
        ckptkit.open(location, storage_options=storage_options).close()
        raise UsageError(
            "a step, not a run",
            where=run.location,
            hint=f"`ckpt show {location}` shows it; a run is the folder that it is in",
        )
    return run
