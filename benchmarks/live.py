"""Saving and loading within a training job: ckptkit.live, DCP and the floors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.job import Job, in_turn
from benchmarks.measured import Measured
from benchmarks.state import llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds

_LOADERS = ("ckptkit", "ckptkit, unchecked", "DCP", "DCP on ckptkit")

_SAVE_NOTE = (
    "Durable: fsync is on for all, ckptkit and DCP commit. CPU s are those of all ranks together, "
    "in user and in system mode."
)
_LOAD_NOTE = (
    "In place, from the page cache. Only ckptkit checks what it reads. Each result was once "
    "compared with what had been saved."
)
_ASYNCHRONOUS_NOTE = (
    "The plain copy, just before each save, is by `Tensor.copy_` into memory that has been used "
    "before. A step is a fixed number of matrix products by one thread, without communication; of "
    "the slowest rank, beside those just before the save. CPU s are those of save and write "
    "together, of all ranks and their processes. Memory is that of a first save. Median (least to "
    "most); who takes more than 10 s until a save is durable has two turns only."
)
_BESIDE_GIB = 0.8
# A save() takes some 50 ms, and the speed of memory changes within seconds: so ours, which is
# durable soon, has more turns than the peers.
_TURNS, _PEER_TURNS = 21, 7
_LOADS = 15
_DCP_NOTE = "DCP is given the DTensors themselves; making a state dict of a job is not counted."


def benches(folder: Path, gib: float, repeat: int) -> Iterator[Callable[[], Section]]:
    """All measurements; the processes of a layout are started once."""
    tensors = llama(gib)
    size = total_bytes(tensors)
    with Job(folder / "fsdp-2", ["fsdp"], 2, tensors) as fsdp:
        yield from (partial(bench, fsdp, size, repeat) for bench in (_save, _load, _whole))
    yield from _beside_training(folder, gib, 2, repeat)
    with Job(folder / "fsdp-4", ["fsdp"], 4, tensors) as fsdp:
        yield from (partial(bench, fsdp, size, repeat) for bench in (_save, _load, _whole))
        with Job(folder / "tp-2", ["tp"], 2, tensors) as tp:
            yield partial(_reshard, fsdp, tp, "fsdp:4 → tp:2", size, repeat)
            yield partial(_reshard, tp, fsdp, "tp:2 → fsdp:4", size, repeat)
    yield from _beside_training(folder, gib, 4, repeat)


def _beside_training(
    folder: Path, gib: float, ranks: int, repeat: int
) -> Iterator[Callable[[], Section]]:
    # Of a smaller state: each way of DCP keeps copies of it, and all ways are there at a time.
    tensors = llama(min(gib, _BESIDE_GIB), narrower=4)
    with Job(folder / f"beside-{ranks}", ["fsdp"], ranks, tensors) as job:
        names = [name for name in job.names if name.startswith(f"{_LOOP}: ")]
        yield partial(_asynchronous, job, total_bytes(tensors), repeat, names)


def _whole(job: Job, size: int, repeat: int) -> Section:
    """The whole state, beside the way of DCP that keeps no copy of it."""
    return _asynchronous(job, size, repeat, [f"{_LOOP}: ckptkit", f"{_LOOP}: DCP"])


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
            _on_ckptkit(what, measured, 1.8),
        ],
        [_SAVE_NOTE, _DCP_NOTE],
        measured.seconds,
        measured.cpu,
    )


def _load(job: Job, size: int, repeat: int) -> Section:
    measured = job.loads(job.loaders(), repeat, often=_LOADS)
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
            _on_ckptkit(what, measured, 2.0),
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


def _on_ckptkit(what: str, measured: Measured, least: float) -> Bar:
    ratio = measured.median("DCP") / measured.median("DCP on ckptkit")
    return Bar(f"{what}: DCP on ckptkit / DCP", ratio, least)


def _asynchronous(job: Job, size: int, repeat: int, names: Sequence[str]) -> Section:
    job.ask(_LOOP, "begin")
    memory: dict[str, float] = {}
    for name in names:
        job.clean()
        memory[name] = sum(job.ask(name, "first").results)
        job.check(name, job.folder_of(name))
    measured, found = Measured(), dict[str, _Found]()
    ours = f"{_LOOP}: ckptkit"
    for turn in range(max(_TURNS, repeat) + 1):
        # The first fills what is kept from save to save.
        into = found if turn else dict[str, _Found]()
        peers = names if turn <= max(_PEER_TURNS, repeat) else [ours]
        for name in in_turn([_LOOP, *peers], turn):
            known = found.get(name, _Found()).durable
            if len(known) >= _FEW and median(known) > _LONG:
                continue
            _beside(job, name, measured if turn else Measured(), into.setdefault(name, _Found()))
    for name in names:
        job.ask(name, "close")
    state = sum(job.ask(_LOOP, "end").results)
    job.clean()
    own, dcp = found[ours], found[f"{_LOOP}: DCP"]
    wait, steps, cpu = median(own.copies), median(own.steps), median(own.cpu) / median(dcp.cpu)
    more = memory[ours] / state
    what = f"asynchronous save of {size / 1e9:.2f} GB, {job.world_size} ranks"
    floor_note = (
        "Writing as many bytes with nothing but O_DIRECT pwrite makes steps "
        f"{_spread(found[_LOOP].steps)} times as long, and takes {_spread(found[_LOOP].durable)} s."
    )
    return Section(
        f"Live: asynchronous save of fsdp:{job.world_size}, {size / 1e9:.2f} GB",
        [
            *("", "save() s", "save() / plain copy", "step / without", "durable after s"),
            *("CPU s", "extra memory / state"),
        ],
        [
            [
                name.removeprefix(f"{_LOOP}: "),
                *map(_spread, (one.blocked, one.copies, one.steps, one.durable, one.cpu)),
                f"{memory[name] / state:.2f}",
            ]
            for name, one in sorted(found.items(), key=lambda item: median(item[1].blocked or [0]))
            if name in memory
        ],
        [
            Bar(f"{what}: time in save() / plain copy", wait, 1.15, at_least=False),
            Bar(f"{what}: steps during the write / without", steps, 1.1, at_least=False),
            Bar(f"{what}: CPU seconds / DCP", cpu, 0.2, at_least=False),
            Bar(f"{what}: extra memory / state", more, 1.2, at_least=False),
        ],
        [floor_note, _ASYNCHRONOUS_NOTE, _DCP_NOTE],
        measured.seconds,
        measured.cpu,
    )


_LOOP = "asynchronous"
_LONG, _FEW = 10, 2  # seconds until a save is durable; turns of those that take longer


@dataclass(frozen=True, slots=True)
class _Found:
    """What each turn found out of one saver, or of the floor."""

    blocked: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def _beside(job: Job, name: str, measured: Measured, found: _Found) -> None:
    """One save during a training, and just before it what it is compared with."""
    job.clean()
    copy, quiet = job.ask(_LOOP, "copy"), job.ask(_LOOP, "train")
    seconds = cpu = 0.0
    if name != _LOOP:
        saved = job.ask(name, "save")
        measured.add(f"{name}: save()", saved)
        found.blocked.append(saved.seconds)
        found.copies.append(saved.seconds / copy.seconds)
        seconds, cpu = saved.seconds, saved.cpu
    writing = job.ask(name, "train_on")
    spans, training = zip(*writing.results, strict=True)
    # A job is as slow as its slowest rank.
    found.steps.append(max(spans) / max(quiet.results))
    found.durable.append(seconds + writing.seconds)
    found.cpu.append(cpu + writing.cpu - sum(training))
    measured.add(f"{name}: copy", copy)
    measured.add(f"{name}: step without", replace(quiet, seconds=max(quiet.results)))
    measured.add(f"{name}: step", replace(writing, seconds=max(spans)))
    measured.add(f"{name}: write, beside the training", writing)


def _spread(found: list[float]) -> str:
    return f"{median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
