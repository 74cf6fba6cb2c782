"""What every tensor costs, however small it is: from 1,000 to 100,000 of them, as the experts of a
mixture have, saved and loaded by two ranks of FSDP2.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import ckptkit
from benchmarks.job import Job
from benchmarks.measured import Measured
from benchmarks.ranks import isolated
from benchmarks.state import MOMENTS, Tensor, total_bytes
from benchmarks.table import Bar, Section

COUNTS = (1_000, 5_000, 20_000, 100_000)
_EXPERTS = 50
_COLUMNS, _ROWS = 64, (32, 64, 128, 256)
_FEW = 12
_RULES = {
    "rules": [
        {"match": "*.up.weight", "tp": "shard(0)"},
        {"match": "*.down.weight", "tp": "shard(1)"},
    ]
}
_ACTIONS = ("save", "load")


def many(folder: Path, repeat: int, counts: tuple[int, ...] = COUNTS) -> Section:
    """Seconds beyond those for the same bytes in few tensors, and by the tensor."""
    rows: list[list[str]] = []
    samples: dict[str, list[float]] = {}
    each: dict[int, dict[str, float]] = {}
    for count in counts:
        tensors = _tensors(count)
        found = _in_job(folder / "many", tensors, repeat, peer=True)
        few = _in_job(folder / "few", _same_bytes(tensors), repeat, peer=False)
        over = {name: found[name] - few.get(name, 0.0) for name in found}
        each[count] = over
        for name, seconds in over.items():
            samples[f"{name}, {count:,}"] = [found[name], few.get(name, 0.0)]
            micro = f"{seconds / count * 1e6:.0f}"
            rows.append([f"{count:,}: {name}", f"{found[name]:.2f}", f"{seconds:.2f}", micro])
    first, last = each[counts[0]], each[counts[-1]]
    most = f"{counts[-1]:,} arrays"
    limits = {"first save": 6, "save": 3, "load": 5, "ckpt show": 1.5, "reshard to tp:2": 6}
    bars = [
        Bar(f"{most}: {name}, seconds over few", last[name], limit, at_least=False, unit="s")
        for name, limit in limits.items()
    ]
    ratio = last["save"] / last["first save"]
    bars.append(Bar(f"{most}: save / first save", ratio, 0.5, at_least=False))
    for name in _ACTIONS:
        growth = last[name] / counts[-1] * counts[0] / first[name]
        what = f"{name}: time by the array, {counts[-1]:,} / {counts[0]:,}"
        bars.append(Bar(what, growth, 1.2, at_least=False))
    note = (
        f"Over few: over the same bytes as {_FEW} arrays. The first save of a job is one sample, "
        "all else medians. DCP and `ckpt show` are not compared with few."
    )
    return Section(
        "Many small arrays: 4 to 64 KiB each, fsdp:2",
        ["arrays: what", "s", "s over few", "µs an array"],
        rows,
        bars,
        [note],
        samples,
    )


def _in_job(folder: Path, tensors: list[Tensor], repeat: int, *, peer: bool) -> dict[str, float]:
    """Median seconds of what two ranks do, and of what is done with their step."""
    names = ["ckptkit", *(["DCP"] if peer else [])]
    found: dict[str, float] = {}
    with Job(folder, ["fsdp"], 2, tensors) as job:
        found["first save"] = job.ask("ckptkit", "save").seconds
        saves, loads = Measured(), Measured()
        for _ in range(repeat):
            for name in names:
                shutil.rmtree(job.folder_of(name))
                saves.add(name, job.ask(name, "save"))
        for name in names:
            job.check(name, job.folder_of(name))
            for _ in range(repeat):
                loads.add(name, job.ask(name, "load"))
        for action, measured in zip(_ACTIONS, (saves, loads), strict=True):
            for name in names:
                label = action if name == "ckptkit" else f"{name} {action}"
                found[label] = measured.median(name)
        step = job.folder_of("ckptkit") / "run"
        found["reshard to tp:2"] = isolated(_resharding, step, folder / "resharded")
        if peer:
            found["ckpt show"] = min(_shown(step) for _ in range(repeat))
    return found


def _tensors(count: int) -> list[Tensor]:
    """So many arrays: each parameter has two moments, and its number of steps."""
    tensors: list[Tensor] = []
    for number in range(count // 4):
        layer, expert = divmod(number, _EXPERTS)
        kind = "down" if number % 2 else "up"
        shape = (_ROWS[number % len(_ROWS)], _COLUMNS)
        path = f"layers.{layer}.experts.{expert}.{kind}.weight"
        tensors.append(Tensor(f"model/{path}", shape, "bfloat16"))
        tensors += [
            Tensor(f"optimizer/{path}/{moment}", shape, "float32", f"model/{path}")
            for moment in MOMENTS
        ]
    return tensors


def _same_bytes(tensors: list[Tensor]) -> list[Tensor]:
    rows = total_bytes(tensors) // (_FEW // 4 * _COLUMNS * 10)
    few = _tensors(_FEW)
    return [Tensor(t.name, (rows, _COLUMNS), t.dtype, t.of) for t in few]


def _resharding(step: Path, result: Path) -> float:
    start = time.monotonic()
    ckptkit.reshard(step, result, to="tp:2", rules=_RULES)
    return time.monotonic() - start


def _shown(step: Path) -> float:
    command = [str(Path(sys.executable).with_name("ckpt")), "show", str(step)]
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - start
