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
from ckptkit.checkpoint.places import StepFolder, step_name
from ckptkit.checkpoint.workers import uncollected
from ckptkit.checkpoint.write.commit import commit, gather
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.checkpoint.write.plan import PackedArray, PackPlan, documents_of
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import ArrayInfo, ArrayKind
from ckptkit.format.manifest import SaveInfo
from ckptkit.model import DType, Grid, Replicate, Strategy, layout_of
from ckptkit.plan.chunks import Owned
from ckptkit.storage import MemoryStore

MANY_ARRAYS = 100_000

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
    many = isolated(_commit_of_many, MANY_ARRAYS, counts[0])
    rows.append([f"{counts[0]:,} ranks, {MANY_ARRAYS:,} small arrays", "", f"{many:.2f}", ""])
    name = f"commit of {MANY_ARRAYS:,} arrays, each of one chunk, by {counts[0]} ranks"
    return Section(
        "Cost by number of ranks, in memory: 100 arrays, one chunk of each per rank",
        ["", "plan and write, ms per rank", "commit s", "commit ms per rank"],
        rows,
        [
            Bar(what, growth, 2, at_least=False),
            Bar(name, many, 1, at_least=False, unit="s"),
        ],
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


def _commit_of_many(count: int, ranks: int) -> float:
    """What rank 0 of a DDP does when all have written: it knows nothing of the arrays yet."""
    strategy, shape, float32 = Strategy.of(f"ddp:{ranks}"), (4, 4), DType.of("float32")
    row = (Replicate(),)
    layout, grid = layout_of(shape, strategy, row), Grid.regular(shape, shape)
    names = [f"model/layers.{n // 50:05}.experts.{n % 50:02}.weight" for n in range(count)]
    kind = ArrayKind(shape, float32, grid, "param", row)
    infos = [ArrayInfo(name, kind) for name in names]
    table, folder = ArrayTable.of(infos, ()), StepFolder(MemoryStore(), step_name(1))
    owned = [Owned(name, layout, grid, float32.itemsize) for name in names]
    save_id = "20260101T000000Z-000000000000"
    save = SaveInfo(save_id, 1, 0.0, "benchmark", ranks, strategy, {})
    none, first = np.zeros(0, np.int64), np.zeros(1, np.int64)
    for rank in range(ranks):
        # As chunks of one size are shared out, a stretch of the names to each.
        stretch = slice(rank * count // ranks, (rank + 1) * count // ranks)
        known = list(zip(owned, infos, strict=True))
        writes = [none] * count
        writes[stretch] = [first] * len(names[stretch])
        part = stretch if rank else slice(count)  # rank 0 writes the documents of groups too
        documents = documents_of(known[part], writes[part], rank)
        mine = [PackedArray(info, first) for info in infos[stretch]]
        pack = Pack(rank, PackPlan(table, documents, mine), (), lambda slots: slots)
        segments = pack.segments_of(64 << 20)
        pack.begin(folder, save, segments, refers=rank > 0)
        for number in range(len(segments)):
            pack.write_segment(number)
    start = time.monotonic()
    with uncollected():  # as a save does
        commit(folder, gather(folder, save_id))
    return time.monotonic() - start


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
