"""DeepSpeed trains with its steps in ckptkit: real engines on a CPU, where there is DeepSpeed.

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
from tests.servers.process import free_port
from tests.servers.s3_server import Bucket

FRAMEWORKS = os.environ.get("CKPTKIT_FRAMEWORKS", "")
ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("deepspeed_job.py")

pytestmark = pytest.mark.skipif(not FRAMEWORKS, reason="needs the environment of test-frameworks")

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}

# By name, what a job of two ranks trains.
FP32: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0, "precision": "fp32"},
    "zero1": {"stage": 1, "precision": "fp32"},
    "zero2": {"stage": 2, "precision": "fp32", "zero": {"round_robin_gradients": True}},
    "zero3": {"stage": 3, "precision": "fp32", "zero": {"sub_group_size": 20}},
}
LOW: dict[str, dict[str, Any]] = {
    "zero0-bf16": {"stage": 0, "precision": "bf16"},
    "zero1-bf16": {"stage": 1, "precision": "bf16"},
    "zero1-bf16-fp32": {"stage": 1, "precision": "bf16", "accumulate": "fp32"},
    "zero2-bf16": {"stage": 2, "precision": "bf16", "zero": {"parameter_alignment": True}},
    "zero3-bf16": {"stage": 3, "precision": "bf16", "zero": OFFLOADED},
    "zero2-fp16": {"stage": 2, "precision": "fp16"},
}
PIPE = {"stage": 1, "precision": "fp32", "stages": 2}


def run(ranks: int, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks print of each task."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [FRAMEWORKS, *torchrun, str(JOB), json.dumps(tasks)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    said = [
        json.loads(line.removeprefix("said "))
        for line in done.stdout.splitlines()
        if line.startswith("said ")
    ]
    assert len(said) == len(tasks), done.stderr[-6000:]
    return said


def begun(task: dict[str, Any], folder: Path | str) -> dict[str, Any]:
    """A training that saves after its third step, and is not there any more after the fourth."""
    return {**task, "save": str(folder), "save_after": 3, "steps": 4}


def resumed(task: dict[str, Any], folder: Path | str) -> dict[str, Any]:
    return {**task, "resume": str(folder), "steps": 6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """What two ranks print of each training that nothing interrupts; and the runs of others, which
    were killed.
    """
    tasks = {**FP32, **LOW}
    folder = tmp_path_factory.mktemp("runs")
    said = run(2, [{**task, "steps": 6} for task in tasks.values()])
    killed = [begun(task, folder / name) for name, task in tasks.items()]
    run(2, [*killed[:-1], {**killed[-1], "killed": True}])
    return folder, dict(zip(tasks, said, strict=True))


def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(
    trained: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, whole = trained
    tasks = {**FP32, **LOW}
    again = run(2, [resumed(task, folder / name) for name, task in tasks.items()])
    for name, found in zip(tasks, again, strict=True):
        wanted = whole[name]
        assert found["note"] == "warm"
        assert found["begun"] == [3, 3, 36], name
        assert found["losses"] == wanted["losses"][3:], name
        assert found["lr"] == wanted["lr"][3:], name
        assert (found["scale"], found["skipped"]) == (wanted["scale"], wanted["skipped"]), name
    assert whole["zero2-fp16"]["skipped"] > 0  # so the scale of the loss has changed


def test_a_training_goes_on_under_another_stage_and_size(
    trained: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    folder, whole = trained
    names = [*FP32]
    for ranks in (1, 3):
        pairs = [(a, names[(n + ranks) % 4]) for n, a in enumerate(names)]
        tasks = [resumed(FP32[there], folder / name) for name, there in pairs]
        for (name, there), found in zip(pairs, run(ranks, tasks), strict=True):
            about = pytest.approx(whole[name]["losses"][3:], rel=1e-6)
            assert found["losses"] == about, (name, there, ranks)
            assert found["lr"] == whole[name]["lr"][3:]


def test_what_16_bits_train_goes_on_elsewhere_from_the_same_weights(
    trained: tuple[Path, dict[str, dict[str, Any]]],
) -> None:
    """Ranks round their gradients before they are summed: other ranks round other sums. The loss of
    the first step has seen none of that.
    """
    folder, whole = trained
    names = [name for name in LOW if name != "zero2-fp16"]
    pairs = [(name, names[(n + 2) % len(names)]) for n, name in enumerate(names)]
    for (name, there), found in zip(
        pairs, run(3, [resumed(LOW[there], folder / name) for name, there in pairs]), strict=True
    ):
        wanted = whole[name]["losses"][3:]
        assert found["losses"][0] == pytest.approx(wanted[0], rel=1e-3), (name, there)
        assert found["losses"] == pytest.approx(wanted, rel=3e-2), (name, there)


def test_a_step_is_an_ordinary_one(trained: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, _ = trained
    with ckptkit.open(folder / "zero0") as plain:
        for name in (*FP32, *LOW):
            assert not ckptkit.verify(folder / name), name
            with ckptkit.open(folder / name) as step:
                kind = name.partition("-")[0].replace("zero0", "ddp")
                assert str(step.strategy) == f"{kind}:2"
                assert step.names == plain.names, name
                assert step.info("model/up.weight").dtype.name == "float32"
                for array in plain.names if name in FP32 else ():
                    about = pytest.approx(plain[array][...], rel=1e-4, abs=1e-6)
                    assert step[array][...] == about, (name, array)


def test_a_pipeline_goes_on_with_other_stages_and_sizes(tmp_path: Path) -> None:
    whole, _ = run(4, [{**PIPE, "steps": 6}, begun(PIPE, tmp_path / "run")])
    with ckptkit.open(tmp_path / "run") as step:
        assert str(step.strategy) == "pp:2,zero1:2"
        assert {"model/1.weight", "model/tied_modules.embed.weight"} < {*step.names}
    (again,) = run(4, [resumed(PIPE, tmp_path / "run")])
    assert again["losses"] == whole["losses"][3:]
    for ranks, stages in ((2, 2), (2, 1)):
        (found,) = run(ranks, [resumed({**PIPE, "stages": stages}, tmp_path / "run")])
        assert found["losses"] == pytest.approx(whole["losses"][3:], rel=1e-6), (ranks, stages)


def test_what_cannot_be_resumed_is_refused_with_the_way_out(
    trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = trained
    zero2 = FP32["zero2"]
    other, kind, taken = run(
        2,
        [
            {**resumed(zero2, folder / "zero1"), "width": 6},
            {**resumed(zero2, folder / "zero1"), "optimizer": "SGD"},
            {**begun(zero2, folder / "zero1"), "steps": 3},
        ],
    )
    assert "does not fit" in other["refused"]
    assert "model/up.weight: (11, 5) in the step, (11, 6) here" in other["refused"]
    assert "AdamW" in kind["refused"]
    assert "the step is committed already" in taken["refused"]


REFUSED = {
    "no engine": "not an engine of DeepSpeed",
    "extra": "this name is the plugin's own",
    "has_moe_layers": "ranks have experts (MoE) of their own",
    "mp_world_size": "ranks have parts of tensors (tensor parallelism)",
    "zenflow": "ZenFlow keeps some of the state elsewhere",
    "curriculum_learning_enabled": "curriculum learning draws its data",
    "random_ltd_enabled": "random layers drop tokens",
    "offload_optimizer": "its state is on NVMe",
    "optimizer": "its optimizer is not known",
    "seq_data_parallel_group": "1 of 2 ranks share out the parameters",
    "offloaded_states": "engine.reload_states() comes first",
    "MiCS_Optimizer": "shards are in groups of ranks (MiCS)",
    "not cut": "the AdamW keeps what is not cut as its parameters are",
}


def test_an_engine_that_no_run_can_keep_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    (said,) = run(2, [{**FP32["zero1"], "refusals": str(tmp_path / "run")}])
    assert said.keys() == REFUSED.keys()
    for about, why in REFUSED.items():
        assert why in said[about], about
        assert "hint: " in said[about], about
    assert not (tmp_path / "run").exists()


def test_one_row_of_an_engine_takes_no_two_counts_of_steps(
    trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, _ = trained
    uneven = {"by_torch": str(folder / "zero2"), "again": str(tmp_path), "is_uneven": True}
    back = {**resumed(FP32["zero1"], tmp_path), "how": {"skip": ["scheduler"]}}
    _, found = run(2, [uneven, back])
    assert "step is 3.0 for " in found["refused"]
    assert "2.0 for up.weight, and the engine has one for both" in found["refused"]


def test_a_run_in_an_object_store_goes_on_under_another_stage_and_size(
    trained: tuple[Path, dict[str, dict[str, Any]]], bucket: Bucket
) -> None:
    _, whole = trained
    run_of_it = f"{bucket.url}/7b"
    stores: dict[str, Any] = {"storage_options": dict(bucket.options)}
    (found,) = run(2, [{**begun(FP32["zero1"], run_of_it), **stores}])
    assert len(found["losses"]) == 4, found
    assert ckptkit.Run(run_of_it, **stores).steps() == [3]
    assert not ckptkit.verify(run_of_it, **stores)
    (found,) = run(3, [{**resumed(FP32["zero3"], run_of_it), **stores}])
    assert found["begun"] == [3, 3, 36]
    assert found["losses"] == pytest.approx(whole["zero1"]["losses"][3:], rel=1e-6)


def test_a_folder_of_deepspeed_goes_on_under_another_stage_and_size(tmp_path: Path) -> None:
    zero1, zero3 = FP32["zero1"], FP32["zero3"]
    begin = {**zero1, "steps": 3, "theirs": str(tmp_path / "theirs")}
    whole, _ = run(2, [{**zero1, "steps": 6}, begin])
    (found,) = run(3, [resumed(zero3, tmp_path / "theirs")])
    assert found["begun"] == [3, 3, 36]
    assert found["losses"] == pytest.approx(whole["losses"][3:], rel=1e-6)
    assert found["lr"] == whole["lr"][3:]


def test_torch_goes_on_with_it_and_it_with_what_torch_saved(
    trained: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    folder, whole = trained
    back = {**resumed(FP32["zero3"], tmp_path / "again"), "how": {"skip": ["scheduler"]}}
    theirs = {"by_torch": str(folder / "zero2"), "again": str(tmp_path / "again")}
    sharded, found = run(2, [theirs, back])
    wanted = whole["zero2"]
    assert sharded["losses"] == pytest.approx(wanted["losses"][3:4], rel=1e-6)
    assert sharded["lr"] == wanted["lr"][2][1]
    assert found["losses"][0] == pytest.approx(wanted["losses"][3], rel=1e-6)


def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text().partition("\n## DeepSpeed\n")[2]
    program = page.partition("```python\n")[2].partition("```")[0]
    program = f"""
import deepspeed, torch
deepspeed.ops.__compatible_ops__.clear()
model = torch.nn.Linear(4, 2)
parameters = model.parameters()
config = {{
    "train_batch_size": 2,
    "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01, "torch_adam": True}}}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {{"stage": 3}},
}}
loss_of = lambda engine: engine(torch.ones(2, 4)).square().mean()
{program}
print("said", restored and restored.step, engine.global_steps)
"""
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    job["MASTER_PORT"] = str(free_port())
    job |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    for wanted, left in (("said None 6", [3, 6]), ("said 3 6", [3, 6])):
        done = subprocess.run(
            [FRAMEWORKS, "-c", program],
            cwd=tmp_path,
            env=os.environ | job,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert wanted in done.stdout, done.stderr[-3000:]
        assert ckptkit.Run(tmp_path / "runs" / "7b").steps() == left
        ckptkit.Run(tmp_path / "runs" / "7b").delete([6])
