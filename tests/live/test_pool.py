"""The pool itself: what tests of jobs stand on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.live.pool import Died, JobError, Pool


def sum_of_ranks(start: int) -> int:
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(30)


def never_end() -> None:
    time.sleep(30)


def end_on_rank_0() -> str:
    if dist.get_rank() == 1:
        os._exit(7)
    return "alive"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_job_runs_on_its_ranks_and_each_of_them_answers(gloo: Pool, ranks: int) -> None:
    assert gloo.run(ranks, sum_of_ranks, 10) == [10 * ranks + sum(range(ranks))] * ranks


def test_the_traceback_of_the_rank_that_failed_comes_back(gloo: Pool) -> None:
    with pytest.raises(JobError, match=r"rank 1:\n(.*\n)*ValueError: no luck"):
        gloo.run(3, fail_on_rank_1)
    assert gloo.run(3, sum_of_ranks, 0) == [3] * 3


def test_a_dead_worker_is_named_and_replaced(gloo: Pool) -> None:
    with pytest.raises(JobError, match="rank 1 ended its process with exit code 7"):
        gloo.run(2, die_on_rank_1)
    assert gloo.run(2, end_on_rank_0, may_die=[1]) == ["alive", Died(7)]
    assert gloo.run(2, sum_of_ranks, 0) == [1] * 2


def process_number() -> int:
    return os.getpid()


def test_a_pool_that_was_ended_has_fresh_processes(gloo: Pool) -> None:
    before = gloo.run(2, process_number)
    assert gloo.run(2, process_number) == before
    gloo.end()
    assert not set(gloo.run(2, process_number)) & set(before)


@pytest.mark.long
@pytest.mark.parametrize("folder", ["live", "activation", "parallel/strategies"])
def test_jobs_use_no_memory_that_was_freed(folder: str, tmp_path: Path) -> None:
    """All of them again, with glibc's own checks, and what is freed overwritten at once."""
    checks = {
        "LD_PRELOAD": "libc_malloc_debug.so.0",
        "GLIBC_TUNABLES": "glibc.malloc.check=3",
        "MALLOC_PERTURB_": "165",
    }
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{folder}"]
    result = subprocess.run(
        [*tests, f"--basetemp={tmp_path / 'again'}"],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, **checks},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be preloaded" not in result.stderr
    assert result.returncode == 0, f"{result.stdout[-5000:]}\n{result.stderr[-2000:]}"


def test_a_job_that_hangs_is_ended(gloo: Pool) -> None:
    with pytest.raises(JobError, match=r"rank 0, 1 still ran after 0\.5 s"):
        gloo.run(2, never_end, timeout=0.5)
    assert gloo.run(2, sum_of_ranks, 0) == [1] * 2
