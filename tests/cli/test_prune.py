from __future__ import annotations

from pathlib import Path

from tests.cli.programs import ckpt, document


def test_a_dry_run_only_says_what_would_go(run: Path) -> None:
    found = document("prune", run, "--keep-last", "1", "--grace", "0", "--dry-run")
    assert [(gone["kind"], gone["step"]) for gone in found["removed"]] == [
        ("step", 10),
        ("orphan", 30),
    ]
    assert (found["dry_run"], found["kept"]) == (True, [20])
    assert found["bytes"] == sum(gone["bytes"] for gone in found["removed"])
    assert [step["step"] for step in document("ls", run)["steps"]] == [10, 20, 30]


def test_what_retention_does_not_keep_is_deleted(run: Path) -> None:
    found = document("prune", run, "--keep-every", "20")
    assert (found["dry_run"], found["kept"]) == (False, [20])
    # Step 30 is younger than the grace of an hour: it may be a save under way.
    assert [step["step"] for step in document("ls", run)["steps"]] == [20, 30]
    assert document("verify", run)["ok"]


def test_without_retention_all_committed_steps_stay(run: Path) -> None:
    result = ckpt("prune", run, "--grace", "0")
    assert "never committed, of step  30  100 B  20260101T000000Z-abc" in result.stdout
    assert result.stdout.endswith("freed 100 B; kept: 2 steps\n")


def test_what_a_killed_commit_left_is_deleted(run: Path) -> None:
    step = run / "step-0000000020"
    (step / "manifest.msgpack").write_bytes(b"")
    (run / "step-0000000010" / ".tmp-0123456789abcdef").write_bytes(b"half a manifest")
    removed = document("prune", run, "--grace", "0", "--dry-run")["removed"]
    found = [(gone["kind"], gone["step"], gone["name"][:9], gone["files"]) for gone in removed]
    assert found == [
        ("leftover", 10, ".tmp-0123", 1),
        ("orphan", 20, "step-0000", 1),
        ("orphan", 20, next((step / "data").iterdir()).name[:9], 4),
        ("orphan", 30, "20260101T", 1),
    ]
    lines = ckpt("prune", run, "--grace", "0").stdout.splitlines()
    assert lines[0].split() == [
        "unfinished",
        "file,",
        "of",
        "step",
        "10",
        "15",
        "B",
        found[0][2] + "456789abcdef",
    ]
    assert lines[1].split()[-4:] == ["20", "0", "B", "step-0000000020"]
    assert document("prune", run, "--grace", "0")["removed"] == []
    assert [s["step"] for s in document("ls", run)["steps"]] == [10]
    assert document("verify", run)["ok"]


def test_nothing_to_delete_is_no_failure(run: Path) -> None:
    result = ckpt("prune", run, "--grace", "0")
    result = ckpt("prune", run, "--grace", "0")
    assert (result.exit_code, result.stdout) == (0, "freed 0 B; kept: 2 steps\n")


def test_what_is_too_young_to_go_is_counted(run: Path) -> None:
    told = "freed 0 B; kept: 2 steps\nleft alone, as younger than --grace: 1 leftover\n"
    assert ckpt("prune", run).stdout == told
    assert document("prune", run)["young"] == 1
    assert document("prune", run, "--grace", "0")["young"] == 0


def test_a_grace_that_means_nothing_deletes_nothing(run: Path) -> None:
    result = ckpt("prune", run, "--keep-last", "1", "--grace", "soon")
    assert result.exit_code == 2
    assert "write 90s, 30m, 1h or 2d" in result.stderr
    assert ckpt("prune", run, "--keep-last", "0").exit_code == 2
    assert len(document("ls", run)["steps"]) == 3


def test_what_others_have_in_folders_called_as_steps_stays(run: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain" / "step-0000000020"
    assert ckpt("unpack", run / "step-0000000020", plain).exit_code == 0
    theirs = tmp_path / "plain" / "step-0000002000"
    (theirs / "data" / "shard0").mkdir(parents=True)
    (theirs / "data" / "shard0" / "x.bin").write_bytes(b"x")
    (plain / "data" / "positions").mkdir(parents=True)
    (plain / "data" / "positions" / "zarr.json").write_text("{}")
    there = sorted((tmp_path / "plain").rglob("*"))
    pruned = ckpt("prune", tmp_path / "plain", "--grace", "0")
    assert (pruned.exit_code, "never committed" in pruned.stdout) == (0, False)
    assert sorted((tmp_path / "plain").rglob("*")) == there


def test_an_unfinished_file_of_the_run_itself_is_deleted(run: Path) -> None:
    (run / ".tmp-0123456789abcdef").write_bytes(b"half")
    assert document("prune", run)["young"] == 2
    removed = document("prune", run, "--grace", "0", "--dry-run")["removed"]
    assert [(gone["kind"], gone["step"]) for gone in removed] == [
        ("leftover", None),
        ("orphan", 30),
    ]
    lines = ckpt("prune", run, "--grace", "0").stdout.splitlines()
    assert lines[0].split("  ")[0] == "unfinished file, of the run"
    assert not (run / ".tmp-0123456789abcdef").exists()
