"""The command `ckpt`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptkit.cli.program import main

__all__ = ["main"]


def __getattr__(name: str) -> Any:
    # When it is asked for: `python -m ckptkit.cli` imports this before its own first line.
    if name != "main":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("ckptkit.cli.program").main
