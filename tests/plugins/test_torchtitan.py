"""torchtitan trains with its steps in ckptkit: its own trainer, on a CPU, where there is one.

`make test-frameworks` makes the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ckptkit

FRAMEWORKS = os.environ.get("CKPTKIT_FRAMEWORKS", "")
ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("torchtitan_job.py")

pytestmark = pytest.mark.skipif(not FRAMEWORKS, reason="needs the environment of test-frameworks")

TP = {"tensor_parallel_degree": 2}


def train(folder: Path, steps: int, **task: Any) -> tuple[dict[int, float], str]:
    """The losses that a job of two ranks prints by step, and what else it says."""
    task |= {"folder": str(folder), "steps": steps}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [FRAMEWORKS, *torchrun, str(JOB), json.dumps(task)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    said = [line.split() for line in done.stdout.splitlines() if line.startswith("loss ")]
    return {int(step): float(loss) for _, step, loss in said}, done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    losses, said = train(folder, 6, checkpoint={"async_mode": "async", "keep_latest_k": 2})
    assert len(losses) == 6, said
    return folder, losses


def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(
    whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    _, losses = whole
    train(tmp_path, 6, killed_in=5)
    assert ckptkit.Run(tmp_path / "checkpoint").steps() == [3]
    assert not ckptkit.verify(tmp_path / "checkpoint")
    again, said = train(tmp_path, 6)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said


def test_a_training_goes_on_with_what_is_still_in_the_local_folder(
    whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    _, losses = whole
    local = {"local": str(tmp_path / "local"), "last_save_model_only": True}
    train(tmp_path, 6, killed_in=5, checkpoint=local)
    for step in (tmp_path / "checkpoint").glob("step-*"):
        shutil.rmtree(step)  # as if it had died before it was copied
    again, said = train(tmp_path, 6, checkpoint=local)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said
    # That was its end: the weights alone.
    refused, said = train(tmp_path, 9, checkpoint=local)
    assert not refused
    assert "--checkpoint.load_step goes on with a step before" in said


def test_a_training_goes_on_under_another_parallelism(
    whole: tuple[Path, dict[int, float]],
) -> None:
    folder, losses = whole
    there: dict[str, Any] = {"batch": 4, "parallelism": TP, "checkpoint": {"load_step": 3}}
    refused, said = train(folder, 6, **there)
    assert not refused
    assert "exclude_from_loading" in said
    there["checkpoint"] |= {"exclude_from_loading": ["dataloader"], "load_only": True}
    again, said = train(folder, 6, start=12, **there)
    assert again == pytest.approx({step: losses[step] for step in (4, 5, 6)}, rel=1e-6), said


def test_data_goes_on_only_where_as_many_read_it_whatever_the_context_parallelism(
    tmp_path: Path,
) -> None:
    context: dict[str, Any] = {"batch": 4, "parallelism": {"context_parallel_degree": 2}}
    context["length"] = 256  # as few as its masks can be cut for two ranks
    train(tmp_path, 6, killed_in=5, **context)
    refused, said = train(tmp_path, 6, length=256)
    assert not refused
    assert "between 1, this one does between 2" in said
    again, said = train(tmp_path, 6, **context)
    assert sorted(again) == [4, 5, 6], said


def test_a_training_begins_with_what_torchtitan_and_hugging_face_have(
    whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    _, losses = whole
    train(tmp_path / "dcp", 3, dcp=True)
    unchanged, said = train(tmp_path / "dcp", 6)
    assert not unchanged
    assert "another checkpoint manager" in said
    begun: dict[str, Any] = {
        "initial_load_path": str(tmp_path / "dcp" / "checkpoint" / "step-3"),
        "initial_load_model_only": False,
    }
    again, said = train(tmp_path / "ours", 6, start=12, checkpoint=begun)
    assert again == {step: losses[step] for step in (4, 5, 6)}, said
    last: dict[str, Any] = {"last_save_model_only": True, "last_save_in_hf": True}
    last["enable_first_step_checkpoint"] = True
    train(tmp_path / "hf", 3, checkpoint=last)
    (folder,) = (tmp_path / "hf" / "checkpoint-hf").glob("step-*")
    # The end is done again: its weights are new, and what was added to them stays.
    (folder / "config.json").write_text("{}")
    (weights,) = folder.glob("*.safetensors")
    written = weights.read_bytes()
    weights.write_bytes(b"")
    again, said = train(tmp_path / "hf", 3, checkpoint={**last, "load_step": 1})
    assert again == {step: losses[step] for step in (2, 3)}, said
    assert weights.read_bytes() == written, said
    assert (folder / "config.json").read_text() == "{}"
    assert not ckptkit.Run(folder.parent / ".step").steps()
    begun = {"initial_load_path": str(folder), "initial_load_in_hf": True, "load_only": True}
    fresh, said = train(tmp_path / "fresh", 1, start=12, checkpoint=begun)
    assert fresh[1] == losses[4], said


def test_steps_that_do_not_fit_are_refused_with_the_way_out(tmp_path: Path) -> None:
    train(tmp_path / "run", 3)
    refused, said = train(tmp_path / "run", 6, layers=1)
    assert not refused
    assert "choose another --checkpoint.folder" in said
    begun = {"initial_load_path": str(tmp_path / "run" / "checkpoint"), "initial_load_in_hf": True}
    refused, said = train(tmp_path / "hf", 3, checkpoint=begun)
    assert not refused
    assert "begun with without --checkpoint.initial_load_in_hf" in said


def test_the_program_of_the_page_builds_this_manager() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text().partition("\n## torchtitan\n")[2]
    program = page.partition("```python\n")[2].partition("```")[0]
    program += "\nprint(type(my_model().checkpoint)._owner.__module__)"
    done = subprocess.run(
        [FRAMEWORKS, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.split() == ["ckptkit.plugins.torchtitan"], done.stderr
