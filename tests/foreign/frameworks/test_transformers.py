"""What transformers writes: of a model, and of a training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptkit
from tests.foreign.contract import ForeignContract, Sample
from tests.foreign.frameworks.written import written_by

PLACES = {"sharded": "sharded", "trained": "trained/checkpoint-3"}


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
            return Sample(place, dict(file), parts)


def test_a_model_in_several_files_is_one(written: Path) -> None:
    with ckptkit.open(written / "sharded") as checkpoint:
        assert checkpoint.foreign is not None
        assert len(checkpoint.foreign.files) == 2
        assert {array.dtype.name for array in checkpoint.arrays.values()} == {"bfloat16"}
        assert checkpoint.foreign.sizes["num_key_value_heads"] == 2
        assert "left_out" not in checkpoint.details


def test_what_the_trainer_has_besides_the_model_is_named(written: Path) -> None:
    """Its optimizer counts parameters of two groups: which those are nothing here says."""
    with ckptkit.open(written / "trained") as checkpoint:
        assert checkpoint.step == 3
        assert set(checkpoint.details["left_out"]) == {
            *("optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"),
            "training_args.bin",
        }
