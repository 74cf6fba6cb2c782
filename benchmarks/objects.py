"""Over an object store on this machine: saves, loads, reshards, against obstore itself and DCP."""

from __future__ import annotations

import gc
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

import ckptkit
from benchmarks.bucket import Bucket
from benchmarks.measured import Measured, Taken
from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.ours import add_part
from benchmarks.ranks import Ranks, isolated
from benchmarks.reshard import RULES
from benchmarks.servers import running
from benchmarks.state import Part, Tensor, llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds
from benchmarks.turns import save_in_turns
from ckptkit.model import Box
from ckptkit.storage import open_store
from tests.storage.counting import CountingStore

GIB, NARROWER = 1.0, 4
WRITERS = 2
CAP_MIB = 256

_OVER_HTTP = "Only ckptkit checks what the server says it stored."
_OVER_HTTPS = "Nobody hashes what is sent: https protects it."
_HOSTS = ("bucket", "bucket, torch")
_OPERATIONS = ("open", "read_into", "read", "read_whole", "create", "write", "put", "size", "list")


def benches(
    folder: Path, repeat: int, servers: Sequence[str] = (), gib: float = GIB
) -> Iterator[Callable[[], Section]]:
    """All of it, on some servers, or on every one that this machine can run."""
    tensors = llama(min(gib, GIB), NARROWER)
    for server in servers or running():
        yield partial(save, server, folder, tensors, repeat)
        yield partial(load, server, folder, tensors, repeat)
        if "https" not in server:
            yield partial(reshard, server, tensors)
            yield partial(resharded_load, server, tensors)


def save(server: str, folder: Path, tensors: list[Tensor], repeat: int) -> Section:
    """A step of 2 writers."""
    with _Job(server, folder, tensors) as job:
        measured = Measured()
        for turn in range(repeat + 1):
            for name in job.order(turn, unlike="get"):
                taken = job.ask(name, "save")
                job.clean()
                # The first turn fills pools and opens connections.
                if turn:
                    measured.add(name, taken)
    best, shown = measured.with_best("obstore put")
    floor, ours = measured.median(best), measured.median("ckptkit")
    dcp = min(measured.median(name) for name in measured.seconds if name.startswith("DCP"))
    size = total_bytes(tensors)
    return Section(
        f"Save to {server}, {WRITERS} writers: {size / 1e9:.2f} GB",
        speed_columns(best),
        speeds(shown, size, best),
        [
            Bar(f"save to {server}: speed / raw obstore", floor / ours, 0.85),
            Bar(f"save to {server}: speed / DCP with s3fs", dcp / ours, 2),
        ],
        [
            "The server runs on the same cores. "
            + (_OVER_HTTPS if "https" in server else _OVER_HTTP)
        ],
        measured.seconds,
        measured.cpu,
    )


def load(server: str, folder: Path, tensors: list[Tensor], repeat: int) -> Section:
    """The same step, by as many readers."""
    with _Job(server, folder, tensors) as job:
        measured = Measured()
        names = job.order(0, unlike="put")
        places = {name: job.saved(name) for name in names}
        for name in names:
            if not name.startswith("obstore"):
                job.check(name, places[name])
        for turn in range(repeat + 1):
            for name in job.order(turn, unlike="put"):
                taken = job.ask(name, "load", places[name])
                if turn:
                    measured.add(name, taken)
    best, shown = measured.with_best("obstore")
    floor, ours = measured.median(best), measured.median("ckptkit")
    dcp = min(measured.median(name) for name in measured.seconds if name.startswith("DCP"))
    size = total_bytes(tensors)
    return Section(
        f"Load from {server}, {WRITERS} readers: {size / 1e9:.2f} GB",
        speed_columns(best),
        speeds(shown, size, best),
        [
            Bar(f"load from {server}: speed / raw obstore", floor / ours, 0.85),
            Bar(f"load from {server}: speed / DCP with s3fs", dcp / ours, 3),
        ],
        ["Only ckptkit checks what it reads; the floor does not even copy it into the tensors."],
        measured.seconds,
        measured.cpu,
    )


def reshard(server: str, tensors: list[Tensor]) -> Section:
    """From the bucket into the bucket, under a cap."""
    with running()[server]() as bucket, bucket.tell():
        isolated(_save_source, tensors, "fsdp:8")
        needed, read, grown, seconds, counts = isolated(_reshard)
    rows = [
        ["seconds", f"{seconds:.1f}"],
        ["GB/s", f"{total_bytes(tensors) / seconds / 1e9:.2f}"],
        ["bytes read / needed", f"{read / needed:.3f}"],
        ["growth at its peak, MiB", f"{grown:.0f}"],
        *([f"requests: {name}", str(count)] for name, count in counts),
    ]
    what = f"reshard within {server}, fsdp:8 → tp:4"
    bars = [
        Bar(f"{what}: bytes read / needed", read / needed, 1.05, at_least=False),
        Bar(f"{what}: growth under a cap", grown, CAP_MIB, at_least=False, unit="MiB"),
    ]
    title = f"Reshard fsdp:8 → tp:4 within {server}: {total_bytes(tensors) / 1e9:.2f} GB"
    return Section(title, ["", f"--memory {CAP_MIB}MiB"], rows, bars)


def resharded_load(server: str, tensors: list[Tensor]) -> Section:
    """What a rank of fsdp:2 reads of a step of tp:4."""
    with running()[server]() as bucket, bucket.tell():
        isolated(_save_source, tensors, "tp:4")
        needed, read, requests, seconds = isolated(_load_resharded, tensors)
    ratio = read / needed
    rows = [[f"{needed / 1e6:.0f}", f"{read / 1e6:.0f}", f"{ratio:.3f}", str(requests)]]
    rows[0].append(f"{needed / seconds / 1e9:.2f}")
    bar = Bar(f"load tp:4 → fsdp:2 from {server}: bytes read / needed", ratio, 1.15, at_least=False)
    columns = ["needed MB", "read MB", "ratio", "requests", "GB/s"]
    return Section(f"One rank of fsdp:2 loads a step of tp:4 from {server}", columns, rows, [bar])


class _Job:
    """The ranks of both hosts, beside the server."""

    def __init__(self, server: str, folder: Path, tensors: list[Tensor]) -> None:
        self._folder = folder / "meeting"
        self._stack = ExitStack()
        self._bucket: Bucket = self._stack.enter_context(running()[server]())
        with self._bucket.tell():
            ranks = [self._stack.enter_context(Ranks(h, WRITERS, tensors)) for h in _HOSTS]
        self._by_name = {name: each for each in ranks for name in each.names}
        self._count = 0

    def order(self, turn: int, unlike: str = "nothing") -> list[str]:
        """Another order each turn."""
        names = [name for name in self._by_name if unlike not in name]
        return random.Random(turn).sample(names, len(names))

    def saved(self, name: str) -> Path:
        """The place where a contender has saved."""
        place = self._new()
        self._by_name[name].timed(name, "save", place)
        return place

    def ask(self, name: str, action: str, place: Path | None = None) -> Taken:
        """Let all ranks do something."""
        return self._by_name[name].timed(name, action, place or self._new())

    def check(self, name: str, place: Path) -> None:
        """Verify what was saved."""
        self._by_name[name].check(name, place)

    def clean(self) -> None:
        """Delete what was saved."""
        self._bucket.empty()

    def _new(self) -> Path:
        self._count += 1
        place = self._folder / f"place-{self._count}"
        place.mkdir(parents=True)
        return place

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _save_source(tensors: list[Tensor], strategy: str) -> None:
    bucket = Bucket.told()
    store = open_store(bucket.url("source"), bucket.options)
    first = store if strategy == "fsdp:8" else open_store(bucket.url("first"), bucket.options)

    def add(writer: ckptkit.Writer) -> None:
        add_part(writer, Part(tensors, writer.rank, 8))

    save_in_turns(first, "fsdp:8", 8, add)
    if first is not store:
        ckptkit.reshard(first, store, to=strategy, rules=RULES)


def _reshard() -> tuple[int, int, float, float, Sequence[tuple[str, int]]]:
    bucket = Bucket.told()
    source = CountingStore(open_store(bucket.url("source"), bucket.options))
    result = CountingStore(open_store(bucket.url("result"), bucket.options))
    plan = ckptkit.plan_reshard(source, result, to="tp:4", rules=RULES, memory=f"{CAP_MIB}MiB")
    source.reset()
    result.reset()
    gc.collect()
    reset_peak()
    before, start = resident_mib(), time.monotonic()
    ckptkit.reshard(source, result, to="tp:4", rules=RULES, memory=f"{CAP_MIB}MiB")
    seconds = time.monotonic() - start
    counts = [
        (f"{operation}, {side}", store.operations[operation])
        for side, store in (("source", source), ("result", result))
        for operation in _OPERATIONS
        if store.operations[operation]
    ]
    return plan.bytes_written, source.bytes_read, peak_mib() - before, seconds, counts


def _load_resharded(tensors: list[Tensor]) -> tuple[int, int, int, float]:
    bucket = Bucket.told()
    store = CountingStore(open_store(bucket.url("source"), bucket.options))
    part = Part(tensors, 1, 2)
    with ckptkit.open(store) as step:
        wanted = []
        for name, array in part.arrays.items():
            rows = step[name].shape[0]
            first = rows - len(array)
            box = Box((first, *(0,) * (array.ndim - 1)), array.shape)
            wanted.append((name, box, array))
        store.reset()
        start = time.monotonic()
        step.read_many(wanted)
        seconds = time.monotonic() - start
    needed = sum(np.asarray(array).nbytes for _, _, array in wanted)
    return needed, store.bytes_read, store.operations["read_into"], seconds
