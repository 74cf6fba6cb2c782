"""`ckpt` in tests: in this process, or as a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from ckptkit.cli import main
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

import ckptkit

COMMAND = (sys.executable, "-m", "ckptkit.cli")
IMPATIENT = "from ckptkit.cli import main, output; output.PATIENCE = 0.1; main()"


def ckpt(*arguments: object) -> Result:
    """Run it here."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def document(*arguments: object, code: int = 0) -> dict[str, Any]:
    """What `--json` prints: one document on one line, as its schema says."""
    result = ckpt(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (code, "")
    assert result.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(result.stdout)
    schema = json.loads(
        files("ckptkit.schemas").joinpath(f"cli/{arguments[0]}.schema.json").read_text()
    )
    Draft202012Validator(schema).validate(found)
    return found


def process(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run it as users do."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def environment(**variables: str) -> dict[str, str]:
    """The one of the tests, without what would change how things look."""
    looks = ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "CKPTKIT_DEBUG")
    kept = {name: value for name, value in os.environ.items() if name not in looks}
    return {**kept, "TERM": "xterm-256color", **variables}


def flip_a_bit(step: Path, rank: int = 0) -> None:
    """Damage the first chunk of a pack."""
    with ckptkit.open(step) as checkpoint:
        manifest = checkpoint.manifest
        at = int(manifest.offset[manifest.pack == rank].min())
    (pack,) = step.glob(f"data/*/rank-{rank:05d}.zip")
    data = bytearray(pack.read_bytes())
    data[at] ^= 1
    pack.write_bytes(data)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until something is so, or a minute has passed."""
    for _ in range(12000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen within a minute")
