"""What grows with arrays, chunks and ranks: opening, the manifest, the commit."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np

import ckptkit
from benchmarks.ranks import isolated
from benchmarks.table import Bar, Section
from benchmarks.turns import save_in_turns
from ckptkit.storage import MemoryStore

ROOT = Path(__file__).resolve().parents[1]

_WALK = """
import sys, ckptkit
with ckptkit.open(sys.argv[1]) as step:
    for array in step.arrays.values():
        print(array.name, array.shape, array.dtype, array.role, array.nbytes, array.grid.counts)
"""


def listing(folder: Path, repeat: int) -> Section:
    """What a user waits for who looks at a checkpoint of 10,000 arrays that 64 ranks wrote."""
    arrays, writers = 10_000, 64
    place = folder / "many-arrays"
    isolated(_save_many, place, arrays, writers)
    command, what = _show()
    samples = {
        "python, nothing else": _wall([sys.executable, "-c", "pass"], repeat),
        "import ckptkit": _wall([sys.executable, "-c", "import ckptkit"], repeat),
        what: _wall([*command, str(place)], repeat),
    }
    rows = [
        [name, f"{min(s):.2f}", f"{median(s):.2f}", f"{max(s):.2f}"] for name, s in samples.items()
    ]
    return Section(
        f"Looking at a checkpoint of {arrays:,} arrays by {writers} writers",
        ["process", "min s", "median s", "max s"],
        rows,
        [Bar(f"{what}, {arrays:,} arrays", median(samples[what]), 1, at_least=False, unit="s")],
        [f"Every array is cut among all writers: {arrays * writers:,} chunks."],
        samples,
    )


def ranks(counts: tuple[int, ...] = (64, 256, 1024)) -> Section:
    """The work of one rank and of the commit, for more and more ranks with the same share each."""
    rows, per_rank = [], {}
    for count in counts:
        writing, commit = isolated(_save_by, count)
        per_rank[count] = commit / count
        rows.append(
            [
                f"{count:,} ranks",
                f"{writing * 1e3:.1f}",
                f"{commit:.2f}",
                f"{commit / count * 1e3:.2f}",
            ]
        )
    growth = per_rank[counts[-1]] / per_rank[counts[0]]
    what = f"commit per rank, {counts[-1]:,} ranks / {counts[0]} ranks"
    return Section(
        "Cost by number of ranks, in memory: 100 arrays, one chunk of each per rank",
        ["", "plan and write, ms per rank", "commit s", "commit ms per rank"],
        rows,
        [Bar(what, growth, 2, at_least=False)],
        ["Linear is 1; with ranks squared in it anywhere, the last bar would go towards 16."],
    )


def _save_many(place: Path, arrays: int, writers: int) -> None:
    data = np.ones((1, 64), np.float32)

    def add(writer: ckptkit.Writer) -> None:
        for number in range(arrays):
            writer.add(
                f"model/layers.{number // 10}.weight.{number % 10}",
                data,
                shape=(writers, 64),
                placements={"fsdp": "shard(0)"},
                role="param",
            )

    save_in_turns(place, f"fsdp:{writers}", writers, add)


def _save_by(ranks: int) -> tuple[float, float]:
    data = np.ones((1, 8), np.float32)

    def add(writer: ckptkit.Writer) -> None:
        for number in range(100):
            name, placements = f"model/{number}", {"fsdp": "shard(0)"}
            writer.add(name, data, shape=(ranks, 8), placements=placements, role="param")

    spans, commit = save_in_turns(MemoryStore(), f"fsdp:{ranks}", ranks, add)
    return median(spans), commit


def _show() -> tuple[list[str], str]:
    """How to show a step here, and what to call it."""
    script = Path(sys.executable).with_name("ckpt")
    if script.exists():
        return [str(script), "show"], "ckpt show"
    return [sys.executable, "-c", _WALK], "open and print all arrays"


def _wall(command: list[str], repeat: int) -> list[float]:
    seconds = []
    for _ in range(max(5, repeat) + 1):
        start = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        seconds.append(time.monotonic() - start)
    return seconds[1:]
