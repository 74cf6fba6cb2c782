"""ckptkit.live, as it is called within a training loop."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from benchmarks.training import Training
from ckptkit.live import Checkpointer, load

STEP = 1


class Live:
    """Saves that return when the step is durable, and loads into the model and its optimizer."""

    def __init__(self, training: Training, *, verify: bool = True) -> None:
        self._training = training
        self._verify = verify

    def save(self, folder: Path) -> None:
        """The same step anew: what was there has been deleted."""
        training = self._training
        _checkpointer(folder).save(STEP, model=training.model, optimizer=training.optimizer)

    def load(self, folder: Path) -> None:
        """The newest step, in place."""
        training = self._training
        checkpointer = _checkpointer(folder)
        restored = checkpointer.restore(
            model=training.model, optimizer=training.optimizer, verify=self._verify
        )
        if restored is None or restored.step != STEP:
            raise RuntimeError(f"loaded {restored}, not step {STEP}")

    def load_anew(self, folder: Path) -> None:
        """The same without a Checkpointer, and so without anything that one remembers."""
        training = self._training
        load(
            folder / "run",
            model=training.model,
            optimizer=training.optimizer,
            verify=self._verify,
        )


@cache
def _checkpointer(folder: Path) -> Checkpointer:
    """One for each run, as a training has: its memory is used again."""
    return Checkpointer(folder / "run")
