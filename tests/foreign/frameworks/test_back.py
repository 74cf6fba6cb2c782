"""What a framework wrote is exported, and the framework itself loads that: to the bit."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from tests.foreign.contract import same
from tests.foreign.frameworks.written import HERE, PYTHON

# What is exported, as what, and which of its tensors the framework then has.
WAYS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "accelerate": ("fsdp2", "hf", ("model/",)),
    "lightning": ("ddp.ckpt", "torch", ("model/",)),
    "megatron": ("reshardable", "dcp", ("model/", "optimizer/")),
    "deepspeed": ("zero3-three", "torch", ("model/",)),
}


@pytest.mark.skipif(PYTHON is None, reason="`make test-frameworks` installs them")
@pytest.mark.parametrize("framework", WAYS)
def test_a_framework_loads_what_was_exported_of_its_own(
    framework: str, written_once: Callable[[str], Path], tmp_path: Path
) -> None:
    name, to_format, groups = WAYS[framework]
    place = written_once(framework) / name
    run, out, found = tmp_path / "run", tmp_path / "out", tmp_path / "found.npz"
    ckptkit.reshard(place, run, to="fsdp:2")
    optimizer = "optimizer/" in groups
    done = ckptkit.export(run, out, to_format=to_format, optimizer=optimizer)
    command = [str(PYTHON), str(HERE / "load_back.py"), framework, str(out), str(found)]
    subprocess.run(command, check=True)
    with ckptkit.open(place) as checkpoint, np.load(found) as loaded:
        wanted: dict[str, Any] = {
            name: checkpoint[name][...]
            for name, array in checkpoint.arrays.items()
            if name.startswith(groups) and array.dtype.name != "int64"
        }
        tied = {f"model/{second}" for second, _ in done.tied}
        assert set(loaded.files) | tied == set(wanted) | tied
        for each, value in wanted.items():
            assert same(loaded[each], value), each
