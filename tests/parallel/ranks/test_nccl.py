"""NCCL, on machines that have GPUs, a rank for each of up to four: the contract of communicators,
ways to spread a model, and strategies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.parallel.ranks.contract import CONTRACT
from tests.parallel.ranks.nccl_job import COMPRESSIONS, KINDS, WAYS

GPUS = min(4, torch.cuda.device_count())
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(GPUS == 0, reason="there is no GPU")


@pytest.fixture(scope="module", params=sorted({1, max(1, GPUS)}))
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What each rank of a job found."""
    folder = tmp_path_factory.mktemp("nccl")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", f"{request.param}"]
    done = subprocess.run(
        [*command, "-m", "tests.parallel.ranks.nccl_job", str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "CKPTKIT_TEST_DEVICE": "cuda",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("way", WAYS)
def test_what_one_way_saves_every_way_loads(told: list[dict[str, str]], way: str) -> None:
    assert [rank[way] for rank in told] == [""] * len(told)


@pytest.mark.parametrize("kind", [*KINDS, *COMPRESSIONS])
def test_a_strategy_trains_as_one_process(told: list[dict[str, str]], kind: str) -> None:
    assert [rank[kind] for rank in told] == [""] * len(told)


@pytest.mark.parametrize("check", CONTRACT)
def test_nccl_keeps_the_contract(told: list[dict[str, str]], check: str) -> None:
    assert [rank[check] for rank in told] == [""] * len(told)
