"""What every tensor costs, however small it is: from 1,000 to 100,000 of them, as the experts of a
mixture have, saved and loaded by two ranks of FSDP2, shown and resharded.
"""

from __future__ import annotations

import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path

import ckptkit
from benchmarks.job import Job
from benchmarks.measured import Measured, Taken, taken_by
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
# The most seconds that each may take for 100,000 arrays, beyond those for the same bytes in few.
_LIMITS = {
    "first save": 6,
    "later save": 3,
    "load": 5,
    "restore": 5,
    "reshard to tp:2": 6,
}
_MOST_FOR_LIMITS = 100_000
# All that a user waits for, of which so much is the start of a command.
_LONGEST_SHOW, _START = 1.3, 0.2
_PEER_ONCE = 50_000
# Up to here all takes a moment, and a moment's noise is much of it.
_SHORT, _OFTEN = 5_000, 5
_NOTE = f"""Over few: over the same bytes as {_FEW} arrays, DCP apart. A first save is that of a job
that has just begun, another job each turn. All are medians. *Each further* is beyond the arrays of
the row above. *load* is `ckptkit.live.load`, which remembers nothing; *restore* is that of the
Checkpointer that saved. CPU is that of all ranks, over few. With {_PEER_ONCE:,} arrays and more,
where it takes minutes, DCP saves and loads once."""


def many(folder: Path, repeat: int, counts: tuple[int, ...] = COUNTS) -> Section:
    """Seconds beyond those for the same bytes in few tensors, and by the tensor."""
    by_count: dict[int, tuple[Measured, Measured]] = {}
    for count in counts:
        tensors = _tensors(count)
        peer = 1 if count >= _PEER_ONCE else repeat
        often = max(repeat, _OFTEN) if count <= _SHORT else repeat
        found = _in_job(folder / "many", tensors, often, peer)
        by_count[count] = found, _in_job(folder / "few", _same_bytes(tensors), often, 0)
    return _section(by_count)


def _section(by_count: dict[int, tuple[Measured, Measured]]) -> Section:
    counts = sorted(by_count)
    over: dict[str, dict[int, float]] = {
        name: {
            count: found.median(name) - (few.median(name) if name in few.seconds else 0.0)
            for count, (found, few) in by_count.items()
        }
        for name in by_count[counts[0]][0].seconds
    }
    rows: list[list[str]] = []
    samples: dict[str, list[float]] = {}
    for name, by in over.items():
        slopes = _slopes(by)
        for count, seconds in by.items():
            found, few = by_count[count]
            cpu = found.median_cpu(name) - (few.median_cpu(name) if name in few.cpu else 0.0)
            rows.append(
                [
                    f"{name}, {count:,}",
                    f"{found.median(name):.2f}",
                    f"{seconds:.2f}",
                    f"{seconds / count * 1e6:.0f}",
                    f"{slopes[count] * 1e6:.0f}" if count in slopes else "",
                    f"{cpu / count * 1e6:.0f}",
                ]
            )
            samples[f"{name}, {count:,}"] = found.seconds[name]
            samples[f"{name}, few of the bytes of {count:,}"] = few.seconds.get(name, [])
    return Section(
        "Many small arrays: 4 to 64 KiB each, fsdp:2",
        ["what, arrays", "s", "s over few", "µs an array", "each further µs", "CPU µs an array"],
        rows,
        _bars(over, counts[-1], by_count[counts[-1]][0].median("ckpt show")),
        [_NOTE],
        samples,
    )


def _bars(over: dict[str, dict[int, float]], most: int, show: float) -> list[Bar]:
    """Seconds of the most arrays, in proportion where these are not 100,000, and how much more a
    further array takes where there are many than where there are few.
    """
    scale = most / _MOST_FOR_LIMITS
    bars = [
        Bar(
            f"{most:,} arrays: {name}, s over few",
            over[name][most],
            limit * scale,
            at_least=False,
            unit="s",
        )
        for name, limit in _LIMITS.items()
    ]
    limit = _LONGEST_SHOW * scale + _START
    bars.append(Bar(f"{most:,} arrays: ckpt show", show, limit, at_least=False, unit="s"))
    ratio = over["later save"][most] / over["first save"][most]
    bars.append(Bar(f"{most:,} arrays: later save / first save", ratio, 0.5, at_least=False))
    for name in (*_LIMITS, "ckpt show"):
        first, *between, last = sorted(over[name])
        if between:
            what = f"{name}: each further array, from {between[-1]:,} on / from {first:,} on"
            slopes = _slopes(over[name])
            growth = slopes[last] / slopes[between[0]]
            bars.append(Bar(what, growth, 1.2, at_least=False))
    return bars


def _slopes(seconds: dict[int, float]) -> dict[int, float]:
    """What each array takes beyond those of the next smaller count. What a save or a load takes
    besides is no more for many arrays, and would be most of what it takes for few.
    """
    return {
        count: (seconds[count] - seconds[fewer]) / (count - fewer)
        for fewer, count in pairwise(sorted(seconds))
    }


def _in_job(folder: Path, tensors: list[Tensor], repeat: int, peer: int) -> Measured:
    """What two ranks do, and what is done with their step; so often what the peer does."""
    found = Measured()
    savers = (("ckptkit", "later save"), ("DCP", "DCP save"))
    for _ in range(repeat - 1):
        with Job(folder, ["fsdp"], 2, tensors) as job:
            job.clean()  # of what the job before left the disk has still to do
            found.add("first save", job.ask("ckptkit", "save"))
    with Job(folder, ["fsdp"], 2, tensors) as job:
        job.clean()
        found.add("first save", job.ask("ckptkit", "save"))
        for turn in range(repeat):
            for name, label in savers[: 2 if turn < peer else 1]:
                shutil.rmtree(job.folder_of(name))
                found.add(label, job.ask(name, "save"))
        job.check("ckptkit", job.folder_of("ckptkit"))
        for turn in range(repeat):
            found.add("load", job.ask("ckptkit", "load_anew"))
            found.add("restore", job.ask("ckptkit", "load"))
            if turn < peer:
                found.add("DCP load", job.ask("DCP", "load"))
        step = job.folder_of("ckptkit") / "run"
        show = [str(Path(sys.executable).with_name("ckpt")), "show", str(step)]
        for turn in range(repeat):
            found.add("ckpt show", taken_by(show))
            found.add("reshard to tp:2", isolated(_resharding, step, folder / f"resharded-{turn}"))
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


def _resharding(step: Path, result: Path) -> Taken:
    start, cpu = time.monotonic(), time.process_time()
    ckptkit.reshard(step, result, to="tp:2", rules=_RULES)
    taken = Taken(time.monotonic() - start, time.process_time() - cpu, [])
    shutil.rmtree(result)
    return taken
