"""The Makefile: what it sets up, it sets up once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = "tests/foreign/frameworks/requirements.txt"

# Makes environments that hold nothing but itself, and sees whether it is alone when it installs.
PYTHON = """#!/bin/sh
case "$*" in
*"-m venv"*)
  for place; do :; done
  mkdir -p "$place/bin" && \
  for name in python ckpt pip pytest; do cp "$0" "$place/bin/$name"; done ;;
*install*)
  mkdir installing || exit 1
  sleep 0.5
  echo "$*" >>installed
  rmdir installing ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree of the Makefile and what it looks at, with a Python of its own."""
    for name in ("Makefile", "pyproject.toml", REQUIREMENTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(tree: Path, goal: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("M")}
    command = ["make", goal, f"PYTHON={tree}/python"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tree, env=kept, text=True, stdout=pipe, stderr=pipe)


def outputs(*makes: subprocess.Popen[str]) -> list[str]:
    """What they print, after they ended well."""
    found = [running.communicate(timeout=300) for running in makes]
    assert [running.returncode for running in makes] == [0] * len(makes), found
    return [out for out, _ in found]


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.skipif(not shutil.which("flock"), reason="without flock nobody takes turns")
def test_of_two_at_once_one_sets_up_and_the_other_finds_it_done(tree: Path) -> None:
    outputs(make(tree, "demo"), make(tree, "demo"))
    installed = [line.rpartition(" ")[2] for line in (tree / "installed").read_text().splitlines()]
    assert [re.split("[=>]", name)[0] for name in installed] == ["pip", ".", "torch"]


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_what_is_set_up_is_not_set_up_again(tree: Path) -> None:
    first, second = (outputs(make(tree, "demo"))[0] for _ in range(2))
    assert "install --no-compile -e ." in first
    assert second == ".venv/bin/ckpt demo\n.venv/bin/python examples/kill_and_resume.py\n"


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
def test_other_frameworks_get_an_environment_of_their_own_once(tree: Path) -> None:
    first, second = (outputs(make(tree, "test-frameworks"))[0] for _ in range(2))
    into = f".venv/frameworks/bin/pip install --no-build-isolation -e . -r {REQUIREMENTS}\n"
    assert into in first
    python = tree / ".venv/frameworks/bin/python"  # whole: programs run it in other folders
    variables = f"CKPTKIT_FRAMEWORKS={python} PYTHONDONTWRITEBYTECODE="
    assert second.startswith(f"{variables} .venv/bin/pytest tests/foreign/frameworks")
    assert REQUIREMENTS not in second
    # Where others are asked for they are made anew, and what is beside them is not.
    os.utime(tree / ".venv" / "frameworks.stamp", (0, 0))
    third = outputs(make(tree, "test-frameworks"))[0]
    assert into in third
    assert "--no-compile" not in third
