"""ckptkit.live, as it is called within a training loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from statistics import mean

import torch

from benchmarks.floors import Floor
from benchmarks.memory import peak_mib, reset_peak, resident_mib
from benchmarks.training import Training
from ckptkit.live import Checkpointer, load

_SIDE, _PRODUCTS = 512, 4  # of a step: some 20 ms of one core
_QUIET_SECONDS = 1.0
_STEP = 1


class Live:
    """Saves that return when the step is durable, and loads into the model and its optimizer."""

    def __init__(self, training: Training, *, verify: bool = True) -> None:
        self._training = training
        self._verify = verify

    def save(self, folder: Path) -> None:
        """The same step anew: what was there has been deleted."""
        self._save(_checkpointer(folder))

    def load(self, folder: Path) -> None:
        """The newest step, in place."""
        training = self._training
        checkpointer = _checkpointer(folder)
        restored = checkpointer.restore(
            model=training.model, optimizer=training.optimizer, verify=self._verify
        )
        if restored is None or restored.step != _STEP:
            raise RuntimeError(f"loaded {restored}, not step {_STEP}")

    def load_anew(self, folder: Path) -> None:
        """The same without a Checkpointer, and so without anything that one remembers."""
        training = self._training
        load(
            folder / "run",
            model=training.model,
            optimizer=training.optimizer,
            verify=self._verify,
        )

    def _save(self, checkpointer: Checkpointer) -> None:
        training = self._training
        checkpointer.save(_STEP, model=training.model, optimizer=training.optimizer)


class Asynchronous(Live):
    """Saves in the background, what they cost the training, and what a plain copy costs."""

    def __init__(self, training: Training, floor: Floor) -> None:
        super().__init__(training)
        self._floor = floor

    def begin(self, folder: Path) -> None:
        """Make all memory that is not to be made in the measured time."""
        self._copies = [torch.empty_like(tensor) for tensor in self._training.local]
        self._factors = torch.rand(2, _SIDE, _SIDE)
        self._product = torch.empty(_SIDE, _SIDE)
        self.copy(folder)
        self._train()
        gc.collect()
        self._checkpointer = Checkpointer(folder / "run", asynchronous=True)
        self._resident = resident_mib()
        reset_peak()

    def copy(self, _: Path) -> None:
        """Copy the state into memory that has been used before."""
        for copy, tensor in zip(self._copies, self._training.local, strict=True):
            copy.copy_(tensor)

    def save(self, folder: Path) -> None:  # noqa: ARG002  # all actions are called alike
        """What the training waits for."""
        self._save(self._checkpointer)

    def train_on(self, _: Path) -> float:
        """Train until the save is durable; the seconds of a step."""
        return self._train_beside(self._checkpointer.wait)

    def train_on_beside_floor(self, folder: Path) -> float:
        """Train while as many bytes are written by nothing but `pwrite`; the seconds of a step."""
        return self._train_beside(partial(self._floor.save, folder))

    def _train_beside(self, work: Callable[[], None]) -> float:
        with ThreadPoolExecutor(1) as executor:
            writing = executor.submit(work)
            spans = [self._train()]
            while not writing.done():
                spans.append(self._train())
            writing.result()
        # The write ended during the last one.
        return mean(spans[:-1] or spans)

    def train_quietly(self, _: Path) -> float:
        """Train without a save; the seconds of a step."""
        spans = [self._train()]
        while sum(spans) < _QUIET_SECONDS:
            spans.append(self._train())
        return mean(spans)

    def end(self, _: Path) -> tuple[float, float, float]:
        """MiB of the state, of what saves needed besides, and of what is left of that when the
        Checkpointer is closed.
        """
        more = peak_mib() - self._resident
        self._checkpointer.close()
        gc.collect()
        left = resident_mib() - self._resident
        self._copies = []
        return self._training.nbytes / 2**20, more, left

    def _train(self) -> float:
        """One step of fixed work."""
        start = time.monotonic()
        for _ in range(_PRODUCTS):
            torch.mm(self._factors[0], self._factors[1], out=self._product)
        return time.monotonic() - start


@cache
def _checkpointer(folder: Path) -> Checkpointer:
    """One for each run, as a training has: its memory is used again."""
    return Checkpointer(folder / "run")
