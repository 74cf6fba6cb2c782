from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.programs import COMMAND, ckpt, environment, process, wait_for


def test_the_demo_does_what_it_says_and_leaves_nothing(tmp_path: Path) -> None:
    done = process("demo", TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("ls", "show", "verify", "unpack", "reshard", "diff", "prune"):
        assert f"\n$ ckpt {name} " in done.stdout
    assert "ok: the flipped bit is found" in done.stdout
    assert "FAILED" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),
        start_new_session=True,
    ) as program:
        wait_for(lambda: any(tmp_path.iterdir()))
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does
        _, err = program.communicate(timeout=300)
    assert (program.returncode, err) == (130, b"interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_in_one_of_its_commands_ends_it(tmp_path: Path) -> None:
    # Which `ckpt reshard` alone imports.
    (tmp_path / "resource.py").write_text(
        "import signal\nRUSAGE_SELF = getrusage = None\nsignal.raise_signal(signal.SIGINT)"
    )
    place = tmp_path / "place"
    place.mkdir()
    done = process("demo", PYTHONPATH=str(tmp_path), TMPDIR=str(place))
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
    assert list(place.iterdir()) == []


def test_a_reader_that_goes_away_while_a_command_runs_ends_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),
    ) as program:
        assert program.stdout
        assert program.stderr
        while not program.stdout.readline().startswith(b"$ ckpt verify "):
            pass
        program.stdout.close()
        assert (program.wait(300), program.stderr.read()) == (141, b"")
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    result = ckpt("demo", tmp_path / "here")
    assert result.exit_code == 6
    assert "rank 0 ended with code 1" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert ckpt("demo", tmp_path).exit_code == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_a_bucket_is_no_place_for_it() -> None:
    result = ckpt("demo", "s3://bucket/demo")
    assert result.exit_code == 2
    assert "not a local folder" in result.stderr
    assert not Path("s3:").exists()
