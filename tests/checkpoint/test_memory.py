"""What a save needs besides the state itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
STATE_BYTES = 600 * 10**6

SAVE = """
import re, sys
from pathlib import Path
import numpy as np
from ckptkit import Writer

def kilobytes(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

size = int(sys.argv[2]) // 10
state = {f"model/{number}": np.full(size, number, "u1") for number in range(10)}
with Writer(sys.argv[1], step=1) as writer:
    for name, values in state.items():
        writer.add(name, values.reshape(-1, 1000), role="param")
    before = kilobytes("VmRSS")
print((kilobytes("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc to ask")
def test_a_save_needs_little_more_memory_than_the_state(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE, str(tmp_path), str(STATE_BYTES)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout) <= 256 * MIB
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.zip")) >= STATE_BYTES
