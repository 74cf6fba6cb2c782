"""A program that is one rank of a save: real processes, meeting at files.

`python -m tests.checkpoint.rank_process RUN BARRIER RANK RANKS TIMEOUT [DYING RANK]`
prints the error it raises, if any, and ends with 3 then. The dying rank kills itself while it
writes.
"""

from __future__ import annotations

import os
import signal
import sys

from ckptkit import FileBarrier, PerRank, Writer
from ckptkit.errors import PeerError
from tests.checkpoint.saving import add, small_state


def die(count: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(run: str, folder: str, rank: int, ranks: int, timeout: float, dying: int) -> int:
    # So that only what happens in the save counts against its time-out, not the start.
    FileBarrier(f"{folder}/ready", rank, ranks, 60).wait()
    barrier = FileBarrier(f"{folder}/save", rank, ranks, timeout)
    progress = die if rank == dying else None
    try:
        with Writer(
            run, step=1, strategy=f"fsdp:{ranks}", rank=rank, barrier=barrier, progress=progress
        ) as writer:
            for name, tensor in small_state().items():
                add(writer, name, tensor)
            writer.add_object("pid", PerRank(os.getpid()))
    except PeerError as error:
        print(error)  # noqa: T201 — a program, read by its test
        return 3
    return 0


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[3:5]]
    dying = int(sys.argv[6]) if len(sys.argv) > 6 else -1
    sys.exit(main(sys.argv[1], sys.argv[2], numbers[0], numbers[1], float(sys.argv[5]), dying))
