"""Experts (MoE) that DeepSpeed has shared out among ranks are read as the experts of one model."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.errors import FormatError
from tests.cli.programs import ckpt
from tests.foreign.contract import same
from tests.foreign.frameworks.deepspeed_folders import tag_of, wanted, written_as
from tests.foreign.frameworks.written import PYTHON

STRATEGIES = {
    "moe0": "ep:2",
    "moe1-neighbours": "ep:2,zero1:2",
    "moe2": "ep:2",
    "autoep3": "zero3:2,ep:2",
    "pipe-moe1": "pp:2,ep:2",
}
if PYTHON:  # these are not kept: they would be as large again
    STRATEGIES |= {
        "moe1": "zero1:2,ep:2",
        "moe2-whole": "zero2:2",
        "autoep0": "ep:2",
        "autoep2": "zero2:2,ep:2",
        "pipe-moe0": "pp:2,ep:2",
    }
EXPERT = "layers.1.deepspeed_moe.experts.deepspeed_experts"


@pytest.mark.parametrize("case", STRATEGIES)
def test_all_experts_of_all_ranks_are_what_deepspeed_loads(case: str, written: Path) -> None:
    arrays = wanted(written, case)
    with ckptkit.open(written / case) as checkpoint:
        assert checkpoint.written_by == STRATEGIES[case]
        assert set(checkpoint.arrays) == arrays.keys()
        for name, value in arrays.items():
            assert same(checkpoint[name][...], value), name
        assert not ckptkit.verify(written / case)


def test_which_ranks_have_an_expert_is_told(written: Path) -> None:
    for case, number, cut in (
        ("moe0", 3, ["owner(1)"]),
        ("moe1-neighbours", 2, ["owner(1)", "replicate"]),
    ):
        with ckptkit.open(written / case) as checkpoint:
            cuts = {it.name: [*map(str, it.placements)] for it in checkpoint.manifest.arrays}
            roles = {it.name: it.role for it in checkpoint.manifest.arrays}
        assert cuts[f"model/{EXPERT}.{number}.up.weight"] == cut
        assert cuts[f"optimizer/{EXPERT}.{number}.up.weight/exp_avg"] == cut
        assert set(cuts["model/head.weight"]) == {"replicate"}
        assert roles[f"model/{EXPERT}.3.seen"] == "buffer"
    for case, name, cut in (
        ("autoep3", "model.layers.0.mlp.experts.w1", ["shard(0)", "shard(0)"]),
        ("pipe-moe1", EXPERT.replace("layers.1", "3.moe") + ".1.up.bias", ["stage(1)", "owner(0)"]),
    ):
        with ckptkit.open(written / case) as checkpoint:
            cuts = {it.name: [*map(str, it.placements)] for it in checkpoint.manifest.arrays}
        assert cuts[f"model/{name}"] == cut


def test_the_optimizer_has_the_experts_of_all_ranks(written: Path) -> None:
    for case in ("moe0", "moe2"):
        with ckptkit.open(written / case) as checkpoint:
            objects = {item.name: item.value for item in checkpoint.manifest.objects}
        (told,) = objects["optimizer"]
        common, experts = told["groups"]
        assert len(common["params"]) == 6
        assert len(experts["params"]) == 2 * 4 * 3
        assert experts["options"]["moe"] is True


def test_a_second_name_of_a_router_is_one(written: Path) -> None:
    for case in (it for it in STRATEGIES if it.startswith("autoep")):
        with ckptkit.open(written / case) as checkpoint:
            aliases = {alias.name: alias.alias_of for alias in checkpoint.manifest.aliases}
        first, second = (f"model/model.layers.0.mlp.{it}.gate.weight" for it in ("gate", "router"))
        assert aliases[first] == second


def test_experts_become_a_step_for_any_strategy(written: Path, tmp_path: Path) -> None:
    for case in ("moe1-neighbours", "autoep3", "pipe-moe1"):
        run = tmp_path / case
        done = ckpt("reshard", written / case, run, "--to", "fsdp:3")
        assert done.exit_code == 0, done.stderr
        assert ckpt("diff", written / case, run).exit_code == 0


@pytest.fixture(params=["moe0", "moe2"])
def folder(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint's folder, to be damaged."""
    return Path(shutil.copytree(tag_of(written / request.param), tmp_path / "global_step3"))


def refused(folder: Path, what: str) -> str:
    with pytest.raises(FormatError, match=what) as caught:
        ckptkit.open(folder)
    return str(caught.value)


@pytest.mark.parametrize("case", ["moe0", "moe2", "pipe-moe1"])
def test_every_file_that_is_missing_is_named(case: str, written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tag_of(written / case), tmp_path / "global_step3"))
    for file in sorted(folder.iterdir()):
        moved = file.rename(folder.parent / "aside")
        assert file.name in refused(folder, "missing")
        moved.rename(file)


def test_all_optimizers_without_zero_are_missing(written: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tag_of(written / "moe0"), tmp_path / "tag"))
    for file in folder.glob("expp_rank_*"):
        file.unlink()
    assert "expp_rank_0_" in refused(folder, "that of one is missing")


def test_files_that_have_each_others_names_are_refused(folder: Path) -> None:
    experts = sorted(folder.glob("layer_0_expert_*"))
    swapped(experts[0], experts[2])
    refused(folder, "by its name the file is of expert 0, it has")
    swapped(experts[0], experts[2])
    shutil.copy(experts[0], folder / experts[0].name.replace("layer_0", "layer_1"))
    refused(folder, "not the parameters of expert 0|of another layer")


def test_optimizers_that_have_each_others_names_are_refused(written: Path, tmp_path: Path) -> None:
    for case in ("moe2", "moe1-neighbours"):
        folder = Path(shutil.copytree(tag_of(written / case), tmp_path / case))
        first, second, *_ = sorted(folder.glob("*optim_states.pt"))
        data = first.read_bytes()
        written_as(first, second.read_bytes(), second.name)
        written_as(second, data, first.name)
        refused(folder, "the file says that|are not the copies in")
    for case in ("moe0", "autoep3"):  # where no values tell
        folder = Path(shutil.copytree(tag_of(written / case), tmp_path / case))
        first, second, *_ = sorted(folder.glob("*optim_states.pt"))
        swapped(first, second)
        assert first.name in refused(folder, f"was written as {second.name}")


def swapped(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def test_more_experts_than_there_are_belong_to_another_save(folder: Path) -> None:
    (file,) = folder.glob("layer_1_expert_3_*")
    shutil.copy(file, folder / file.name.replace("expert_3", "expert_4"))
    refused(folder, "the layer has 4 experts")
    (folder / file.name.replace("expert_3", "expert_4")).unlink()
    shutil.copy(file, folder / file.name.replace("layer_1", "layer_2"))
    refused(folder, "the layer has 0 experts|is missing")


def test_numbers_of_experts_that_cannot_be_are_refused(folder: Path, stand_ins: None) -> None:
    (model,) = folder.glob("mp_rank_00_*")
    said = torch.load(model, weights_only=False)
    for number, what in (([4], "0 experts"), ([10**12, 4], "missing"), ("many", "num_experts")):
        torch.save({**said, "num_experts": number}, model)
        refused(folder, what)


def test_experts_that_lack_something_or_have_more_are_refused(folder: Path) -> None:
    (file,) = folder.glob("layer_0_expert_1_*")
    tensors: dict[str, Any] = torch.load(file)
    name = next(iter(tensors))
    for changed, what in (
        ({key: value for key, value in tensors.items() if key != name}, "not the parameters"),
        ({**tensors, "more": torch.ones(1)}, "not a tensor of an expert"),
        ({**tensors, name: "text"}, "not a tensor of an expert"),
    ):
        torch.save(changed, file)
        refused(folder, what)


def test_what_is_not_read_says_why(written: Path, tmp_path: Path, stand_ins: None) -> None:
    folder = Path(shutil.copytree(tag_of(written / "moe2"), tmp_path / "tag"))
    old = folder / "expert_0_mp_rank_00_model_states.pt"
    shutil.copy(folder / "layer_0_expert_0_mp_rank_00_model_states.pt", old)
    refused(folder, "as DeepSpeed wrote it in 2021")
    old.unlink()
    for file in folder.glob("*mp_rank_00_*states.pt"):
        if not file.name.startswith("layer"):
            name = re.sub("mp_rank_00", "mp_rank_01", file.name)
            written_as(folder / name, file.read_bytes(), file.name)
    file = folder / "mp_rank_00_model_states.pt"
    parallel = {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}}
    torch.save({**torch.load(file, weights_only=False), **parallel}, file)
    refused(folder, "beside tensor parallelism are not read")
