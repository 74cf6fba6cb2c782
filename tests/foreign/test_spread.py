"""Checkpoints of real jobs on four ranks: what each rank's file, and each file of DCP, holds of
tensors that are spread over a mesh.
"""

from __future__ import annotations

import pickle
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import ckptkit
from ckptkit.errors import FormatError
from ckptkit.live import load
from tests.foreign.contract import BitForBit, ForeignContract, Sample
from tests.foreign.jobs import Wanted, network, wanted_of, write_samples
from tests.live.pool import Pool


@pytest.fixture(scope="module")
def samples(gloo: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    gloo.run(4, write_samples, str(root))
    return root


def wanted(place: Path) -> Wanted:
    found: Wanted = pickle.loads(place.with_suffix(".wanted").read_bytes())
    return found


class TestDcp(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, samples: Path) -> Sample:
        place = samples / "fsdp2"
        parts = (".metadata", *sorted(path.name for path in place.glob("*.distcp")))
        return Sample(place, wanted(place), parts)

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """Of a part it reads the head, which is more than these small tensors are."""


class TestFilesOfRanks(ForeignContract):
    @pytest.fixture(scope="class")
    @classmethod
    def sample(cls, samples: Path) -> Sample:
        place = samples / "2d-ranks"
        models = [f"model_world_size_4_rank_{rank}.pt" for rank in (0, 3)]
        return Sample(place, wanted(place), (*models, "optim_world_size_4_rank_1.pt"))

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """Between these small tensors there is more to read than they are."""


STRATEGIES = {
    "fsdp2": "fsdp:4",
    "fsdp2-ranks": "fsdp:4",
    "flattened": "fsdp:4",
    "bare": "fsdp:4",
    "many": "fsdp:4",
    "alone": "fsdp:4",
    "fsdp1": "fsdp:4",
    "fsdp1-ranks": "fsdp:4",
    "hsdp": "fsdp:2",
    "hsdp-ranks": "replicas=ddp:2,fsdp:2",
    "tp": "an unknown strategy",
    "tp-ranks": "tp:4",
    "2d": "an unknown strategy",
    "2d-ranks": "fsdp:2,tp:2",
    "pipeline": "fsdp:2",
    "pipeline-lists": "fsdp:2",
    "hsdp-ranks-of-torch-2.4": "replicas=ddp:2,fsdp:2",
    "fsdp2-ranks-of-torch-2.9": "fsdp:4",
    "2d-ranks-of-torch-2.12": "fsdp:2,tp:2",
}
WITHOUT_OPTIMIZER = (
    "bare",
    "fsdp1-ranks",
    "pipeline-lists",
    *(name for name in STRATEGIES if "-of-torch-" in name),
)
WITH_ONE_GROUP = [n for n in STRATEGIES if n not in (*WITHOUT_OPTIMIZER, "pipeline-lists")]


class TestHoweverItWasSpread(BitForBit):
    @pytest.fixture(scope="class", params=STRATEGIES)
    @classmethod
    def sample(cls, samples: Path, request: pytest.FixtureRequest) -> Sample:
        """What torch itself gathers is wanted of it."""
        place = samples / request.param
        return Sample(place, wanted(place), ())

    def test_it_says_what_wrote_it(self, sample: Sample) -> None:
        with ckptkit.open(sample.place) as checkpoint:
            assert checkpoint.written_by == STRATEGIES[sample.place.name]
            for info in checkpoint.manifest.arrays:
                assert len(info.placements) == len(checkpoint.strategy.mesh.axes)


def test_parameters_of_stages_whose_groups_are_lost_keep_their_state(samples: Path) -> None:
    """Which parameters DCP has kept a group of depends on which rank was the first."""
    with ckptkit.open(samples / "pipeline-lists") as checkpoint:
        (document,) = checkpoint.objects["optimizer"]
        told, lost = document["groups"]
        assert told["options"] == lost["options"]
        assert sorted(told["params"] + lost["params"]) == [
            "0.bias",
            "0.weight",
            "2.bias",
            "2.weight",
        ]
        assert checkpoint.details["without_group"].startswith(f"{lost['params'][0]} and 1 more")


@pytest.mark.parametrize("name", WITH_ONE_GROUP)
def test_the_optimizer_is_told_as_a_save_of_ours_tells_it(name: str, samples: Path) -> None:
    with ckptkit.open(samples / name) as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
    (document,) = objects["optimizer"]
    (group,) = document["groups"]
    assert document["kind"] == "AdamW"
    assert group["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert group["options"]["betas"] == (0.9, 0.999)
    assert group["options"]["weight_decay"] == 0.1


def test_objects_are_kept(samples: Path) -> None:
    with ckptkit.open(samples / "fsdp2") as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
    assert objects["extra/epoch"] == 3
    assert objects["extra/rng"] == {"seed": [1, 2]}


def filled(folder: str) -> list[Wanted]:
    """What a job on two ranks has after it loaded a checkpoint, under FSDP and under TP."""
    found = []
    for spread in ("fsdp", "tp"):
        net = network()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(spread,))
        if spread == "fsdp":
            fully_shard(net, mesh=mesh)
        else:
            parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.AdamW(net.parameters())
        load(folder, model=net, optimizer=optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.01
        found.append(wanted_of(net, optimizer))
    return found


@pytest.mark.parametrize("name", ["2d", "2d-ranks", "flattened"])
def test_a_job_of_another_layout_goes_on_with_it(name: str, gloo: Pool, samples: Path) -> None:
    arrays = wanted(samples / name)
    for found in gloo.run(2, filled, str(samples / name))[0]:
        assert found.keys() == arrays.keys()
        assert all(np.array_equal(found[key], value) for key, value in arrays.items())


def test_what_wrote_it_may_be_claimed_only_where_nothing_says_it(
    samples: Path, tmp_path: Path
) -> None:
    with pytest.raises(ckptkit.CkptkitError, match="written by fsdp:4, not by fsdp:8"):
        ckptkit.plan_reshard(samples / "fsdp2", tmp_path, to="tp:2", expect="fsdp:8")
    plan: Any = ckptkit.plan_reshard(
        samples / "2d", tmp_path, to="fsdp:3", expect="fsdp:2,tp:2", replicate_unknown=True
    )
    assert plan.to_strategy == "fsdp:3"


def test_flat_parameters_are_refused_with_the_reason(samples: Path) -> None:
    with pytest.raises(FormatError, match="flat parameter of FSDP1"):
        ckptkit.open(samples / "local")


def test_the_file_of_a_rank_that_is_missing_is_named(samples: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(samples / "fsdp2-ranks", tmp_path / "short"))
    (place / "optim_world_size_4_rank_2.pt").unlink()
    with pytest.raises(FormatError, match="rank 2"):
        ckptkit.open(place)


def test_the_parts_of_a_rank_that_is_missing_are_a_hole(samples: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(samples / "alone", tmp_path / "short"))
    (place / "__3.metadata").unlink()
    with pytest.raises(FormatError, match=r"no file has this part|is missing"):
        ckptkit.open(place)


@pytest.mark.parametrize(
    ("name", "key", "end"),
    [
        ("fsdp2", ".metadata", None),
        ("2d-ranks", "model_world_size_4_rank_1.pt", 3200),
        ("fsdp1-ranks", "pytorch_model_fsdp_0_rank_1.bin", 4200),
    ],
)
def test_a_byte_that_changed_gives_a_checkpoint_or_an_error_of_ours(
    name: str, key: str, end: int | None, samples: Path
) -> None:
    store = ckptkit.open_store("memory://changed-" + name)
    for path in (samples / name).iterdir():
        store.put(path.name, path.read_bytes())
    whole = (samples / name / key).read_bytes()
    dice = random.Random(name)
    for _ in range(100):
        data = bytearray(whole)
        data[dice.randrange(end or len(data))] = dice.choice([0, 1, 3, 75, dice.randrange(256)])
        store.put(key, bytes(data))
        with suppress(ckptkit.CkptkitError):
            ckptkit.open(store).close()
