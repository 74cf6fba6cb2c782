"""What can be launched, and what not."""

from __future__ import annotations

import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

import ckptkit.parallel.launch as launching
from ckptkit.errors import PeerError, UsageError
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
        ({"endpoint": "a:x"}, "no place to meet.*\nhint: --rdzv-endpoint"),
        ({"endpoint": "a:65536"}, "no place to meet"),
        ({"endpoint": ":29400"}, "no place to meet"),
        ({"nodes": "2", "backend": "mpi", "endpoint": "a:1"}, "for mpirun itself to start"),
    ],
)
def test_what_cannot_be_launched_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        LaunchJob(**{"program": ("train.py",), **given})


def test_machines_are_a_number_or_a_range() -> None:
    assert LaunchJob(("train.py",)).node_range == (1, 1)
    assert LaunchJob(("train.py",), nodes="1:4", endpoint="a:1").node_range == (1, 4)


def test_a_place_where_nobody_answers_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    impatient = partial(RendezvousParameters, read_timeout=1, is_host="false")
    monkeypatch.setattr(launching, "RendezvousParameters", impatient)
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    job = LaunchJob((str(script),), nodes="2", endpoint=place)
    with pytest.raises(PeerError, match=f"{place}: the machines cannot meet: .*\nhint: "):
        launching.launch(job, lambda *_: None)


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


FAILS_AT_FIRST = """
import os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        time.sleep(1)
        sys.exit(4)
    time.sleep(100)
print("well", os.environ["RANK"])
"""
# A launcher that never looks at the ranks between a failure and the agent's own look.
LAUNCHER = """
import sys, time
import ckptkit.parallel.launch as launching
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

looks = LocalElasticAgent._monitor_workers
def looks_until_it_sees(agent, group):
    while (result := looks(agent, group)).state == WorkerState.HEALTHY:
        time.sleep(0.02)
    return result
LocalElasticAgent._monitor_workers = looks_until_it_sees
job = launching.LaunchJob((sys.argv[1],), nproc_per_node=2, max_restarts=1)
print(launching.launch(job, lambda _, line: print(line)))
# And one whose watchers never see a rank end, as the agent has reaped it before.
launching._tell_the_end = lambda *_: None
print(launching.launch(job, lambda _, line: print(line)))
"""


def test_a_failure_that_the_agent_sees_first_is_told_before_the_ranks_start_again(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_AT_FIRST)
    command = [sys.executable, "-c", LAUNCHER, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    for first, *rest, outcome in (lines[:4], lines[4:]):  # watched, and reaped
        assert first == "rank 1 ended with exit code 4, before any other rank failed:"
        assert sorted(rest) == ["[rank 0] well 0", "[rank 1] well 1"]
        assert outcome == str(Outcome(ok=True, restarts=1))


SAVES_AT_ITS_END = """
import os, signal, sys, time
def save(*_):
    print("saving")
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    print("saved")
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("up")
while True:
    time.sleep(1)
"""
# A launcher that leaves no time to ranks beside one that has failed.
IMPATIENT = """
import sys
import ckptkit.parallel.launch as launching
launching._GRACE = 0.0
launching.launch(launching.LaunchJob(tuple(sys.argv[1:])), lambda _, line: print(line, flush=True))
"""


def test_ranks_save_before_they_leave_when_the_launcher_is_asked_to_end(tmp_path: Path) -> None:
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(SAVES_AT_ITS_END)
    command = [sys.executable, "-c", IMPATIENT, str(script), str(told)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "[rank 0] up\n"
        launcher.terminate()
        assert launcher.stdout.readline() == "[rank 0] saving\n"
        told.touch()
        assert launcher.stdout.read() == "[rank 0] saved\n"
