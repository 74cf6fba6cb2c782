from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from tests.cli.programs import ckpt, document, flip_a_bit

RULES = {
    "rules": [
        {"match": "qkv", "tp": "shard(0, blocks=[4,2,2])"},
        {"match": "w", "tp": "shard(0)"},
        {"match": "*", "tp": "replicate"},
    ]
}


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(RULES))
    return path


def test_a_step_goes_into_another_run_for_another_strategy(
    run: Path, rules: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    result = ckpt("reshard", "--from", "ddp:2,fsdp:2", "--to", "tp:2", "--rules", rules, run, new)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "step-0000000020: ddp:2,fsdp:2 -> tp:2, 6 arrays, " in result.stdout
    assert result.stdout.endswith(" in 2 packs\n")
    assert ckpt("diff", run, new).exit_code == 0
    assert ckptkit.Run(new).steps() == [20]
    again = ckpt("reshard", "--to", "tp:2", "--rules", rules, run, new)
    assert (again.exit_code, "is there already" in again.stdout) == (0, True)
    other = ckpt("reshard", "--to", "fsdp:3", run, new)
    assert (other.exit_code, "--overwrite" in other.stderr) == (2, True)


def test_a_run_that_only_had_to_commit_does_not_say_that_all_was_there(
    run: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    assert ckpt("reshard", "--to", "fsdp:3", run, new).exit_code == 0
    (new / "step-0000000020" / "manifest.msgpack").unlink()
    result = ckpt("reshard", "--to", "fsdp:3", run, new)
    assert (result.exit_code, "is there already" in result.stdout) == (0, False)
    assert "in 3 packs, 3 of them from before" in result.stdout
    assert ckpt("diff", run, new).exit_code == 0


def test_a_result_that_was_damaged_is_not_taken_for_whole(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert ckpt("reshard", "--to", "fsdp:3", run, new).exit_code == 0
    (pack,) = (new / "step-0000000020" / "data").glob("*/rank-00001.zip")
    good = pack.read_bytes()
    for damaged in (None, good[:-5], good[:200] + bytes([good[200] ^ 1]) + good[201:]):
        pack.unlink() if damaged is None else pack.write_bytes(damaged)
        if damaged is None or len(damaged) < len(good):
            again = ckpt("reshard", "--to", "fsdp:3", run, new)
            assert (again.exit_code, "missing or cut off" in again.stderr) == (3, True)
        again = ckpt("reshard", "--to", "fsdp:3", "--overwrite", run, new)
        assert (again.exit_code, "is there already" in again.stdout) == (0, False)
        assert pack.read_bytes() == good
        assert ckpt("verify", new).exit_code == 0


def test_a_damaged_result_of_slices_is_closed_again(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    slices = ("slice:0/2", "slice:1/2")
    for each in slices:
        ckpt("reshard", run, new, "--to", "fsdp:4", "--engine", each)
    assert ckpt("commit", new).exit_code == 0
    for pack in (new / "step-0000000020" / "data").glob("*/rank-0000[13].zip"):
        pack.unlink()
    for each in slices:
        assert ckpt("commit", new, "--step", "20", "--overwrite").exit_code == 4
        again = ckpt("reshard", run, new, "--to", "fsdp:4", "--engine", each, "--overwrite")
        assert again.exit_code == 0
    refused = ckpt("commit", new, "--step", "20")
    assert refused.exit_code == 4
    assert "no packs but those of the committed step" in refused.stderr
    assert ckpt("commit", new, "--step", "20", "--overwrite").exit_code == 0
    assert ckpt("verify", new).exit_code == 0


def test_a_manifest_that_cannot_be_read_is_in_the_way_before_anything_is_written(
    run: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    assert ckpt("reshard", "--to", "fsdp:3", run, new).exit_code == 0
    manifest = new / "step-0000000020" / "manifest.msgpack"
    for data in (b"", b"\xff" + manifest.read_bytes()[1:]):
        manifest.write_bytes(data)
        there = sorted(new.rglob("*"))
        for more in ((), ("--dry-run",)):
            refused = ckpt("reshard", "--to", "fsdp:2", run, new, *more)
            assert (refused.exit_code, "overwrite" in refused.stderr) == (2, True)
        assert sorted(new.rglob("*")) == there
    assert ckpt("reshard", "--to", "fsdp:2", run, new, "--overwrite").exit_code == 0
    assert ckpt("verify", new).exit_code == 0


def test_a_folder_of_data_beside_the_steps_is_no_step(run: Path, tmp_path: Path) -> None:
    (run / "data").mkdir()
    (run / "data" / "words.txt").write_text("a b c")
    (tmp_path / "new" / "data" / "shards").mkdir(parents=True)
    (tmp_path / "new" / "data" / "shards" / "0.bin").write_bytes(b"x")
    assert ckpt("show", run).exit_code == 0
    assert ckpt("reshard", "--to", "fsdp:2", run, tmp_path / "new").exit_code == 0
    assert ckpt("show", tmp_path / "new").exit_code == 0


def test_the_document_says_what_was_done(run: Path, rules: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    plan = document("reshard", run, new, "--to", "tp:2", "--rules", rules, "--dry-run")
    assert not new.exists()
    assert plan["seconds"] > 0
    done = document("reshard", run, new, "--to", "tp:2", "--rules", rules)
    assert (done["committed"], done["finished_packs"]) == (True, [])
    for key in ("arrays", "bytes_written", "requests", "save_id", "bytes_by_rank"):
        assert done[key] == plan[key]


def test_the_id_is_that_of_the_step_with_its_digest(run: Path, tmp_path: Path) -> None:
    plan = document("reshard", run, tmp_path / "new", "--to", "fsdp:3", "--digest", "--dry-run")
    assert (plan["save_id"], plan["finished_packs"]) == (None, [])
    for finished in ([], [0, 1, 2]):
        done = document("reshard", run, tmp_path / "new", "--to", "fsdp:3", "--digest")
        assert done["finished_packs"] == finished
        with ckptkit.open(tmp_path / "new") as checkpoint:
            assert checkpoint.save_id == done["save_id"]


def test_a_dry_run_says_what_is_in_the_way(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert ckpt("reshard", run, new, "--to", "fsdp:3").exit_code == 0
    for place, message in ((new, "committed already"), (run, "place of its source")):
        result = ckpt("reshard", run, place, "--to", "fsdp:2", "--dry-run")
        assert (result.exit_code, message in result.stderr) == (2, True)
    assert ckpt("reshard", run, new, "--to", "fsdp:2", "--dry-run", "--overwrite").exit_code == 0


def test_a_dry_run_shows_the_plan_and_writes_nothing(
    run: Path, rules: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    changes = ["--no-optimizer", "--cast", "w=fp32", "--rename", "^qkv$=>attention.qkv"]
    result = ckpt("reshard", run, new, "--to", "tp:2", "--rules", rules, "--dry-run", *changes)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[:8]] == [
        "from",
        "to",
        "arrays",
        "read",
        "write",
        "packs",
        "memory",
        "time",
    ]
    assert "  model/qkv -> model/attention.qkv" in lines
    assert "  model/w bfloat16 -> float32" in lines
    assert lines[-2:] == ["left out:", "  optimizer/w/exp_avg"]
    assert not new.exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "tp:2,tp:2"], 2, "appears twice"),
        (["--to", "fsdp:2", "--from", "fsdp:2"], 2, "written by ddp:2,fsdp:2, not by fsdp:2"),
        (["--to", "fsdp:2", "--memory", "12"], 2, "too little memory"),
        (["--to", "fsdp:2", "--cast", "bf17"], 2, "write bf16, fp16"),
        (["--to", "fsdp:2", "--rename", "a=b"], 2, "write 'old=>new'"),
        (["--to", "fsdp:2", "--rules", "nosuch"], 2, "nosuch"),
        (["--to", "fsdp:2", "--set", "a"], 2, "a"),
        (["--to", "fsdp:2", "--engine", "dask://127.0.0.1:1"], 6, "no Dask scheduler answers"),
        ([], 2, "missing option"),
    ],
)
def test_what_cannot_be_done_is_said(
    run: Path, tmp_path: Path, options: list[str], code: int, message: str
) -> None:
    result = ckpt("reshard", run, tmp_path / "new", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr.lower() or message in result.stderr
    assert not (tmp_path / "new").exists()


def test_damage_is_named_and_nothing_is_committed(run: Path, tmp_path: Path) -> None:
    flip_a_bit(run / "step-0000000020")
    result = ckpt("reshard", run, tmp_path / "new", "--to", "fsdp:3")
    assert result.exit_code == 3
    assert "has the checksum" in result.stderr
    assert ckpt("ls", tmp_path / "new").exit_code in (0, 4)
    assert not list(tmp_path.glob("new/*/manifest.msgpack"))


def test_slices_are_closed_by_commit(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    first = ckpt("reshard", run, new, "--to", "fsdp:4", "--engine", "slice:0/2")
    assert (first.exit_code, "`ckpt commit` closes the step" in first.stdout) == (0, True)
    early = ckpt("commit", new)
    assert (early.exit_code, "missing are 2 of 4 packs, of the ranks 1, 3" in early.stderr) == (
        4,
        True,
    )
    ckpt("reshard", run, new, "--to", "fsdp:4", "--engine", "slice:1/2")
    found = document("commit", new)
    assert (found["step"], found["strategy"], found["packs"]) == (20, "fsdp:4", 4)
    assert ckpt("diff", run, new).exit_code == 0
    late = ckpt("commit", new)
    assert (late.exit_code, "every step is committed" in late.stderr) == (4, True)


def test_commit_says_it_in_words(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    ckpt("reshard", run, new, "--to", "fsdp:2", "--engine", "slice:0/1")
    assert ckpt("commit", new, "--step", "20").stdout == "step 20 is committed: fsdp:2, 2 packs\n"
    assert ckpt("commit", tmp_path / "none").exit_code == 4
    assert ckpt("commit", new, "--step", "21").exit_code == 4


def test_the_digest_is_recorded_and_survives_a_way_there_and_back(
    run: Path, rules: Path, tmp_path: Path
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    ckpt("reshard", run, there, "--to", "tp:2", "--rules", rules, "--digest")
    ckpt("reshard", there, back, "--to", "ddp:2,fsdp:2", "--digest")
    digests: list[Any] = []
    for place in (there, back):
        with ckptkit.open(place) as checkpoint:
            digests.append(checkpoint.details["digest"])
    assert digests[0] == digests[1]
    assert digests[0]["algorithm"] == "xxh3-128"
    assert ckptkit.digest(run).step == digests[0]["step"]
    assert ckpt("verify", back, "--digest").exit_code == 0
