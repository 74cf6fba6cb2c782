"""A bar for notebooks: how far long work is."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Self

from ckptkit.model.document import size_text
from ckptkit.model.pictures import progress_picture

_BETWEEN = 0.2  # seconds


class ProgressBar:
    """Shows in a notebook how far long work is, and how fast; elsewhere it shows nothing.

    What takes `progress` calls it, from any thread, with the bytes that are done; it may be called
    with the bytes of all that is to be done, where these are known::

        with ckptkit.ProgressBar("verify", checkpoint.stored_bytes) as bar:
            ckptkit.verify("runs/7b", progress=bar)
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._begun = self._shown = time.monotonic()
        self._lock = threading.Lock()
        self._handle: Any = None

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if time.monotonic() - self._shown >= _BETWEEN:
                self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._show()

    def __repr__(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-3)
        text = f"{self.label}: {size_text(self.done)}"
        if self.total:
            text += f" of {size_text(self.total)}"
        text += f", {size_text(self.done / seconds)}/s"
        if self.total and 0 < self.done < self.total:
            text += f", {seconds * (self.total / self.done - 1):.0f} s left"
        return text

    def _repr_html_(self) -> str:
        return progress_picture(repr(self), self.done, self.total)

    def _show(self) -> None:
        self._shown = time.monotonic()
        # Where nothing has imported it there is no notebook.
        ipython = sys.modules.get("IPython")
        if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
            return
        if self._handle is None:
            self._handle = ipython.display.display(self, display_id=True)
        else:
            self._handle.update(self)
