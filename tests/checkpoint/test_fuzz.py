"""What nobody wrote, with the right checksum, is refused by one of ckptkit's errors or is read."""

from __future__ import annotations

import subprocess
import sys

import pytest


def fuzz(first: int, count: int) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.fuzzing", str(first), str(count)]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    accepted = int(found.stdout.split()[-2])
    assert count / 10 < accepted < count / 2, "few documents get past the first look"


def test_any_document_is_refused_or_read() -> None:
    fuzz(0, 400)


@pytest.mark.long
def test_many_documents_are_refused_or_read() -> None:
    fuzz(400, 50_000)
