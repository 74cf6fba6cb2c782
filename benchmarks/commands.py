"""How long a command takes before it has done anything, and to look at a small step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import ckptkit
from benchmarks.measured import Measured, taken_by
from benchmarks.ranks import isolated
from benchmarks.table import Bar, Section

_REPEAT = 5
_LIMITS = {"ckpt --version": 0.12, "ckpt ls": 0.25, "ckpt show": 0.25}


def commands(folder: Path, repeat: int) -> Section:
    """Beside Python itself, and what others import before they do anything."""
    run = folder / "small"
    isolated(_save_small, run)
    python, ckpt = sys.executable, str(Path(sys.executable).with_name("ckpt"))
    lines: dict[str, Sequence[str]] = {
        "python -c pass": [python, "-c", "pass"],
        "ckpt --version": [ckpt, "--version"],
        "python -m ckptkit.cli --version": [python, "-m", "ckptkit.cli", "--version"],
        "ckpt ls": [ckpt, "ls", str(run)],
        "ckpt show": [ckpt, "show", str(run)],
        "import torch.distributed.checkpoint": [
            *(python, "-c", "import torch.distributed.checkpoint")
        ],
        "import zarr": [python, "-c", "import zarr"],
    }
    measured = Measured()
    for turn in range(max(_REPEAT, repeat) + 1):
        for what, line in lines.items():
            taken = taken_by(line)
            if turn:  # the first one reads the files from the disk
                measured.add(what, taken)
    rows = [
        [
            what,
            f"{min(seconds):.3f}",
            f"{measured.median(what):.3f}",
            f"{max(seconds):.3f}",
            f"{measured.median_cpu(what):.3f}",
        ]
        for what, seconds in measured.seconds.items()
    ]
    return Section(
        "The start of a command",
        ["", "min s", "median s", "max s", "CPU s"],
        rows,
        [
            Bar(what, measured.median(what), limit, at_least=False, unit="s")
            for what, limit in _LIMITS.items()
        ],
        ["The run has two steps of four arrays. CPU is user and system time, the median."],
        measured.seconds,
        measured.cpu,
    )


def _save_small(run: Path) -> None:
    for step in (1, 2):
        with ckptkit.Writer(run, step=step) as writer:
            for number in range(4):
                writer.add(f"model/{number}", np.ones((8, 8), np.float32), role="param")
