"""Ranks that are processes: they save one step together, or none when one of them is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ckptkit
from ckptkit import Run
from tests.checkpoint.saving import assert_holds, files, save, small_state

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4


def run_ranks(tmp_path: Path, timeout: float, *dying: int) -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    started = []
    for rank in range(RANKS):
        arguments = [tmp_path / "run", tmp_path / "barrier", rank, RANKS, timeout, *dying]
        command = [sys.executable, "-m", "tests.checkpoint.rank_process", *map(str, arguments)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, out) for process, out in zip(started, outputs, strict=True)]


def test_processes_save_one_step_together(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 60) == [(0, "")] * RANKS
    assert ckptkit.verify(tmp_path / "run") == []
    with ckptkit.open(tmp_path / "run") as checkpoint:
        assert_holds(checkpoint, small_state())
        assert len(set(checkpoint.objects["pid"])) == RANKS


@pytest.mark.parametrize("dying", [0, 2])
def test_the_death_of_one_is_an_error_on_the_others_and_no_step(tmp_path: Path, dying: int) -> None:
    save(tmp_path / "run", small_state(5), strategy="fsdp:2", step=0)
    before = files(tmp_path / "run")
    ended = run_ranks(tmp_path, 2, dying)
    assert ended.pop(dying) == (-signal.SIGKILL, "")
    for code, output in ended:
        assert code == 3
        assert "rank" in output
        assert "2 s" in output
    assert Run(tmp_path / "run").steps() == [0]
    assert ckptkit.verify(tmp_path / "run") == []
    Run(tmp_path / "run").prune(grace=0)
    assert files(tmp_path / "run") == before
