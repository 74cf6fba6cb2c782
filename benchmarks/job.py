"""Contenders of one job side by side: fresh saves and warm loads, in another order each turn."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from benchmarks.measured import Measured, Taken
from benchmarks.ranks import Ranks
from benchmarks.state import Tensor

_SETTLE = 0.5
_STEP = 8 << 20


class Job:
    """The ranks of one or more hosts, and a folder for each contender."""

    def __init__(
        self, folder: Path, hosts: Sequence[str], world_size: int, tensors: list[Tensor]
    ) -> None:
        self.world_size = world_size
        self._folder = folder
        self._stack = ExitStack()
        ranks = [self._stack.enter_context(Ranks(host, world_size, tensors)) for host in hosts]
        self._by_name = {name: each for each in ranks for name in each.names}

    @property
    def names(self) -> list[str]:
        """All contenders."""
        return list(self._by_name)

    def savers(self) -> list[str]:
        """Those that save in ways of their own."""
        return [n for n in self._by_name if not _has(n, "unchecked", "read floor", "asynchronous")]

    def loaders(self, *, is_cold: bool = False) -> list[str]:
        """Those that load in ways of their own; from the device also around the page cache."""
        unlike = ["write floor", "+ fsync", "thread_count", "asynchronous"]
        unlike += [] if is_cold else ["O_DIRECT"]
        return [name for name in self._by_name if not _has(name, *unlike)]

    def folder_of(self, name: str) -> Path:
        """Where a contender saves; variants of one share what they load, so they share it."""
        first = name.partition(",")[0].partition(":")[0]
        path = self._folder / "".join(c if c.isalnum() else "-" for c in first)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def ask(self, name: str, action: str) -> Taken:
        """Let all ranks do something in the contender's folder."""
        return self._by_name[name].timed(name, action, self.folder_of(name))

    def ask_cold(self, name: str, action: str) -> Taken:
        """The same, when the system has nothing of the folder in memory."""
        _forget(self.folder_of(name))
        return self.ask(name, action)

    def check(self, name: str, source: Path) -> None:
        """Verify that what was saved there is what the ranks had when they began."""
        self._by_name[name].check(name, source)

    def saves(self, names: Sequence[str], repeat: int) -> Measured:
        """Saves by turns, each onto a disk that has nothing on it and nothing else to do."""
        measured = Measured()
        for turn in range(repeat + 1):
            for name in in_turn(names, turn):
                self.clean()
                taken = self.ask(name, "save")
                # The first turn fills buffer pools and allocators; a training run saves many times.
                if turn:
                    measured.add(name, taken)
        self.clean()
        return measured

    def loads(
        self,
        names: Sequence[str],
        repeat: int,
        savers: Job | None = None,
        *,
        is_cold: bool = False,
        often: int = 0,
    ) -> Measured:
        """Loads by turns of what these ranks, or those of another job, saved, from the page cache
        or, cold, from the device; each is verified once. Who is fast may have more turns, as the
        speed of memory changes within seconds.
        """
        measured = Measured()
        saved = savers or self
        sources: dict[str, Path] = {}
        for name in names:
            # The device gives one file faster than another: so the floor reads what ckptkit does.
            source = saved.folder_of("ckptkit" if "O_DIRECT" in name else name)
            if source not in sources.values():
                saved.ask("ckptkit" if "O_DIRECT" in name else name, "save")
            sources[name] = source
            if "floor" not in name:
                self.check(name, source)
        os.sync()
        fast = [name for name in names if "DCP" not in name]
        for turn in range(max(repeat, often)):
            for name in in_turn(names if turn < repeat else fast, turn):
                ranks = self._by_name[name]
                if is_cold:
                    _forget(sources[name])
                else:
                    _recall(sources[name])
                    ranks.timed(name, "load", sources[name])
                measured.add(name, ranks.timed(name, "load", sources[name]))
                # The files of all, beside the ranks of all, are more than the memory of a small
                # machine: what it would drop of one to keep of another is told apart here.
                _forget(sources[name])
        # A floor leaves bytes that mean nothing, and the next save is to be of the state again.
        whole = next(name for name in names if "floor" not in name)
        self.check(whole, sources[whole])
        saved.clean()
        return measured

    def clean(self) -> None:
        """Delete what was saved, and let the disk come to rest."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.sync()
        time.sleep(_SETTLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _forget(folder: Path) -> None:
    """Have the system keep nothing of the files in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _recall(folder: Path) -> None:
    """Have the system keep all of the files in memory."""
    memory = bytearray(_STEP)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(memory):
                    pass


def _has(name: str, *words: str) -> bool:
    return any(word in name for word in words)


def in_turn(names: Sequence[str], turn: int) -> list[str]:
    """Another order each turn, as disks and caches remember who came before."""
    return random.Random(turn).sample(names, len(names))
