"""What commands print, to the letter: sessions in `golden/`, piped and in terminals of some widths.

`CKPTKIT_GOLDEN=write pytest tests/cli/test_golden.py` writes the outputs anew.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from ckptkit.cli import main, output
from click.testing import CliRunner

from ckptkit import PerRank, Sum, Writer
from tests.checkpoint.saving import Tensor, add, save_by

SESSIONS = sorted((Path(__file__).parent / "golden").glob("*.txt"))
LAYERS = 12
VARYING = {
    r"\d{4}-\d\d-\d\dT[\d:]{8}Z": "2026-01-02T03:04:05Z",
    r"\d{8}T\d{6}Z-[0-9a-f]{12}": "20260102T030405Z-0123456789ab",
    r"[\d.]+ s, [\d.]+ \w+/s; the process had [\d.]+ \w+": "0.1 s, 1 MiB/s; the process had 1 MiB",
    r"at most [\d.]+ \w+, \d+ workers": "at most 1.0 GiB, 4 workers",
    r"about [\d.]+ s, by": "about 0.1 s, by",
    r"ckptkit \d+\.\d+\.\d+\S*": "ckptkit 1.2.3",
}


def tensors(rng: np.random.Generator) -> dict[str, Tensor]:
    """A model of some layers, the second half of which has wider projections."""
    found = {"embed.weight": Tensor(rng.random((64, 16), np.float32), {"fsdp": "shard(0)"})}
    for layer in range(LAYERS):
        shapes = {"attn.q_proj": (16, 16), "mlp.up_proj": (48 if layer < 6 else 64, 16)}
        for name, shape in shapes.items():
            values = rng.random(shape, np.float32)
            found[f"layers.{layer}.{name}.weight"] = Tensor(values, {"fsdp": "shard(0)"})
        found[f"layers.{layer}.norm.weight"] = Tensor(rng.random(16).astype("float16"))
    return found


def save(run: Path, strategy: str, step: int, *, changed: bool = False) -> None:
    def fill(writer: Writer) -> None:
        rng = np.random.default_rng(0)
        for name, tensor in tensors(rng).items():
            whole = tensor.whole.copy()
            if changed and "q_proj" in name:
                whole[0, :3] += int(name.split(".")[1]) % 5 / 4
            if changed and "norm" in name:
                whole = whole.astype("float32")
            add(writer, f"model/{name}", Tensor(whole, tensor.placements), role="param")
            if not changed:
                moment = Tensor(tensor.whole * 0, tensor.placements)
                own = f"model/{name}"
                add(writer, f"optimizer/{name}/exp_avg", moment, role="optimizer", of=own)
        writer.add_alias("model/head.weight", "model/embed.weight")
        writer.add_object("rate", 0.25 if changed else 0.5)
        writer.add_object("tokens", Sum(10))
        writer.add_object("seed", PerRank(b"\x00\x01"))
        writer.add_object("evil", "\x1b[2J fsdp:8")

    save_by(run, fill, strategy=strategy, step=step, details={"precision": "bf16"})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run whose strategy changed, with a step that was begun, and one that differs from it."""
    save(tmp_path / "runs/7b", "fsdp:4", 90)
    save(tmp_path / "runs/7b", "ddp:2,fsdp:2", 100)
    save(tmp_path / "runs/other", "fsdp:1", 100, changed=True)
    begun = tmp_path / "runs/7b/step-0000000110/data/20260101T000000Z-abc"
    begun.mkdir(parents=True)
    (begun / "rank-00000.zip").write_bytes(b"x" * 100)
    return tmp_path


@pytest.mark.parametrize("session", SESSIONS, ids=lambda path: path.stem)
def test_outputs_are_what_they_were(
    session: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    width = int(session.stem) if session.stem.isdecimal() else None
    monkeypatch.setattr(output, "screen_width", lambda: width)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", str(width or 80))
    expected = session.read_text(encoding="utf-8")
    printed = ""
    for line in re.findall(r"^\$ (.*)$", expected, re.MULTILINE):
        done = CliRunner().invoke(main, shlex.split(line)[1:], color=True)
        text = done.output.replace("\x1b", "␛").replace(f"{place}/", "/data/")
        for pattern, name in VARYING.items():
            text = re.sub(pattern, name, text)
        printed += f"$ {line}\n{text}"
        printed += f"(exit code {done.exit_code})\n\n" if done.exit_code else "\n"
    if os.environ.get("CKPTKIT_GOLDEN") == "write":
        session.write_text(printed, encoding="utf-8")
    assert printed == expected
