"""What nobody wrote is refused by one of ckptkit's errors, or read, whatever the format."""

from __future__ import annotations

import subprocess
import sys

import pytest


def fuzz(first: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.foreign.fuzzing", str(first), str(count)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    accepted = int(found.stdout.split()[-2])
    assert count / 20 < accepted < count / 2, "few checkpoints get past the first look"


def test_any_checkpoint_is_refused_or_read() -> None:
    fuzz(0, 200)


@pytest.mark.long
def test_many_checkpoints_are_refused_or_read() -> None:
    fuzz(200, 100_000)
