"""Saves beside a training loop, ours and DCP's: what each asks of the training, and what a plain
copy of the state asks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from benchmarks.floors import Floor
from benchmarks.loop import STEP, Live
from benchmarks.memory import anonymous_mib, give_back, peak_mib, reset_peak, resident_mib
from benchmarks.peers import Dcp
from benchmarks.training import Training
from ckptkit.live import Checkpointer

_SIDE, _PRODUCTS = 512, 4  # of a step: some 20 ms of one core
_QUIET_SECONDS = 0.5
_SAMPLED_EVERY = 0.01


class Saver(Protocol):
    """One way to save in the background."""

    has_process: bool

    def save(self, folder: Path) -> None:
        """Return when the state may change."""

    def wait(self) -> None:
        """Return when the save is durable."""

    def close(self) -> None:
        """Free what one save leaves to the next; the next makes it again."""

    def load(self, folder: Path) -> None:
        """What was saved, in place."""


class Ours(Live):
    """A Checkpointer that is `asynchronous`."""

    has_process = False
    _checkpointer: Checkpointer | None = None

    def save(self, folder: Path) -> None:
        """What the training waits for."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(folder / "run", asynchronous=True)
        training = self._training
        self._checkpointer.save(STEP, model=training.model, optimizer=training.optimizer)

    def wait(self) -> None:
        """The background."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Free the memory."""
        if self._checkpointer is not None:
            self._checkpointer.close()
        self._checkpointer = None


@dataclass(slots=True)
class DcpAsync:
    """`async_save`, by a thread or a process; with `keeps` into memory that the next save uses
    again, which is the other process's too where there is one.
    """

    tensors: dict[str, torch.Tensor]
    has_process: bool = False
    keeps: bool = False
    _stager: DefaultStager | None = None
    _future: Future[Any] | None = field(default=None, init=False)

    def save(self, folder: Path) -> None:
        """What the training waits for."""
        if self.keeps and self._stager is None:
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.has_process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
            self._stager = DefaultStager(options)
        kind = AsyncCheckpointerType.PROCESS if self.has_process else AsyncCheckpointerType.THREAD
        # The processes find each other by it.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        answer: Any = async_save(
            dict(self.tensors),
            storage_writer=FileSystemWriter(folder / "dcp"),
            async_checkpointer_type=kind,
            async_stager=self._stager,
        )
        self._future = answer

    def wait(self) -> None:
        """Its future."""
        if self._future is not None:
            self._future.result()
        self._future = None

    def close(self) -> None:
        """Free the staging memory."""
        if self._stager is not None:
            self._stager.close()
        self._stager = None

    def load(self, folder: Path) -> None:
        """As what DCP saves in the foreground."""
        Dcp(self.tensors).load(folder)


class Loop:
    """A training loop: its steps, and a copy of its state into memory that has been used before."""

    def __init__(self, training: Training, floor: Floor) -> None:
        self._training = training
        self.save, self.load = floor.save, floor.load

    def begin(self, folder: Path) -> None:
        """Make all memory that is not to be made in the measured time."""
        self._copies = [torch.empty_like(tensor) for tensor in self._training.local]
        self.copy(folder)

    def end(self, _: Path) -> float:
        """MiB of the state."""
        self._copies = []
        return self._training.nbytes / 2**20

    def copy(self, _: Path) -> None:
        """Copy the state."""
        for copy, tensor in zip(self._copies, self._training.local, strict=True):
            copy.copy_(tensor)

    def train(self, _: Path) -> float:
        """Train without a save; the seconds of a step."""
        spans: list[float] = []
        with _steps() as step:
            while sum(spans) < _QUIET_SECONDS:
                spans.append(step())
        return mean(spans)

    def train_on(self, folder: Path) -> tuple[float, float]:
        """Train while as many bytes are written by nothing but `pwrite`: as of a saver."""
        return _trained_beside(partial(self.save, folder))


class Asynchronous:
    """One saver beside the training."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.load = saver.load

    def save(self, folder: Path) -> None:
        """What the training waits for."""
        self._saver.save(folder)

    def train_on(self, _: Path) -> tuple[float, float]:
        """Train until the save is durable; the seconds of a step, and the processor seconds of all
        steps.
        """
        return _trained_beside(self._saver.wait)

    def first(self, folder: Path) -> float:
        """Save for the first time, and free what is kept for more; the most MiB that took."""
        give_back()
        before = resident_mib()
        reset_peak()
        done, others = threading.Event(), [0.0]

        def sample() -> None:
            while not done.wait(_SAMPLED_EVERY):
                others.append(sum(anonymous_mib(child.pid) for child in active_children()))

        with ThreadPoolExecutor(1) as executor:
            if self._saver.has_process:
                executor.submit(sample)
            try:
                self._saver.save(folder)
                self._saver.wait()
            finally:
                done.set()
        more = peak_mib() - before + max(others)
        self.close(folder)
        return more

    def close(self, _: Path) -> None:
        """Free what is kept."""
        self._saver.close()
        give_back()


def savers(training: Training) -> dict[str, Saver]:
    """All that are compared."""
    tensors = training.tensors
    return {
        "ckptkit": Ours(training),
        "DCP": DcpAsync(tensors),
        "DCP, memory kept": DcpAsync(tensors, keeps=True),
        "DCP, process": DcpAsync(tensors, has_process=True),
        "DCP, process, memory kept": DcpAsync(tensors, has_process=True, keeps=True),
    }


def _trained_beside(work: Callable[[], None]) -> tuple[float, float]:
    with ThreadPoolExecutor(1) as executor, _steps() as step:
        writing = executor.submit(work)
        start = time.thread_time()
        spans = [step()]
        while not writing.done():
            spans.append(step())
        spent = time.thread_time() - start
        writing.result()
    # The write ended during the last one.
    return mean(spans[:-1] or spans), spent


@contextmanager
def _steps() -> Iterator[Callable[[], float]]:
    """A step of fixed work, of one thread, so that its processor seconds can be told apart."""
    factors, product = torch.rand(2, _SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def step() -> float:
        start = time.monotonic()
        for _ in range(_PRODUCTS):
            torch.mm(factors[0], factors[1], out=product)
        return time.monotonic() - start

    try:
        yield step
    finally:
        torch.set_num_threads(threads)
