from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.programs import ckpt, document


def test_all_steps_are_listed_whether_committed_or_not(run: Path) -> None:
    found = document("ls", run)
    assert found["run"] == str(run)
    assert [(s["step"], s["committed"], s["strategy"]) for s in found["steps"]] == [
        (10, True, "ddp:2,fsdp:2"),
        (20, True, "ddp:2,fsdp:2"),
        (30, False, None),
    ]
    packs = run.glob("step-0000000020/data/*/*.zip")
    assert found["steps"][1]["bytes"] == sum(pack.stat().st_size for pack in packs)
    assert found["steps"][2]["bytes"] == 100


def test_the_columns_are_for_people(run: Path) -> None:
    head, *lines = ckpt("ls", run).stdout.splitlines()
    assert head.split() == ["STEP", "SAVED", "SIZE", "STRATEGY", "STATE"]
    assert [line.split()[0] for line in lines] == ["10", "20", "30"]
    assert lines[1].endswith("KiB  ddp:2,fsdp:2  committed")
    assert lines[2].endswith("100 B  -             not committed")


def test_a_damaged_manifest_is_a_problem_of_its_step_alone(run: Path) -> None:
    (run / "step-0000000010" / "manifest.msgpack").write_bytes(b"\x81\xa6format")
    first, second, _ = document("ls", run)["steps"]
    assert first["committed"]
    assert first["problem"]
    assert second["problem"] is None
    assert f"committed, but: {first['problem']}" in ckpt("ls", run).stdout


def test_a_step_with_an_empty_manifest_is_not_committed(run: Path) -> None:
    (run / "step-0000000020" / "manifest.msgpack").write_bytes(b"")
    assert ckpt("ls", run).stdout.splitlines()[2].endswith("-             not committed")
    assert [s["committed"] for s in document("ls", run)["steps"]] == [True, False, False]
    for command in ("show", "verify"):
        assert "step-0000000010" in ckpt(command, run).stdout
        result = ckpt(command, run / "step-0000000020")
        assert result.exit_code == 4
        assert "an empty manifest" in result.stderr


@pytest.mark.parametrize("command", ["ls", "prune"])
def test_what_is_no_run_is_said_to_be_none(command: str, run: Path, tmp_path: Path) -> None:
    absent = ckpt(command, tmp_path / "nothing")
    assert absent.exit_code == 4
    assert absent.stderr.startswith("error: ")
    step = ckpt(command, run / "step-0000000010")
    assert step.exit_code == 2
    assert "a step, not a run" in step.stderr
    assert "hint: `ckpt show" in step.stderr
