from __future__ import annotations

from pathlib import Path

import pytest

import ckptkit
from tests.cli.programs import ckpt, document, flip_a_bit


def test_a_whole_step_is_ok(run: Path) -> None:
    step = run / "step-0000000020"
    assert document("verify", run) == {"location": str(step), "ok": True, "findings": []}
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
