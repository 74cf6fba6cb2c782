"""Megatron-Core trains with its steps in ckptkit: a small GPT of its own classes, on a CPU, where
there is one.

`make test-frameworks` makes the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from ckptkit import Run
from tests.cli.programs import ckpt
from tests.servers.process import free_port
from tests.servers.s3_server import Bucket

FRAMEWORKS = os.environ.get("CKPTKIT_FRAMEWORKS", "")
ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("megatron_job.py")

# One that Megatron asks for, and one against what it says of a machine without a GPU.
SETTINGS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}

pytestmark = pytest.mark.skipif(not FRAMEWORKS, reason="needs the environment of test-frameworks")


def train(ranks: int, run: Path | str, steps: int = 6, **task: Any) -> tuple[dict[int, float], str]:
    """The losses that a job prints by step, and what else it says."""
    task |= {"run": str(run), "steps": steps}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [FRAMEWORKS, *torchrun, str(JOB), json.dumps(task)],
        env=os.environ | SETTINGS | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = done.stdout.splitlines()
    said = [line.split() for line in lines if line.startswith("loss ")]
    errors = [line for line in lines if line.startswith("error ")]
    return {int(step): float(loss) for _, step, loss in said}, "\n".join([*errors, done.stderr])


LAYOUT: dict[str, Any] = {"tp": 2, "pp": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A training that nothing interrupted, saved in the background by Megatron's own means."""
    run = tmp_path_factory.mktemp("whole")
    task = LAYOUT | {"async": True, "beside": str(run / "megatron")}
    losses, said = train(4, run / "run", **task)
    assert len(losses) == 6, said
    return run, losses


def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(
    whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    _, losses = whole
    _, said = train(4, tmp_path, **LAYOUT, killed_in=5)
    assert Run(tmp_path).steps() == [3], said
    again, said = train(4, tmp_path, **LAYOUT, resume=True, save={"keep_last": 1})
    assert again == {step: losses[step] for step in (4, 5, 6)}, said
    assert Run(tmp_path).steps() == [6]


@pytest.mark.parametrize(("ranks", "layout"), [(2, {"pp": 2}), (4, {"tp": 2})])
def test_a_training_goes_on_under_another_layout(
    ranks: int, layout: dict[str, Any], whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    run, losses = whole
    task: dict[str, Any] = {"load": {"step": 3}, "resume": True, "every": 9}
    again, said = train(ranks, run / "run", **task, **layout)
    assert again == pytest.approx({step: losses[step] for step in (4, 5, 6)}, rel=1e-6), said


def test_a_step_is_what_megatron_itself_writes(
    whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    run, losses = whole
    step = run / "run" / "step-0000000003"
    assert not ckptkit.verify(step)
    arrays = ("--include", "model/*", "--include", "optimizer/*/*")
    assert ckpt("diff", run / "megatron" / "iter_0000003", step, *arrays).exit_code == 0
    with ckptkit.open(step) as checkpoint:
        assert str(checkpoint.strategy) == "pp:2,tp:2"
        name = "model/decoder.layers.1.mlp.linear_fc1.weight"
        kind = checkpoint[name].layout.placements
        assert list(map(str, kind)) == ["stage(1)", "shard(0, blocks=[24,24])"]
        assert checkpoint.objects["extra/iteration"] == 3
    assert ckpt("reshard", "--to", "fsdp:4", step, tmp_path / "cut").exit_code == 0
    task = LAYOUT | {"resume": True, "every": 9}
    again, said = train(4, tmp_path / "cut", **task)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said


def test_both_strategies_work_on_an_object_store(bucket: Bucket, tmp_path: Path) -> None:
    run = f"{bucket.url}/gpt"
    stores: dict[str, Any] = {"storage_options": dict(bucket.options)}
    task: dict[str, Any] = {"tp": 2, "folders": str(tmp_path), "async": True, "save": stores}
    losses, said = train(2, run, **task)
    assert len(losses) == 6, said
    assert Run(run, **stores).steps() == [3, 6]
    assert not ckptkit.verify(run, **stores)
    again, said = train(2, run, pp=2, resume=True, every=9, load={"step": 3} | stores)
    assert again == pytest.approx({step: losses[step] for step in (4, 5, 6)}, rel=1e-6), said
    folder = str(tmp_path / "iter_0000003")
    again, said = train(2, run, tp=2, strategies=folder, every=9, load=stores)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said


def test_folders_of_megatron_stay_and_a_damaged_step_does_not_count(tmp_path: Path) -> None:
    run, folders = tmp_path / "run", tmp_path / "folders"
    task: dict[str, Any] = {"tp": 2, "folders": str(folders)}
    losses, said = train(2, run, 6, **task)
    assert len(losses) == 6, said
    names = {path.name for path in (folders / "iter_0000003").iterdir()}
    assert names == {"common.pt", "metadata.json"}
    again, said = train(2, run, 6, tp=2, strategies=str(folders / "iter_0000003"), every=9)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said
    (pack,) = (run / "step-0000000006" / "data").glob("*/rank-00001.zip")
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 3)
        file.write(bytes(4096))
    assert ckptkit.verify(run)
    again, said = train(2, run, 6, tp=2, resume=True)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said
    assert "step 6 is damaged" in said
    assert not ckptkit.verify(run), "it was saved anew"


def test_what_is_no_step_of_this_model_is_refused_in_one_sentence(
    whole: tuple[Path, dict[int, float]],
) -> None:
    run, _ = whole
    again, said = train(2, run / "run", tp=2, resume=True, hidden=32)
    assert not again
    assert "StateMismatchError" in said
    assert "the step is of another model: model.decoder." in said
    assert " is (16,), not (32,)" in said
    again, said = train(2, run / "megatron", tp=2, resume=True)
    assert not again
    assert "no step of ckptkit, but a checkpoint of megatron" in said
    folder = str(run / "megatron" / "iter_0000003")
    again, said = train(2, run / "run", tp=2, strategies=folder)
    assert not again
    assert "load it without sharded_strategy" in said


PAGE = """
import sys
import torch
sys.path.insert(0, {root!r})
from tests.plugins.megatron_job import Job, dist, on_cpu
on_cpu()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=0, world_size=1)
model = Job({{}}).model.module
{program}
before = {{name: each.detach().clone() for name, each in model.named_parameters()}}
assert resume() == 0
save_step(500)
for each in model.parameters():
    each.data.zero_()
assert resume() == 500
assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
print("resumed")
"""


def test_the_program_of_the_page_saves_and_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text().partition("\n## Megatron-Core\n")[2]
    program = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run(
        [FRAMEWORKS, "-c", PAGE.format(root=str(ROOT), port=free_port(), program=program)],
        env=os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["resumed"], done.stderr
    assert Run(tmp_path / "runs" / "gpt").steps() == [500]
