"""What MPI tells each of its ranks, and the program that `ckpt launch` has mpirun start as a rank:
it runs a command as torchrun would, and tells the launcher, line by line, what that prints.

Started by its path, once for each rank, so it stands on the standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import IO

MARK = "\x1e"
"""Before the rank; then, on stderr, an exit code after a second one."""
BREAK = "\x1f"
"""Between the rank and its line."""

_LONGEST = 2**19  # shorter than what the launcher takes apart, which would leave the rest unmarked

# The variables of the rank, the size, the rank on this machine and the size of that; of several the
# first that is set counts.
TORCHRUN = (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
MPI = {
    "Open MPI": (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "MPI (PMI)": (
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
}


def main() -> int:
    """Run the command that the arguments are."""
    told: dict[str, str] = {}
    for variables in MPI.values():
        for (name,), of_mpi in zip(TORCHRUN, variables, strict=True):
            for each in of_mpi:
                if os.environ.get(each):
                    told.setdefault(name, os.environ[each])
    rank = told.get("RANK", "0")
    child = subprocess.Popen(  # noqa: S603 - what the user asked for
        sys.argv[1:],
        env={**os.environ, **told},
        stdin=subprocess.DEVNULL,  # mpirun leaves rank 0 a pipe that never ends
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # mpirun signals all of the group, the child too: this one stays to tell how that ends.
        signal.signal(number, lambda *_: None)
    readers = [
        threading.Thread(target=_tell, args=(rank, source, to), daemon=True)
        for source, to in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))
    ]
    for reader in readers:
        reader.start()
    code = child.wait()
    for reader in readers:
        reader.join(1.0)  # its own children may hold the pipe
    _write(sys.stderr, f"{MARK}{rank}{MARK}{code}\n")
    return code if code >= 0 else 128 - code


def _tell(rank: str, source: IO[bytes], to: IO[str]) -> None:
    while line := source.readline(_LONGEST):
        # Of what was drawn over and over, as progress bars are, the last: a mark would be lost.
        text = line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2]
        _write(to, f"{MARK}{rank}{BREAK}{text}\n")


def _write(to: IO[str], text: str) -> None:
    # In one call: the lines of many ranks go through one pipe.
    os.write(to.fileno(), text.encode(errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
