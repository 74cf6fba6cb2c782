"""Every example runs without a warning.

Those of one process, and one torchrun with its ranks, begin as fresh processes. The ranks of the
others are forked from a process that has imported torch, which is most of what they would do.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.optimizers import warm

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")


def output_of(*command: object, **variables: str) -> str:
    """What a program prints that ends well and warns of nothing."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a torchrun whose ranks begin with torch imported."""
    folder = tmp_path_factory.mktemp("warm")
    python = folder / "python"  # torchrun says `-u` first
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -S {warm.__file__} "$@"\n')
    python.chmod(0o755)
    with warm.warm("tests.example_job", folder, {"OMP_NUM_THREADS": "1"}) as place:
        yield {**place, "PYTHON_EXEC": str(python)}


def losses(lines: str) -> dict[int, float]:
    """By step, the losses that a job prints."""
    return {
        int(n): float(x)
        for n, x in re.findall(r"^step (\d+)\b.*loss ([\d.]+)", lines, re.MULTILINE)
    }


@pytest.mark.parametrize("name", ["plain_zarr", "reshard_offline", "save_to_s3", "sharded_save"])
def test_an_example_runs_and_says_what_it_did(name: str) -> None:
    out = output_of("-W", "error", FOLDER / f"{name}.py")
    assert out.strip()
    assert "False" not in out


def test_what_was_killed_goes_on_under_another_strategy_as_if_nothing_had_been(
    warmed: dict[str, str],
) -> None:
    out = output_of(FOLDER / "kill_and_resume.py", **warmed)
    _, killed, _, listed, resumed = re.split(r"^\$ ", out, flags=re.MULTILINE)
    before, after = losses(killed), losses(resumed)
    found = re.search(r"^tp:2,fsdp:2: from step (\d+)", resumed, re.MULTILINE)
    assert found
    start = int(found[1])
    assert re.findall(r"^ +(\d+) .* fsdp:4 .* committed$", listed, re.MULTILINE)[-1] == str(start)
    assert list(after) == list(range(start + 10, 71, 10))
    both = before.keys() & after.keys()
    assert both
    assert [after[step] for step in both] == pytest.approx(
        [before[step] for step in both], abs=0.01
    )
    assert after[70] < before[10] - 0.2


def test_replicas_train_on_a_schedule_and_anyone_reads_what_they_saved(tmp_path: Path) -> None:
    job = ("ddp.py", "--dir", tmp_path / "run", "--steps", 10)
    out = output_of(*TORCHRUN, "--nproc-per-node", 2, FOLDER / job[0], *job[1:])
    assert list(losses(out)) == [10]
    assert "what was saved is what was trained: True" in out


def test_a_pipeline_goes_on_in_one_process(tmp_path: Path, warmed: dict[str, str]) -> None:
    found = {}
    for ranks, steps in ((2, 10), (1, 20)):
        job = (FOLDER / "pipeline.py", "--dir", tmp_path / "run", "--steps", steps)
        out = output_of(warm.__file__, *TORCHRUN, "--nproc-per-node", ranks, *job, **warmed)
        found[ranks] = losses(out)
    assert (list(found[2]), list(found[1])) == ([10], [20])
    assert found[1][20] < found[2][10]


def test_a_text_changes_the_strategy_of_a_run(tmp_path: Path, warmed: dict[str, str]) -> None:
    found: dict[int, float] = {}
    for steps, (ranks, strategy) in zip(
        (10, 20, 30), ((1, "ddp"), (2, "zero1"), (2, "pp")), strict=True
    ):
        job = (FOLDER / "strategies.py", "--dir", tmp_path, "--strategy", strategy)
        torchrun = (warm.__file__, *TORCHRUN, "--nproc-per-node", ranks)
        out = output_of(*torchrun, *job, "--steps", steps, **warmed)
        assert f"{strategy}:{ranks}" in out
        found |= losses(out)
    assert list(found) == [10, 20, 30]
    assert found[30] < found[10]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80


def test_the_activations_of_each_policy_are_told_and_its_gradients_are_the_same(
    tmp_path: Path,
) -> None:
    chart = tmp_path / "chart.png"
    out = output_of("-W", "error", FOLDER / "activation_memory.py", "--chart", chart)
    rows = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+) +[\d.]+  the same$", out, re.MULTILINE)
    peaks = {name: float(peak) for name, _, peak in rows}
    assert list(peaks) == ["none", "full", "every:2", "selective", "budget: half", "offload"]
    assert peaks["budget: half"] <= peaks["none"] / 2 + 0.1
    assert chart.exists() == ("no chart" not in out)


def test_the_notebook_runs_and_shows_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel runs it: cell by cell, where the value of a last expression is shown."""
    monkeypatch.syspath_prepend(str(FOLDER))
    text = (FOLDER / "look.ipynb").read_text(encoding="utf-8")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        *lines, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(lines, []), "look.ipynb", "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "look.ipynb", "exec"), names)
            continue
        found = eval(compile(ast.Expression(last.value), "look.ipynb", "eval"), names)
        if found is not None:
            shown.append(found._repr_html_())
    assert sum("<svg" in each for each in shown) == 4
    assert sum("<iframe" in each for each in shown) == 1
    assert len("".join(shown)) < 1 << 20
    shutil.rmtree(names["folder"])
