"""`python -m benchmarks.older TREE`: this tree beside another one, such as a worktree of an older
commit, by turns and in processes of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import ckptkit
from ckptkit.model import Box

HERE = Path(__file__).resolve().parents[1]
TURNS, REPEATS = 6, 5

State = Mapping[str, npt.NDArray[Any]]


def main(other: Path) -> None:
    """Print a table of medians over turns, with the fastest and the slowest, in milliseconds."""
    trees = {"other": other.resolve(), "this": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for turn in range(TURNS):
        for name in sorted(trees, reverse=turn % 2 == 1):
            found[name].append(_measured(trees[name]))
    print("| | other | this | other / this |\n| --- | ---: | ---: | ---: |")
    for what in found["this"][0]:
        cells, medians = [], []
        for turns in found.values():
            times = sorted(1000 * each[what] for each in turns)
            medians.append(statistics.median(times))
            cells.append(f"{medians[-1]:.0f} ({times[0]:.0f} to {times[-1]:.0f})")
        print(f"| {what} | {' | '.join(cells)} | {medians[0] / medians[1]:.2f} |")


def _measured(tree: Path) -> dict[str, float]:
    # By path, and without this folder on the path of modules: all else is the tree's.
    command = [sys.executable, "-P", __file__, "--alone"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def alone(folder: Path) -> dict[str, float]:
    """The median seconds of each operation, one process and no peers."""
    bits = np.random.default_rng(0)
    shape = (8192, 4096)
    large = {f"layers.{n}": bits.integers(0, 255, shape, np.uint8).view("<f4") for n in range(32)}
    many = {f"layers.{n}": np.full(1024, n, "<f4") for n in range(5000)}
    found = {}
    for name, state in (("1 GiB", large), ("5,000 x 4 KiB", many)):
        run = folder / name.partition(" ")[0]
        found[f"save {name}"] = _median(partial(_save, state, run), run)
        into = {key: np.empty_like(array) for key, array in state.items()}
        found[f"load {name}"] = _median(partial(_load, into, run))
    source, target = folder / "1", folder / "target"
    reshard = partial(ckptkit.reshard, source, target, to="fsdp:4")
    found["reshard 1 GiB to fsdp:4"] = _median(reshard, target)
    found["verify 1 GiB"] = _median(partial(ckptkit.verify, source))
    found["open 5,000 arrays"] = _median(lambda: ckptkit.open(folder / "5,000").close())
    return found


def _median(do: Callable[[], object], made: Path | None = None) -> float:
    """Of some repeats, each without what the one before has made."""
    spans = []
    for _ in range(REPEATS):
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        start = time.perf_counter()
        do()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)


def _save(state: State, run: Path) -> None:
    with ckptkit.Writer(run, step=1) as writer:
        for name, array in state.items():
            writer.add(name, array)


def _load(into: State, run: Path) -> None:
    with ckptkit.open(run) as checkpoint:
        checkpoint.read_many([(name, Box.whole(out.shape), out) for name, out in into.items()])


if __name__ == "__main__":
    if sys.argv[1:] == ["--alone"]:
        with tempfile.TemporaryDirectory() as place:
            print(json.dumps(alone(Path(place))))
    else:
        main(Path(sys.argv[1]))
