"""Saving and loading within a training job: ckptkit.live, DCP and the floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.job import Job
from benchmarks.measured import Measured, Taken
from benchmarks.state import llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds

_LOADERS = ("ckptkit", "ckptkit, unchecked", "DCP")

_SAVE_NOTE = (
    "Durable: fsync is on for all, ckptkit and DCP commit. CPU s are those of all ranks together, "
    "in user and in system mode."
)
_LOAD_NOTE = (
    "In place, from the page cache. Only ckptkit checks what it reads. Each result was once "
    "compared with what had been saved."
)
_ASYNCHRONOUS_NOTE = (
    "The copy is by `Tensor.copy_` into memory that has been used before. A step is a fixed "
    "number of matrix products, without communication; of the slowest rank."
)
_DCP_NOTE = "DCP is given the DTensors themselves; making a state dict of a job is not counted."


def benches(folder: Path, gib: float, repeat: int) -> Iterator[Callable[[], Section]]:
    """All measurements; the processes of a layout are started once."""
    tensors = llama(gib)
    size = total_bytes(tensors)
    with Job(folder / "fsdp-2", ["fsdp"], 2, tensors) as fsdp:
        yield from _in_one_layout(fsdp, size, repeat)
    with Job(folder / "fsdp-4", ["fsdp"], 4, tensors) as fsdp:
        yield from _in_one_layout(fsdp, size, repeat)
        with Job(folder / "tp-2", ["tp"], 2, tensors) as tp:
            yield partial(_reshard, fsdp, tp, "fsdp:4 → tp:2", size, repeat)
            yield partial(_reshard, tp, fsdp, "tp:2 → fsdp:4", size, repeat)


def _in_one_layout(job: Job, size: int, repeat: int) -> Iterator[Callable[[], Section]]:
    for bench in (_save, _load, _asynchronous):
        yield partial(bench, job, size, repeat)


def _save(job: Job, size: int, repeat: int) -> Section:
    measured = job.saves(job.savers(), repeat)
    floor, shown = measured.with_best("write floor")
    best, ours, dcp = (measured.median(name) for name in (floor, "ckptkit", "DCP"))
    cpu = measured.median_cpu("ckptkit") / measured.median_cpu("DCP")
    what = f"live save, {job.world_size} ranks"
    return Section(
        f"Live: save of fsdp:{job.world_size}, {size / 1e9:.2f} GB",
        speed_columns(floor),
        speeds(shown, size, floor),
        [
            Bar(f"{what}: speed / O_DIRECT floor", best / ours, 0.85),
            Bar(f"{what}: speed / DCP", dcp / ours, 1.8),
            Bar(f"{what}: CPU seconds / DCP", cpu, 0.6, at_least=False),
        ],
        [_SAVE_NOTE, _DCP_NOTE],
        measured.seconds,
        measured.cpu,
    )


def _load(job: Job, size: int, repeat: int) -> Section:
    measured = job.loads(job.loaders(), repeat)
    floor, shown = measured.with_best("read floor")
    ratio = measured.median(floor) / measured.median("ckptkit, unchecked")
    what = f"live load, {job.world_size} ranks"
    return Section(
        f"Live: load warm into fsdp:{job.world_size}, {size / 1e9:.2f} GB",
        speed_columns(floor),
        speeds(shown, size, floor),
        [
            Bar(f"{what}: unchecked speed / preadv floor", ratio, 0.8),
            _against_dcp(what, measured),
        ],
        [_LOAD_NOTE, _DCP_NOTE],
        measured.seconds,
        measured.cpu,
    )


def _reshard(saver: Job, loader: Job, what: str, size: int, repeat: int) -> Section:
    measured = loader.loads(_LOADERS, repeat, saver)
    return Section(
        f"Live: load warm, {what}, {size / 1e9:.2f} GB",
        speed_columns("DCP"),
        speeds(measured, size, "DCP"),
        [_against_dcp(f"live load, {what}", measured)],
        [_LOAD_NOTE, _DCP_NOTE],
        measured.seconds,
        measured.cpu,
    )


def _against_dcp(what: str, measured: Measured) -> Bar:
    ratio = measured.median("DCP") / measured.median("ckptkit")
    return Bar(f"{what}: CRC-checked speed / DCP", ratio, 2.3)


def _asynchronous(job: Job, size: int, repeat: int) -> Section:
    measured = Measured()
    job.ask(_NAME, "begin")
    for turn in range(repeat + 1):
        others = (_copy, _save_beside) if turn % 2 else (_save_beside, _copy)
        for part in (_write_beside, *others):
            part(job, measured if turn else Measured())
    state, more, left = map(sum, zip(*job.ask(_NAME, "end").results, strict=True))
    job.check(_NAME, job.folder_of(_NAME))
    job.clean()
    wait = measured.median(_WAIT) / measured.median(_COPY)
    steps = zip(measured.seconds[_BUSY], measured.seconds[_QUIET], strict=True)
    slowdown = median(busy / quiet for busy, quiet in steps)
    floors = zip(measured.seconds[_FLOOR], measured.seconds[_QUIET], strict=True)
    unavoidable = median(floor / quiet for floor, quiet in floors)
    what = f"asynchronous save, {job.world_size} ranks"
    extra = (
        f"Extra memory of all ranks together: {more:.0f} MiB at its peak, {left:.0f} MiB after "
        f"the Checkpointer is closed; their state is {state:.0f} MiB."
    )
    floor_note = (
        "Writing as many bytes with nothing but O_DIRECT pwrite makes steps "
        f"{unavoidable:.2f} times as long."
    )
    return Section(
        f"Live: asynchronous save of fsdp:{job.world_size}, {size / 1e9:.2f} GB",
        ["", "min s", "median s", "max s", "GB/s"],
        [
            *(_row(name, measured.seconds[name], size) for name in (_COPY, _WAIT, _WRITE)),
            *(_row(name, measured.seconds[name]) for name in (_QUIET, _BUSY, _FLOOR)),
        ],
        [
            Bar(f"{what}: time in save() / plain copy", wait, 1.3, at_least=False),
            Bar(f"{what}: steps during the write / without", slowdown, 1.25, at_least=False),
            Bar(f"{what}: extra memory / state", more / state, _MEMORY, at_least=False),
        ],
        [extra, floor_note, _ASYNCHRONOUS_NOTE],
        measured.seconds,
    )


_NAME = "asynchronous"
_COPY, _WAIT, _WRITE = "plain copy of the state", "save()", "write, beside the training"
_QUIET, _BUSY = "a step without a save", "a step during the write"
_FLOOR = "a step during the floor's write"
_MEMORY = 1.2  # one arena of the size of the state, and some buffers


def _copy(job: Job, measured: Measured) -> None:
    measured.add(_COPY, job.ask(_NAME, "copy"))
    _add_step(measured, _QUIET, job.ask(_NAME, "train_quietly"))


def _save_beside(job: Job, measured: Measured) -> None:
    job.clean()
    measured.add(_WAIT, job.ask(_NAME, "save"))
    writing = job.ask(_NAME, "train_on")
    measured.add(_WRITE, writing)
    _add_step(measured, _BUSY, writing)


def _write_beside(job: Job, measured: Measured) -> None:
    job.clean()
    _add_step(measured, _FLOOR, job.ask(_NAME, "train_on_beside_floor"))
    job.clean()


def _add_step(measured: Measured, name: str, taken: Taken) -> None:
    # A job is as slow as its slowest rank.
    measured.add(name, replace(taken, seconds=max(taken.results)))


def _row(name: str, seconds: list[float], size: int | None = None) -> list[str]:
    digits = 2 if size else 4
    speed = f"{size / median(seconds) / 1e9:.2f}" if size else ""
    return [name, *(f"{f(seconds):.{digits}f}" for f in (min, median, max)), speed]
