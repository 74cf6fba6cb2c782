from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from isal import isal_zlib

from tests.cli.programs import ckpt, document, environment
from tests.format.samples import edited, plain, sealed


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
    assert [line.split()[0] for line in lines] == ["10", "20", "30", "total"]
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


def test_a_listing_decodes_no_more_than_it_shows(run: Path) -> None:
    whole = run / "step-0000000010" / "manifest.msgpack"
    before = document("ls", run)["steps"]
    for field in ("arrays", "objects", "chunks", "details", "placements"):
        whole.write_bytes(sealed(edited(plain(whole.read_bytes()), field, [{}] * 100)))
        assert document("ls", run)["steps"] == before
        assert ckpt("show", run / "step-0000000010").exit_code == 3


@pytest.mark.parametrize("packs", [[], [{}] * 100_000, [{}] * 4, {}, [[]] * 5], ids=len)
def test_packs_that_do_not_fit_are_a_problem_of_their_step(run: Path, packs: object) -> None:
    manifest = run / "step-0000000010" / "manifest.msgpack"
    manifest.write_bytes(sealed(edited(plain(manifest.read_bytes()), "packs", packs)))
    first, second, _ = document("ls", run)["steps"]
    assert first["problem"]
    assert second["problem"] is None


def _hole(manifest: Path) -> None:
    with manifest.open("wb") as file:
        file.truncate(4 << 30)


def _hole_with_ends(manifest: Path) -> None:
    good = manifest.read_bytes()
    with manifest.open("r+b") as file:
        file.truncate(700 << 20)
        file.seek(0, os.SEEK_END)
        file.write(good)


def _hole_before_the_checksum(manifest: Path) -> None:
    good = manifest.read_bytes()
    with manifest.open("r+b") as file:
        file.truncate((4 << 30) + 1)
        file.seek(0, os.SEEK_END)
        file.write(good)


def _hole_in_a_value(manifest: Path) -> None:
    """Nothing is wrong with it but that `details` has 1 GiB of zeros."""
    document = plain(manifest.read_bytes())
    size, band = 1 << 30, bytes(1 << 24)
    before, behind = sealed(edited(document, "details", {"x": b"x" * 70_000}))[:-4].split(
        b"x" * 70_000
    )
    before = before[:-4] + size.to_bytes(4, "big")
    crc = isal_zlib.crc32(before)
    for _ in range(0, size, len(band)):
        crc = isal_zlib.crc32(band, crc)
    with manifest.open("wb") as file:
        file.write(before)
        file.seek(size, os.SEEK_CUR)
        file.write(behind + isal_zlib.crc32(behind, crc).to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("made", "commands"),
    [
        (_hole, ["ls", "show"]),
        (_hole_with_ends, ["ls"]),
        (_hole_before_the_checksum, ["show"]),
        (_hole_in_a_value, ["ls", "show", "verify"]),
    ],
)
def test_a_file_with_a_hole_is_a_problem_of_its_step(
    run: Path, made: Callable[[Path], None], commands: list[str]
) -> None:
    made(run / "step-0000000010" / "manifest.msgpack")
    for command in commands:
        found = with_little_memory(command, run if command == "ls" else run / "step-0000000010")
        if command == "ls":
            assert found.returncode == 0, found.stderr
            assert "committed, but: " in found.stdout.splitlines()[1]
            assert found.stdout.splitlines()[2].endswith("committed")
        else:
            assert found.returncode == 3, found.stderr


def with_little_memory(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`ckpt` in a process that can hold 1 GiB."""
    limit = "import resource as r; r.setrlimit(r.RLIMIT_AS, (1 << 30, 1 << 30))"
    code = f"{limit}; from ckptkit.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=300, env=environment()
    )
