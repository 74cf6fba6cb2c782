"""The bounds in pyproject.toml say what is tested: offline, the oldest and the newest of each."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("model", "plan", "format", "storage", "checkpoint", "cli")
# What these files import is not among the base dependencies.
MORE = re.compile(
    r"^\s*(?:import|from) (torch|obstore|boto|dask|distributed|ray|mpi4py|tensorstore|transformers"
    r"|safetensors|setuptools|tests\.(?:live|servers|faults)|ckptkit\.(?:live|parallel|activation))",
    re.MULTILINE,
)
NEED_MORE = (
    *("moto", "rgw", "gcs", "swift", "rclone", "test_web_servers"),
    *("torch", "dask", "test_engines", "test_launch"),
)
TOOLS = r"^(pytest|pytest-xdist|pytest-rerunfailures|hypothesis|jsonschema|cryptography)\b"


def interpreter(version: str) -> str:
    """A Python of this version that starts; skips where there is none."""
    found = shutil.which(f"python{version}")
    # A shim may stand for a version that is not chosen.
    environment = os.environ | {"PYENV_VERSION": _installed(version)}
    command = [found or "", "-c", "import sys; print(sys.executable)"]
    if found is not None:
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if said.returncode == 0:
            return said.stdout.strip()
    pytest.skip(f"there is no python{version} on this machine")


def _installed(version: str) -> str:
    folders = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*")
    return next((folder.name for folder in folders), version)


def run(*command: object) -> str:
    """What a command prints; its end, where it fails."""
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def needed_by_tests() -> list[str]:
    """What the offline tests need besides, as pyproject.toml bounds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = [one for extra in project["optional-dependencies"].values() for one in extra]
    return sorted({one for one in known if re.match(TOOLS, one)})


@pytest.mark.long
@pytest.mark.parametrize("resolution", ["lowest-direct", "highest"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_offline_tests_pass(tmp_path: Path, version: str, resolution: str) -> None:
    python = interpreter(version)
    tools, place = tmp_path / "tools", tmp_path / "place"
    venv.create(tools, with_pip=True)
    run(tools / "bin/pip", "install", "--quiet", "uv")
    run(tools / "bin/uv", "venv", "--quiet", "--python", python, place)
    run(
        *(tools / "bin/uv", "pip", "install", "--quiet", "--python", place / "bin/python"),
        # The oldest that need no compiler.
        *("--resolution", resolution, "--only-binary", ":all:", "--no-binary", "ckptkit"),
        *("-e", ROOT, *needed_by_tests(), "botocore>=1.40"),
    )
    files = [path for folder in FOLDERS for path in (ROOT / "tests" / folder).rglob("test_*.py")]
    offline = [path for path in files if not MORE.search(path.read_text())]
    assert len(offline) > 60
    out = run(
        *(place / "bin/python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"),
        *("-k", " and ".join(f"not {word}" for word in NEED_MORE)),
        *offline,
    )
    assert re.search(r"\d{4} passed", out), out[-3000:]
