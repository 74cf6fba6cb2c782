"""The command `ckpt`."""

from __future__ import annotations

from ckptkit.cli.program import main

__all__ = ["main"]
