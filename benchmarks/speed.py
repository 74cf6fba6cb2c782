"""Saving and loading, side by side: ckptkit, its peers and the floors."""

from __future__ import annotations

import os
import random
import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Self

from benchmarks.ranks import Ranks
from benchmarks.state import llama, total_bytes
from benchmarks.table import Bar, Section, speed_columns, speeds

_SETTLE = 0.5

DCP_LIMIT = {1: 2.5, 2: 1.8}

_SAVE_NOTES = (
    "Durable (fsync, and a commit where the format has one) unless a row says otherwise.",
    "safetensors and torch.save neither sync nor commit; their files fit this layout only.",
)
_LOAD_NOTES = (
    "Only ckptkit checks what it reads. Each result was once compared with what had been saved.",
)

Samples = dict[str, list[float]]


def save(folder: Path, gib: float, repeat: int, world_size: int) -> Section:
    """A durable save of the whole state by so many processes."""
    tensors = llama(gib)
    samples: Samples = {}
    with _Job(folder, gib, world_size) as job:
        names = job.savers()
        for turn in range(repeat + 1):
            for name in _order(names, turn):
                seconds = job.fresh_save(name)
                # The first turn fills buffer pools and allocators; a training run saves many times.
                if turn:
                    samples.setdefault(name, []).append(seconds)
    floor, rows = _with_best_floor(samples, "write floor")
    best, ours, dcp = (median(samples[name]) for name in (floor, "ckptkit", "DCP"))
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    size = total_bytes(tensors)
    return Section(
        f"Save, {processes}: {size / 1e9:.2f} GB, {len(tensors)} tensors",
        speed_columns(floor),
        speeds(rows, size, floor),
        [
            Bar(f"durable save, {processes}: speed / O_DIRECT floor", best / ours, 0.85),
            Bar(f"durable save, {processes}: speed / DCP", dcp / ours, DCP_LIMIT[world_size]),
        ],
        _SAVE_NOTES,
        samples,
    )


def load(folder: Path, gib: float, repeat: int, world_size: int) -> Section:
    """A load of everything into existing buffers, from the page cache."""
    tensors = llama(gib)
    samples: Samples = {}
    with _Job(folder, gib, world_size) as job:
        names = job.loaders()
        for name in names:
            job.ranks_of(name).timed(name, "save", job.folder_of(name))
            if "floor" not in name:
                job.ranks_of(name).check(name, job.folder_of(name))
        os.sync()
        for turn in range(repeat):
            for name in _order(names, turn):
                samples.setdefault(name, []).append(job.warm_load(name))
    floor, rows = _with_best_floor(samples, "read floor")
    best, dcp = median(rows[floor]), median(samples["DCP"])
    checked, unchecked = median(samples["ckptkit"]), median(samples["ckptkit, unchecked"])
    processes = "1 process" if world_size == 1 else f"{world_size} processes"
    bars = [
        Bar(f"warm load, {processes}: unchecked speed / preadv floor", best / unchecked, 0.9),
        Bar(f"warm load, {processes}: CRC-checked speed / preadv floor", best / checked, 0.65),
    ]
    if world_size == 1:
        bars.append(Bar(f"warm load, {processes}: CRC-checked speed / DCP", dcp / checked, 4))
    size = total_bytes(tensors)
    return Section(
        f"Load warm into existing buffers, {processes}: {size / 1e9:.2f} GB",
        speed_columns(floor),
        speeds(rows, size, floor),
        bars,
        _LOAD_NOTES,
        samples,
    )


def _order(names: list[str], turn: int) -> list[str]:
    """Another order each turn, as disks and caches remember who came before."""
    return random.Random(turn).sample(names, len(names))


class _Job:
    """The ranks of both kinds and a folder for each contender."""

    def __init__(self, folder: Path, gib: float, world_size: int) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._ranks = [
            self._stack.enter_context(Ranks(host, world_size, llama(gib), folder))
            for host in ("light", "torch")
        ]
        self._by_name = {name: ranks for ranks in self._ranks for name in ranks.names}

    def savers(self) -> list[str]:
        """Those that save in ways of their own."""
        return [n for n in self._by_name if n != "ckptkit, unchecked" and "read floor" not in n]

    def loaders(self) -> list[str]:
        """Those that load in ways of their own."""
        unlike = ("write floor", "+ fsync", "thread_count")
        return [name for name in self._by_name if not any(word in name for word in unlike)]

    def ranks_of(self, name: str) -> Ranks:
        """The processes that a contender lives in."""
        return self._by_name[name]

    def folder_of(self, name: str) -> Path:
        """A contender's folder, made where it is missing."""
        path = self._folder / "".join(c if c.isalnum() else "-" for c in name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def fresh_save(self, name: str) -> float:
        """One save onto a disk that has nothing else to do."""
        self._clean()
        target = self.folder_of(name)
        os.sync()
        time.sleep(_SETTLE)
        return self._by_name[name].timed(name, "save", target)

    def warm_load(self, name: str) -> float:
        """One load right after another one."""
        ranks, source = self._by_name[name], self.folder_of(name)
        ranks.timed(name, "load", source)
        return ranks.timed(name, "load", source)

    def _clean(self) -> None:
        for name in self._by_name:
            shutil.rmtree(self.folder_of(name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._clean()


def _with_best_floor(samples: Samples, prefix: str) -> tuple[str, Samples]:
    """The name of the fastest variant of a floor, and the samples without its others."""
    floors = {name: seconds for name, seconds in samples.items() if name.startswith(prefix)}
    best = min(floors, key=lambda name: median(floors[name]))
    return best, {n: s for n, s in samples.items() if n == best or n not in floors}
