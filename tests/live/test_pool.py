"""The pool itself: what tests of jobs stand on."""

from __future__ import annotations

import os
import time

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


def test_a_job_that_hangs_is_ended(gloo: Pool) -> None:
    with pytest.raises(JobError, match=r"rank 0, 1 still ran after 0\.5 s"):
        gloo.run(2, never_end, timeout=0.5)
    assert gloo.run(2, sum_of_ranks, 0) == [1] * 2
