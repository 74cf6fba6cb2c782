"""A progress bar on stderr, for work that turns out to take longer than a moment."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

PATIENCE = 1.0


class Bar:
    """Counts bytes from any thread; after a second, and if stderr is a terminal, it shows."""

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._done = 0
        self._shown: Progress | None = None
        self._wanted = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def __call__(self, nbytes: int) -> None:
        """Some more bytes are done."""
        with self._lock:
            self._done += nbytes
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], completed=self._done)
            elif self._wanted and time.monotonic() - self._begun > PATIENCE:
                self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._wanted = False
            if self._shown is not None:
                self._shown.stop()

    def _show(self) -> None:
        # Here, because rich takes longer to import than most commands run.
        from rich import progress  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415

        self._shown = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._shown.add_task(self._label, total=self._total or None, completed=self._done)
        self._shown.start()
