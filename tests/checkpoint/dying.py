"""A program that dies at every operation of a save: one forked child for each, all from one start.

`python -m tests.checkpoint.dying ROOT MODE WHEN` copies ROOT/base to ROOT/WHEN-1, ROOT/WHEN-2 …
and in each lets a child die at that operation, until one outlives its save.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ckptkit.storage import FailingStore, LocalStore
from ckptkit.storage.failing import EXIT_CODE
from tests.checkpoint.saving import save, small_state

NEW = small_state(2)


def die_in_save(run: Path, number: int, *, overwrite: bool, after: bool) -> bool:
    """Whether a child that was to die at an operation did, because its save had as many."""
    child = os.fork()
    if child == 0:
        store = FailingStore(LocalStore(run), fail_at=number, how="exit", after=after)
        save(store, NEW, strategy="fsdp:2", step=1 if overwrite else 2, overwrite=overwrite)
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
        died = die_in_save(run, number, overwrite=mode == "overwrite", after=when == "after")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
