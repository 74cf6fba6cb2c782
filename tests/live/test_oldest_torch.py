from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["ckptkit.live", "ckptkit.live.restore"])
def test_an_older_torch_is_refused_in_one_sentence(module: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.9.1+cpu'")
    code = f"try: import {module}\nexcept ValueError as error: print(type(error).__name__, error)"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert told.stdout.startswith(
        "UsageError ckptkit.live needs torch 2.11 or newer (got '2.9.1+cpu')"
    )


def test_the_bound_is_that_of_the_package() -> None:
    from ckptkit.live import _OLDEST_TORCH  # noqa: PLC0415 - torch takes long to import

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["torch"] == ["torch>=" + ".".join(map(str, _OLDEST_TORCH))]
