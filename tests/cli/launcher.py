"""What test_launch.py runs many times, with torch and all else imported once."""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

import ckptkit.parallel.launch  # noqa: F401 - which the command imports when it needs it
from ckptkit_command import main as command


def main(name: str, *arguments: str) -> None:
    """`ckpt launch …`, or `meet`: what a rank may do."""
    if name == "meet":
        meet()
    else:
        sys.argv = ["ckpt", name, *arguments]
        command()


def meet() -> None:
    """Ranks that find each other at both starts; the first one ends badly."""
    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        os._exit(4)
    dist.barrier()
    sys.stdout.write(f"met {os.environ['RANK']}\n")
