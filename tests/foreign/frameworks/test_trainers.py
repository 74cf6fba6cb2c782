"""What accelerate and Lightning write of a whole job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.errors import FormatError
from tests.foreign.contract import ForeignContract, Sample, same

MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
SHARDED = (".metadata", "__0_0.distcp", "__1_0.distcp")
CASES = {
    "accelerate/fsdp2": tuple(
        f"{folder}/{file}" for folder in (MODEL, OPTIMIZER) for file in SHARDED
    ),
    "accelerate/ddp": ("model.safetensors",),
    "lightning/fsdp2": SHARDED,
    "lightning/ddp.ckpt": ("ddp.ckpt",),
}


@pytest.fixture(scope="module")
def written(written_once: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trainers")
    for framework in ("accelerate", "lightning"):
        (folder / framework).symlink_to(written_once(framework))
    return folder


@pytest.mark.parametrize("case", CASES)
class TestTrainers(ForeignContract):
    @pytest.fixture
    def sample(self, case: str, written: Path) -> Sample:
        with np.load(written / f"{case.removesuffix('.ckpt')}.npz") as file:
            return Sample(written / case, dict(file), CASES[case])

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """It reads the heads of the parts, which lie side by side here: `test_dcp` counts them."""


@pytest.mark.parametrize("case", ["accelerate/fsdp2", "lightning/fsdp2", "lightning/ddp.ckpt"])
def test_the_optimizer_of_a_job_goes_along(case: str, written: Path) -> None:
    with ckptkit.open(written / case) as checkpoint:
        (said,) = checkpoint.objects["optimizer"]
        names = [name.removeprefix("model/") for name in checkpoint.arrays if name[0] == "m"]
        assert said["kind"] == "AdamW"
        assert {name for group in said["groups"] for name in group["params"]} == set(names)
        assert checkpoint.foreign is not None
        strategy = checkpoint.foreign.strategy
        assert str(strategy) == ("None" if "ddp" in case else "fsdp:2")


def test_a_model_of_hugging_face_goes_with_the_optimizer_beside_it(
    written: Path, tmp_path: Path
) -> None:
    """As the Trainer of transformers saves under FSDP, where the model is saved whole."""
    source = written / "accelerate" / "fsdp2"
    with np.load(written / "accelerate" / "fsdp2.npz") as arrays:
        wanted = dict(arrays)
    model = {
        name.removeprefix("model/"): torch.from_numpy(value)
        for name, value in wanted.items()
        if name.startswith("model/")
    }
    for to, file, save in (
        ("hf", "model.safetensors", save_file),
        ("torch", "pytorch_model.bin", torch.save),
    ):
        place = tmp_path / to / "checkpoint-3"
        place.mkdir(parents=True)
        weights = place / file
        save(model, weights)
        shutil.copytree(source / OPTIMIZER, place / OPTIMIZER)
        shutil.copy(source / "scheduler.bin", place / "scheduler.pt")
        with ckptkit.open(tmp_path / to) as checkpoint:
            assert checkpoint.step == 3
            assert set(checkpoint.arrays) == set(wanted)
            for name, value in wanted.items():
                assert same(checkpoint[name][...], value), name
            assert checkpoint["optimizer/0.weight/exp_avg"].info.of == "model/0.weight"
            (said,) = checkpoint.objects["optimizer"]
            assert said["kind"] == "AdamW"
            assert checkpoint.objects["extra/scheduler"]["step_size"] == 2
            assert "left_out" not in checkpoint.details
        run = tmp_path / f"{to}-run"
        ckptkit.reshard(place, run, to="fsdp:3")
        assert ckptkit.diff(place, run).same
        (place / OPTIMIZER / "__1_0.distcp").unlink()
        with pytest.raises(FormatError, match="is missing"):
            ckptkit.open(place)
        with ckptkit.open(weights) as checkpoint:  # itself, whatever lies beside
            assert all(name.startswith("model/") for name in checkpoint.arrays)


def test_what_lies_beside_a_folder_of_shards_is_read_or_named(written: Path) -> None:
    with ckptkit.open(written / "lightning" / "fsdp2") as checkpoint:
        assert checkpoint.step == checkpoint.objects["extra/global_step"] == 3
        assert checkpoint.objects["extra/lr_schedulers"][0]["gamma"] == 0.1
        assert "left_out" not in checkpoint.details
    with ckptkit.open(written / "accelerate" / "fsdp2") as checkpoint:
        file = written / "accelerate" / "fsdp2" / "scheduler.bin"
        assert checkpoint.objects["extra/scheduler"] == torch.load(file)
        assert set(checkpoint.details["left_out"]) == {f"random_states_{n}.pkl" for n in (0, 1)}
    with ckptkit.open(written / "accelerate" / "ddp") as checkpoint:
        assert "optimizer.bin" in checkpoint.details["left_out"]
