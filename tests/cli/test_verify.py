from __future__ import annotations

from pathlib import Path

import pytest

import ckptkit
from tests.cli.programs import ckpt, document, flip_a_bit


def test_a_whole_step_is_ok(run: Path) -> None:
    step = run / "step-0000000020"
    found = {"location": str(step), "ok": True, "compared": True, "findings": []}
    assert document("verify", run) == found
    assert ckpt("verify", run).stdout == f"ok: every byte of {step} is as it was written\n"


def test_all_damage_is_listed_and_the_code_is_3(run: Path) -> None:
    step = run / "step-0000000020"
    flip_a_bit(step)
    next(step.glob("data/*/rank-00001.zip")).unlink()
    found = document("verify", run, code=3)
    assert not found["ok"]
    assert {"corrupt", "missing"} <= {finding["kind"] for finding in found["findings"]}
    text = ckpt("verify", run)
    assert text.exit_code == 3
    assert all(finding["what"] in text.stdout for finding in found["findings"])
    assert document("verify", run / "step-0000000010")["ok"]


def test_a_damaged_manifest_is_a_finding(run: Path) -> None:
    (run / "step-0000000020" / "manifest.msgpack").write_bytes(b"not a manifest")
    assert document("verify", run, code=3)["findings"]


def test_what_could_only_not_be_read_is_the_storages_fault(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = ckptkit.Finding("unreadable", "there", "permission denied", "ask")
    monkeypatch.setattr(ckptkit, "verify", lambda *_, **__: [finding])
    assert document("verify", run, code=5)["findings"][0]["hint"] == "ask"
    assert "  hint: ask\n" in ckpt("verify", run).stdout


def test_a_step_that_is_not_committed_is_not_found(run: Path) -> None:
    result = ckpt("verify", run / "step-0000000030")
    assert (result.exit_code, result.stdout) == (4, "")
    assert "not a committed checkpoint" in result.stderr


def test_the_digest_is_that_of_the_state(run: Path) -> None:
    found = document("verify", run, "--digest")["digest"]
    digest = ckptkit.digest(run)
    assert found == {
        "algorithm": "xxh3-128",
        "step": digest.step,
        "arrays": digest.arrays,
        "objects": digest.objects,
    }
    assert ckpt("verify", run, "--digest").stdout.endswith(f"\ndigest: {digest.step}\n")
    assert found == document("verify", run / "step-0000000010", "--digest")["digest"]


def test_another_digest_than_the_recorded_one_is_a_finding(tmp_path: Path) -> None:
    recorded = {"algorithm": "xxh3-128", "step": "0" * 32}
    with ckptkit.Writer(tmp_path, step=1, details={"digest": recorded}) as writer:
        writer.add_object("rate", 0.5)
    found = document("verify", tmp_path, "--digest", code=3)
    assert [finding["kind"] for finding in found["findings"]] == ["mismatch"]
    assert "0" * 32 in found["findings"][0]["what"]
    assert document("verify", tmp_path)["ok"]


def test_what_is_damaged_has_no_digest(run: Path) -> None:
    flip_a_bit(run / "step-0000000020")
    assert document("verify", run, "--digest", code=3)["digest"] is None
    assert "digest" not in ckpt("verify", run, "--digest").stdout
