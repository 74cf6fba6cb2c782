"""What transformers writes: of a model, and of a training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import ckptkit
from tests.foreign.contract import ForeignContract, Sample, same
from tests.foreign.frameworks.written import written_by
from tests.foreign.jobs import as_numpy

PLACES = {
    "sharded": "sharded",
    "trained": "trained/checkpoint-3",
    "distributed": "distributed",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by("transformers", tmp_path_factory.mktemp("transformers"))


@pytest.mark.parametrize("case", PLACES)
class TestTransformers(ForeignContract):
    @pytest.fixture
    def sample(self, case: str, written: Path) -> Sample:
        place = written / PLACES[case]
        with np.load(written / f"{case}.npz") as file:
            parts = tuple(path.name for path in sorted(place.glob("*.safetensors")))
            if case == "distributed":
                # Nothing says how many there are: that the last rows are missing cannot be seen.
                parts = parts[:1]
            return Sample(place, dict(file), parts)


def test_a_model_in_several_files_is_one(written: Path) -> None:
    with ckptkit.open(written / "sharded") as checkpoint:
        assert checkpoint.foreign is not None
        assert len(checkpoint.foreign.files) == 2
        assert {array.dtype.name for array in checkpoint.arrays.values()} == {"bfloat16"}
        assert checkpoint.foreign.sizes["num_key_value_heads"] == 2
        assert "left_out" not in checkpoint.details


def test_an_optimizer_that_ranks_saved_alone_is_read_as_transformers_loads_it(
    written: Path, tmp_path: Path
) -> None:
    place = written / "distributed-optimizer"
    ckptkit.reshard(place, tmp_path / "run", to="fsdp:3")
    with np.load(written / "distributed-optimizer.npz") as wanted:
        for each in (place, tmp_path / "run"):
            with ckptkit.open(each) as checkpoint:
                assert set(checkpoint.arrays) == set(wanted.files)
                for name in wanted.files:
                    assert same(checkpoint[name][...], wanted[name]), name
                (said,) = checkpoint.objects["optimizer"]
                assert {group["options"]["lr"] for group in said["groups"]} == {0.01}


def test_what_the_trainer_has_besides_the_model_is_named(written: Path) -> None:
    """Its optimizer counts parameters of two groups: which those are nothing here says."""
    with ckptkit.open(written / "trained") as checkpoint:
        assert checkpoint.step == 3
        assert set(checkpoint.details["left_out"]) == {
            *("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"),
            "training_args.bin",
        }


@pytest.mark.parametrize("case", PLACES)
def test_transformers_loads_again_what_was_saved_for_another_layout(
    case: str, written: Path, tmp_path: Path
) -> None:
    """With the rules of its architecture, and through a step of tensor parallelism."""
    place = written / PLACES[case]
    ckptkit.reshard(place, tmp_path / "fsdp", to="fsdp:2")
    ckptkit.reshard(tmp_path / "fsdp", tmp_path / "tp", to="tp:2", sizes={"head_dim": 2})
    out = tmp_path / "out"
    ckptkit.export(tmp_path / "tp", out, to_format="hf", beside=place, max_file_size="2KB")
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True
    )
    model, said = loaded
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    with np.load(written / f"{case}.npz") as wanted:
        found = {f"model/{name}": as_numpy(tensor) for name, tensor in model.state_dict().items()}
        assert found.keys() == set(wanted.files)
        assert all(same(found[name], wanted[name]) for name in found)
