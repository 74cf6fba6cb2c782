"""A process that reads checkpoints as an installation without torch does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = """
import sys, pickle, _pickle, traceback
import ckptkit
def refuse(*_): raise SystemExit("a pickle was run")
pickle.Unpickler = pickle.load = pickle.loads = refuse
for place in sys.stdin:
    try:
        with ckptkit.open(place[:-1]) as c:
            sum(array[...].nbytes for array in c.arrays.values())
        assert "torch" not in sys.modules
        print("read", flush=True)
    except BaseException:
        print(repr(traceback.format_exc()), flush=True)
"""


@pytest.fixture(scope="session")
def read_plainly() -> Iterator[Callable[[Path], str]]:
    """Has all of a checkpoint read there, one after another; gives `read`, or what was wrong."""
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:

        def read(place: Path) -> str:
            assert process.stdin is not None
            assert process.stdout is not None
            print(place, file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        yield read
