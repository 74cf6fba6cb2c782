"""A program that dies at every operation of what it does to a run: one forked child for each, all
from one start.

`python -m tests.checkpoint.dying ROOT MODE WHEN` copies ROOT/base to ROOT/WHEN-1, ROOT/WHEN-2 …
and in each lets a child die at that operation, until one outlives what it does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import ckptkit
from ckptkit import Run
from ckptkit.storage import LocalStore, Store
from tests.checkpoint.saving import save, small_state
from tests.storage.failing import EXIT_CODE, FailingStore

NEW = small_state(2)

# What is done, and to which folder of a run.
ACTIONS: dict[str, tuple[str, Callable[[Store], object]]] = {
    "another": (".", lambda store: save(store, NEW, strategy="fsdp:2", step=2)),
    "overwrite": (
        ".",
        lambda store: save(store, NEW, strategy="fsdp:2", step=1, overwrite=True),
    ),
    "rebuild": ("step-0000000002", ckptkit.rebuild),
    "prune": (".", lambda store: Run(store).prune(keep_last=1, grace=0)),
}


def dies(run: Path, mode: str, number: int, *, after: bool) -> bool:
    """Whether a child that was to die at an operation did, because there were as many."""
    folder, act = ACTIONS[mode]
    child = os.fork()
    if child == 0:
        act(FailingStore(LocalStore(run / folder), fail_at=number, how="exit", after=after))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, EXIT_CODE):
        raise SystemExit(f"the child at operation {number} ended with {code}")
    return code == EXIT_CODE


def main(root: Path, mode: str, when: str) -> None:
    number, died = 0, True
    while died:
        number += 1
        run = root / f"{when}-{number}"
        shutil.copytree(root / "base", run)
        died = dies(run, mode, number, after=when == "after")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
