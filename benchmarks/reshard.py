"""Resharding offline: against copying the same bytes, and against the peer's converter."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ckptkit
from benchmarks.measured import Measured, Taken
from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.ours import add_part
from benchmarks.ranks import isolated
from benchmarks.state import Part, Tensor, llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds
from benchmarks.turns import save_in_turns
from ckptkit.storage import BufferPool

RULES: dict[str, Any] = {
    "rules": [
        {"match": "re:.*([qkv]_proj|gate_proj|up_proj|embed_tokens)\\.weight", "tp": "shard(0)"},
        {"match": "re:.*(o_proj|down_proj)\\.weight", "tp": "shard(1)"},
        {"match": "*norm.weight", "tp": "replicate"},
    ],
    "pipeline": {
        "layers": "layers\\.(\\d+)",
        "split": "balanced",
        "first": ["embed_tokens.weight"],
        "last": ["norm.weight"],
    },
}
WAYS = (
    # At least so many GiB: as many layers as there are stages.
    ("fsdp:8", "tp:4", 1.2, 4.0),
    ("tp:4", "fsdp:8", 1.4, 4.0),
    ("pp:4", "tp:4", 1.4, 8.0),
    ("ddp:2,fsdp:4", "tp:2,pp:2", 1.4, 4.0),
)
_SEGMENT = 8 << 20
_TMPFS = Path("/dev/shm")


def benches(folder: Path, repeat: int) -> Iterator[Callable[[], Section]]:
    """All of it; sizes are in GiB, at least."""
    for source, to, limit, gib in WAYS:
        yield partial(way, folder, gib, repeat, source, to, limit)
    yield partial(against_dcp, folder, 1.6, repeat)
    yield partial(memory, folder, (1.6, 8.0))
    if _TMPFS.is_dir():
        yield partial(workers, Path(tempfile.mkdtemp(prefix="bench-", dir=_TMPFS)), 1.6, repeat)


def save_source(place: Path, tensors: list[Tensor], strategy: str = "fsdp:8") -> None:
    """A step as the ranks of `fsdp:8` write it, or resharded from that."""
    ranks = 8
    if strategy != "fsdp:8":
        first = place.with_name(f"{place.name}-first")
        save_source(first, tensors)
        ckptkit.reshard(first, place, to=strategy, rules=RULES)
        shutil.rmtree(first)
        return

    def add(writer: ckptkit.Writer) -> None:
        add_part(writer, Part(tensors, writer.rank, ranks))

    save_in_turns(place, strategy, ranks, add)


def way(folder: Path, gib: float, repeat: int, source: str, to: str, limit: float) -> Section:
    """One reshard of at least so many GiB, `cp -r` with `sync`, and a parallel direct copy."""
    tensors = llama(gib)
    size = total_bytes(tensors)
    origin, result = folder / "from", folder / "to"
    isolated(save_source, origin, tensors, source)
    ways: dict[str, Callable[[], None]] = {
        "ckptkit": lambda: ours(origin, result, to),
        "cp -r && sync": lambda: copied(origin, result),
        "copy floor: 4 x 8 MiB, O_DIRECT": lambda: _direct_copy(origin, result),
    }
    measured = Measured()
    for _ in range(repeat):
        for name, work in ways.items():
            shutil.rmtree(result, ignore_errors=True)
            result.mkdir()
            os.sync()
            warmed(origin)
            start, cpu = time.monotonic(), cpu_seconds()
            work()
            measured.add(name, Taken(time.monotonic() - start, cpu_seconds() - cpu, []))
    shutil.rmtree(result)
    plan = ckptkit.plan_reshard(origin, result, to=to, rules=RULES)
    shutil.rmtree(origin)
    copying = measured.median("cp -r && sync")
    bars = [
        Bar(
            f"reshard {source} → {to}: time / cp -r && sync",
            measured.median("ckptkit") / copying,
            limit,
            at_least=False,
        ),
        Bar(
            f"reshard {source} → {to}: bytes read / needed",
            plan.read_amplification,
            1.05,
            at_least=False,
        ),
    ]
    return Section(
        f"Reshard {source} → {to}: {size / 1e9:.2f} GB with optimizer",
        speed_columns("cp -r && sync"),
        speeds(measured, size, "cp -r && sync"),
        bars,
        ["A process of its own each, starting included; the source is in the page cache."],
        measured.seconds,
        measured.cpu,
    )


def against_dcp(folder: Path, gib: float, repeat: int) -> Section:
    """Per byte: our reshard, and DCP's `dcp_to_torch_save`, which only joins shards."""
    tensors = llama(gib)
    size = total_bytes(tensors)
    origin, result, dcp = folder / "from", folder / "to", folder / "dcp"
    isolated(save_source, origin, tensors)
    isolated(_save_dcp, dcp, tensors)
    measured = Measured()
    for _ in range(repeat):
        for name in ("ckptkit", "dcp_to_torch_save"):
            shutil.rmtree(result, ignore_errors=True)
            result.mkdir()
            os.sync()
            warmed(origin if name == "ckptkit" else dcp)
            start = time.monotonic()
            if name == "ckptkit":
                ours(origin, result, "tp:4")
            else:
                isolated(converted, dcp, result / "state.pt")
            measured.add(name, Taken(time.monotonic() - start, 0.0, []))
    for path in (origin, result, dcp):
        shutil.rmtree(path)
    ratio = measured.median("dcp_to_torch_save") / measured.median("ckptkit")
    return Section(
        f"Reshard fsdp:8 → tp:4 against dcp_to_torch_save: {size / 1e9:.2f} GB",
        speed_columns("dcp_to_torch_save"),
        speeds(measured, size, "dcp_to_torch_save"),
        [Bar("reshard fsdp:8 → tp:4: speed / dcp_to_torch_save", ratio, 8)],
        ["The peer's result has one rank, is neither checked nor synced, and was in memory whole."],
        measured.seconds,
    )


def memory(folder: Path, sizes: tuple[float, float]) -> Section:
    """The growth of a process under two caps, for a small and a large source."""
    rows, bars, peaks = [], [], dict[tuple[int, float], float]()
    for gib in sizes:
        tensors = llama(gib)
        origin, result = folder / "from", folder / "to"
        isolated(save_source, origin, tensors)
        for cap in (256, 1024):
            for workers in (1, 4):
                peak = isolated(_grown, origin, result, f"{cap}MiB", workers)
                shutil.rmtree(result)
                title = f"{total_bytes(tensors) / 1e9:.1f} GB, {workers} workers"
                rows.append([title, f"{cap}", f"{peak:.0f}"])
                if workers == 4:
                    peaks[cap, gib] = peak
                    what = f"reshard {title}: growth under a cap of {cap} MiB"
                    bars.append(Bar(what, peak, cap, at_least=False, unit="MiB"))
        shutil.rmtree(origin)
    small, large = sizes
    ratio = peaks[256, large] / peaks[256, small]
    bars.append(Bar("reshard: growth of the large source / small", ratio, 1.1, at_least=False))
    columns = ["fsdp:8 → tp:4", "--memory, MiB", "growth at its peak, MiB"]
    return Section("Memory of a reshard", columns, rows, bars)


def workers(folder: Path, gib: float, repeat: int) -> Section:
    """One worker and two where no disk is in the way."""
    tensors = llama(gib)
    size = total_bytes(tensors)
    origin, result = folder / "from", folder / "to"
    isolated(save_source, origin, tensors)
    measured = Measured()
    for turn in range(repeat + 1):
        for count in (1, 2):
            seconds = isolated(_timed, origin, result, count)
            shutil.rmtree(result)
            if turn:
                measured.add(f"{count} workers", Taken(seconds, 0.0, []))
    shutil.rmtree(folder)
    ratio = measured.median("1 workers") / measured.median("2 workers")
    return Section(
        f"Reshard fsdp:8 → tp:4 in memory (tmpfs): {size / 1e9:.2f} GB",
        speed_columns("1 workers"),
        speeds(measured, size, "1 workers"),
        [Bar("reshard on tmpfs: speed of 2 workers / 1", ratio, 1.5)],
        samples=measured.seconds,
    )


def ours(origin: Path, result: Path, to: str) -> None:
    """In a process of its own, as the command runs."""
    isolated(_reshard, origin, result, to)


def _reshard(origin: Path, result: Path, to: str) -> None:
    ckptkit.reshard(origin, result, to=to, rules=RULES)


def _grown(origin: Path, result: Path, cap: str, count: int) -> float:
    gc.collect()
    reset_peak()
    before = resident_mib()
    ckptkit.reshard(origin, result, to="tp:4", rules=RULES, memory=cap, workers=count)
    return peak_mib() - before


def _timed(origin: Path, result: Path, count: int) -> float:
    _reshard(origin, result, "tp:2")
    shutil.rmtree(result)
    start = time.monotonic()
    ckptkit.reshard(origin, result, to="tp:4", rules=RULES, workers=count)
    return time.monotonic() - start


def copied(origin: Path, result: Path) -> None:
    subprocess.run(["cp", "-r", str(origin), str(result)], check=True)
    os.sync()


def _direct_copy(origin: Path, result: Path) -> None:
    """Read through the page cache, written past it, by a few threads; then synced."""
    pool = BufferPool()
    with ThreadPoolExecutor(4) as executor:
        for path in sorted(p for p in origin.rglob("*") if p.is_file()):
            size = path.stat().st_size
            source = os.open(path, os.O_RDONLY)
            target = os.open(result / path.name, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o644)
            os.posix_fallocate(target, 0, size)

            def piece(begin: int, source: int = source, target: int = target) -> None:
                with pool.take(_SEGMENT) as memory:
                    count = os.preadv(source, [memory], begin)
                    os.pwrite(target, memory[: -(-count // 4096) * 4096], begin)

            list(executor.map(piece, range(0, size, _SEGMENT)))
            os.ftruncate(target, size)
            os.fsync(target)
            os.close(source)
            os.close(target)


def warmed(folder: Path) -> None:
    memory = bytearray(_SEGMENT)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while os.readv(file.fileno(), [memory]):
                    pass


def _save_dcp(place: Path, tensors: list[Tensor]) -> None:
    import torch  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    part = Part(tensors)
    state = {
        t.name: torch.from_numpy(part.arrays[t.name].view(np.uint8)).view(dtypes[t.dtype])
        for t in tensors
    }
    save(state, storage_writer=FileSystemWriter(place, thread_count=2), no_dist=True)


def converted(source: Path, result: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: PLC0415

    dcp_to_torch_save(source, result)


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
