"""The run that a plugin saves into, as its caller names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.checkpoint.places import Place
from ckptkit.live import Checkpointer


@contextmanager
def opened(checkpoints: Checkpointer | Place) -> Iterator[Checkpointer]:
    """A Checkpointer, the caller's own or one for the location that it gave."""
    if isinstance(checkpoints, Checkpointer):
        yield checkpoints
        return
    with Checkpointer(checkpoints) as mine:
        yield mine
