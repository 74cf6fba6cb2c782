"""What is compared: something that saves this rank's part into a folder and loads it back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Contender(Protocol):
    """One way to save and load; every rank has its own, all ranks make the same calls."""

    def save(self, folder: Path) -> None:
        """Save the part of this rank into a folder that exists; it is empty on the first call."""

    def load(self, folder: Path) -> None:
        """Load what `save` left there into the existing buffers of the part."""


def make_durable(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
