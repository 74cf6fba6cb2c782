"""What can be launched, and what not."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.errors import UsageError
from ckptkit.parallel.launch import LaunchJob, Outcome


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"program": ()}, "no program to launch"),
        ({"program": ("-m",)}, "no program to launch"),
        ({"nproc_per_node": 0}, "one rank or more"),
        ({"max_restarts": -1}, "never or some times"),
        ({"backend": "tcp"}, "no such backend"),
        ({"nodes": "x"}, "is no number of machines"),
        ({"nodes": "0"}, "is no number of machines"),
        ({"nodes": "4:2"}, "is no number of machines"),
        ({"nodes": "2"}, "need a place to meet.*\nhint: --rdzv-endpoint"),
        ({"nodes": "2", "backend": "mpi", "endpoint": "a:1"}, "for mpirun itself to start"),
    ],
)
def test_what_cannot_be_launched_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        LaunchJob(**{"program": ("train.py",), **given})


def test_machines_are_a_number_or_a_range() -> None:
    assert LaunchJob(("train.py",)).node_range == (1, 1)
    assert LaunchJob(("train.py",), nodes="1:4", endpoint="a:1").node_range == (1, 4)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome(ok=True), "all ranks ended well"),
        (Outcome(ok=False, failed_rank=2, exit_code=3), "rank 2 ended with exit code 3"),
        (
            Outcome(ok=False, failed_rank=0, exit_code=-11),
            "rank 0 was ended by signal 11 (SIGSEGV)",
        ),
        (Outcome(ok=False, exit_code=1), "a rank ended with exit code 1"),
        (Outcome(ok=False), "a rank failed"),
    ],
)
def test_an_outcome_says_its_reason(outcome: Outcome, reason: str) -> None:
    assert outcome.reason == reason
