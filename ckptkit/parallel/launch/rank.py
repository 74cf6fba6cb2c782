"""One rank under mpirun: runs a command and tells the launcher, line by line, what it prints.

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

_NAMES = (
    ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)


def main() -> int:
    """Run the command that the arguments are."""
    told = {name: next((os.environ[v] for v in of if v in os.environ), "") for name, *of in _NAMES}
    told = {name: value for name, value in told.items() if value}
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
