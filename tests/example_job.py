"""What runs an example, or the torchrun of one, in a process that has torch imported."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch._dynamo  # what wrappers would import when they are made
import torch.distributed.pipelining
import torch.distributed.run

import ckptkit.live
import ckptkit.parallel  # noqa: F401


def main(first: str, *arguments: str) -> None:
    """As `python` would: a file, or `-m torch.distributed.run`."""
    if first == "-m":
        assert arguments[0] == "torch.distributed.run"
        torch.distributed.run.main(list(arguments[1:]))
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
