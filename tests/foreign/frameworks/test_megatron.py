"""Checkpoints of Megatron-Core, as it wrote them."""

from __future__ import annotations

import json
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import ckptkit
from ckptkit.errors import FormatError, NotFoundError
from ckptkit.foreign.extents import ForeignArray, sampled
from ckptkit.live import load
from tests.cli.programs import ckpt, document
from tests.foreign.contract import BitForBit, ForeignContract, Sample, same

STEP = "iter_0000002"


LLAMA: dict[str, Any] = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 12,
    "vocab_size": 30,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def written(written_once: Callable[[str], Path]) -> Path:
    return written_once("megatron")


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    """A copy of one checkpoint, to be changed."""
    return Path(shutil.copytree(written / "reshardable" / STEP, tmp_path / STEP))


def wanted(written: Path, case: str) -> dict[str, Any]:
    with np.load(written / f"{case}.npz") as file:
        return dict(file)


@pytest.mark.parametrize("case", ["reshardable", "pipeline", "experts"])
class TestMegatron(ForeignContract):
    @pytest.fixture
    def sample(self, case: str, written: Path) -> Sample:
        place = written / case / STEP
        parts = (".metadata", "metadata.json", "common.pt", "__0_0.distcp", "__3_0.distcp")
        return Sample(place, wanted(written, case), parts)

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """It reads the heads of the parts, which lie side by side here, and of buckets some
        elements: `test_few_elements_are_read` counts them.
        """


@pytest.mark.parametrize("case", ["buckets", "singletons"])
class TestOtherOptions(BitForBit):
    @pytest.fixture
    def sample(self, case: str, written: Path) -> Sample:
        return Sample(written / case, wanted(written, case), ())


def test_the_newest_of_a_run_is_read(written: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(written / "reshardable", tmp_path / "run"))
    shutil.copytree(run / STEP, run / "iter_0000010")
    with ckptkit.open(run) as checkpoint:
        assert checkpoint.location.endswith("iter_0000010")
    found = document("ls", run)["steps"]
    assert [(s["step"], s["format"]) for s in found] == [
        (2, "a Megatron checkpoint (torch_dist)"),
        (10, "a Megatron checkpoint (torch_dist)"),
    ]


def test_layers_experts_and_halves_are_arrays_by_the_names_of_parameters(written: Path) -> None:
    with (
        ckptkit.open(written / "experts") as stacked,
        ckptkit.open(written / "singletons") as one,
    ):
        assert stacked.foreign is not None
        assert one.foreign is not None
        name = "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight"
        assert stacked[f"model/{name}"].shape == one[f"model/{name}"].shape == (8, 8)
        of_all = "decoder.layers.mlp.experts.experts.linear_fc1.weight[1][3]"
        assert stacked.foreign.theirs[f"model/{name}"] == of_all
        assert one.foreign.theirs[f"model/{name}"] == f"{name}_w, {name}_v"


def test_what_is_no_tensor_is_plain_values(written: Path) -> None:
    with ckptkit.open(written / "reshardable") as checkpoint:
        objects = {item.name: item.value for item in checkpoint.manifest.objects}
        assert checkpoint.step == objects["extra/iteration"] == 2
        assert checkpoint.details["vocab_size"] == 30
        assert checkpoint["model/output_layer.weight"].shape == (32, 8)
        args = objects["extra/args"]
        assert args["attention_backend"] == "AttnBackend(5)"
        assert args["params_dtype"] == "torch.bfloat16"
        assert objects["extra/rng_state"]["0.1"][0]["seed"] == (0, 1)
        opaque = objects["extra/decoder.final_layernorm._extra_state"]
        assert opaque == b"as Transformer Engine has it"
        (optimizer,) = objects["optimizer"]
        assert optimizer["values"]["output_layer.weight"] == {"step": 2.0}
        (said,) = objects["extra/optimizer"]
        assert said["param_state_sharding_type"] == "fully_reshardable"
        assert {group["lr"] for group in said["optimizer"]["param_groups"]} == {0.01}
        (group,) = optimizer["groups"]
        assert group["options"]["lr"] == 0.01
        assert len(group["params"]) == 15


def test_an_optimizer_of_other_weights_is_told(place: Path) -> None:
    with ckptkit.open(place) as checkpoint:
        assert checkpoint.foreign is not None
        assert "not_rounded" not in checkpoint.details
        name = "optimizer/decoder.layers.1.mlp.linear_fc2.weight/param"
        (array,) = (a for a in checkpoint.foreign.arrays if a.name == name)
    with (place / array.extents[1].file).open("r+b") as file:
        file.seek(array.extents[1].offset + 3)
        file.write(b"\x42")
    with ckptkit.open(place) as checkpoint:
        told = checkpoint.details["not_rounded"]
        assert "1 of 15 parameters (decoder.layers.1.mlp.linear_fc2.weight)" in told


class Unknown:
    pass


def test_common_values_of_unknown_classes_are_named_and_the_model_read(place: Path) -> None:
    plain = {"model": {"count": 3, "scale": torch.ones(2)}, "optimizer": 7, "iteration": 2}
    torch.save(plain, place / "common.pt")
    with ckptkit.open(place) as checkpoint:
        assert checkpoint["model/output_layer.weight"].shape == (32, 8)
        assert "extra/model" in checkpoint.details["left_out"]
    torch.save({"args": Namespace(what=Unknown()), "iteration": 2}, place / "common.pt")
    with ckptkit.open(place) as checkpoint:
        assert "Unknown" in checkpoint.details["left_out"]["common.pt"]
        assert checkpoint.step == 2
        assert checkpoint["model/output_layer.weight"].shape == (32, 8)


@pytest.mark.parametrize(
    ("case", "told", "strategy"),
    [
        ("reshardable", {"tensor": 2}, "ddp:2,tp:2"),
        ("buckets", {"tensor": 2}, "ddp:2,tp:2"),
        ("pipeline", {"tensor": 2, "pipeline": 2}, "pp:2,tp:2"),
        ("experts", {"expert": 2}, "ddp:2,ep:2"),
        ("reshardable", {}, None),  # not what the files are cut for
        ("reshardable", {"tensor": 2, "pipeline": 2}, None),
        ("reshardable", {"tensor": 2, "world_size": 2}, None),
    ],
)
def test_arguments_name_the_strategy_where_the_files_bear_them_out(
    case: str, told: dict[str, int], strategy: str | None, written: Path, tmp_path: Path
) -> None:
    """Those of a training of Megatron-LM, which also says how many ranks it has."""
    place = shutil.copytree(written / case / STEP, tmp_path / STEP)
    args = {"world_size": told.get("world_size", 4), "context_parallel_size": 1}
    for name in ("tensor", "pipeline", "expert"):
        args[f"{name}_model_parallel_size"] = told.get(name, 1)
    torch.save({"args": Namespace(**args), "iteration": 2}, place / "common.pt")
    with ckptkit.open(place) as checkpoint:
        assert checkpoint.foreign is not None
        named = checkpoint.foreign.strategy
        assert (None if named is None else str(named)) == strategy
        if case == "pipeline":
            (array,) = (
                a
                for a in checkpoint.foreign.arrays
                if "1.mlp.linear_fc2.weight" in a.name and a.role == "param"
            )
            assert list(map(str, array.placements)) == ["stage(1)", "shard(1)"]


def test_a_save_that_was_not_finished_is_refused(place: Path) -> None:
    (place / "metadata.json").unlink()
    with pytest.raises(FormatError, match="the save was not finished"):
        ckptkit.open(place)


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ({"sharded_backend": "zarr", "sharded_backend_version": 1}, "zarr"),
        ({"sharded_backend": "torch_dist", "sharded_backend_version": 2}, "only version 1"),
        (["torch_dist"], "only version 1"),
    ],
)
def test_other_formats_of_megatron_are_refused(said: Any, what: str, place: Path) -> None:
    (place / "metadata.json").write_text(json.dumps(said))
    with pytest.raises(FormatError, match=what):
        ckptkit.open(place)


def test_a_file_for_each_rank_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / STEP / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"model": {}}, file)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    for folder, what in ((tmp_path, "checkpoints of Megatron"), (file.parents[1], "each rank")):
        with pytest.raises(NotFoundError, match=what):
            ckptkit.open(folder)


def test_commands_take_it(written: Path, tmp_path: Path) -> None:
    run = written / "singletons"
    assert "ok: every tensor" in ckpt("verify", run).stdout
    assert ckpt("import", run, tmp_path / "ours").exit_code == 0
    assert ckpt("diff", run, tmp_path / "ours").exit_code == 0
    assert ckpt("export", run, tmp_path / "hf", "--to-format", "hf").exit_code == 0
    assert ckpt("diff", run, tmp_path / "hf", "--include", "model/*").exit_code == 0


def test_transformers_computes_what_megatron_does(written: Path, tmp_path: Path) -> None:
    """Its arguments tell how many heads there are, and how many rows are of the vocabulary."""
    run, out = written / "reshardable", tmp_path / "hf"
    names = ("--names", "llama-megatron")
    assert ckpt("export", run, out, "--to-format", "hf", *names).exit_code == 0
    transformers.LlamaConfig(**LLAMA).save_pretrained(out)
    model: Any = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    with np.load(written / "reshardable.logits.npz") as file, torch.no_grad():
        logits = model(torch.from_numpy(file["words"])).logits.numpy()
        np.testing.assert_allclose(logits, file["logits"][..., :30], atol=1e-5)
    assert ckpt("reshard", "--to", "tp:2", *names, run, tmp_path / "tp").exit_code == 0
    sizes = [f"--set={key}={n}" for key, n in (("num_attention_heads", 4), ("vocab_size", 30))]
    sizes.append("--set=num_key_value_heads=2")
    back = ("reshard", "--to", "single", *names, *sizes, tmp_path / "tp", tmp_path / "back")
    assert ckpt(*back).exit_code == 0
    # But for the rows that are of no word.
    ends = ("embeddings.weight", "output_layer.weight")
    with ckptkit.open(run) as before, ckptkit.open(tmp_path / "back") as after:
        assert set(after.arrays) == set(before.arrays)
        for name, array in after.arrays.items():
            rows = 30 if any(end in name for end in ends) else None
            assert same(array[...], before[name][:rows]), name


def test_transformers_computes_what_the_experts_of_megatron_do(
    written: Path, tmp_path: Path
) -> None:
    """These layers are not those of Transformer Engine, under whose names they come back."""
    run, out = written / "singletons", tmp_path / "hf"
    names = ("--names", "mixtral-megatron")
    ckpt("export", run, out, "--to-format", "hf", *names)
    experts: dict[str, Any] = {
        "intermediate_size": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    transformers.MixtralConfig(**LLAMA | experts).save_pretrained(out)
    model: Any = transformers.MixtralForCausalLM.from_pretrained(out, dtype=torch.float32)
    with np.load(written / "singletons.logits.npz") as file, torch.no_grad():
        logits = model(torch.from_numpy(file["words"])).logits.numpy()
        np.testing.assert_allclose(logits, file["logits"][..., :30], atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    ckpt("reshard", "--to", "single", *names, tmp_path / "again", tmp_path / "back")
    with ckptkit.open(run) as before, ckptkit.open(tmp_path / "back") as after:
        for name, array in after.arrays.items():
            first = before[name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")]
            assert np.array_equal(array[...], first[: array.shape[0]].astype(np.float32)), name
        assert len(after.arrays) == len([n for n in before.arrays if n.startswith("model/")])


def test_a_job_of_torch_goes_on_with_it(written: Path, tmp_path: Path) -> None:
    names = ckptkit.Selection(names="llama-megatron", exclude=("optimizer/*/param",))
    ckptkit.reshard(written / "reshardable", tmp_path, to="single", selection=names)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3.0)
    load(tmp_path, model=model, optimizer=optimizer, cast=True)
    assert optimizer.param_groups[0]["lr"] == 0.01
    head = model.lm_head.weight
    told = wanted(written, "reshardable")["optimizer/output_layer.weight/exp_avg"]
    assert same(optimizer.state[head]["exp_avg"].numpy(), told[:30])
    head.grad = torch.ones_like(head)
    optimizer.step()
    assert optimizer.state[head]["step"] == 3


def rename(place: Path, change: Callable[[str], str]) -> None:
    """Give what is in a checkpoint other names; what gets an empty one is gone."""
    file = place / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    entries, items = metadata.state_dict_metadata, metadata.storage_data
    metadata.state_dict_metadata = {new: v for k, v in entries.items() if (new := change(k))}
    metadata.storage_data = {
        replace(k, fqn=new): v for k, v in items.items() if (new := change(k.fqn))
    }
    metadata.all_local_plans = None
    file.write_bytes(pickle.dumps(metadata))


def test_a_layer_that_is_there_twice_is_refused(place: Path) -> None:
    name = "decoder.layers.1.self_attention.linear_proj.weight"
    rename(place, lambda old: name if old == "output_layer.weight" else old)
    with pytest.raises(FormatError, match="two tensors have this name"):
        ckptkit.open(place)


class TestBuckets:
    """No state is ever said to be of another parameter than it is."""

    @pytest.fixture
    def place(self, written: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(written / "buckets" / STEP, tmp_path / STEP))

    def right(self, place: Path, written: Path) -> set[str]:
        """The parameters whose states are there; these are right."""
        arrays = wanted(written, "buckets")
        found: set[str] = set()
        with ckptkit.open(place) as checkpoint:
            assert {name for name in arrays if name.startswith("model/")} <= set(checkpoint.arrays)
            for name in checkpoint.arrays:
                if name.startswith("optimizer/"):
                    assert same(checkpoint[name][...], arrays[name]), name
                    found.add(name.split("/")[1])
            lost = checkpoint.details.get("left_out", {}).get("optimizer.distributed", "")
            missing = {name.removeprefix("model/") for name in arrays if name.startswith("model/")}
            missing -= found
            assert bool(missing) == bool(lost)
            assert not missing or f"of {len(missing)} of 15 parameters" in lost
        return found

    def test_a_parameter_that_is_not_that_of_the_optimizer_is_not_found(
        self, place: Path, written: Path
    ) -> None:
        with ckptkit.open(place) as checkpoint:
            assert checkpoint.foreign is not None
            arrays = [a for a in checkpoint.foreign.arrays if a.role == "param"]
        for array in arrays:
            extent = array.extents[-1]
            file = place / extent.file
            good = file.read_bytes()
            bad = bytearray(good)
            for number in range(extent.box.size):
                bad[extent.offset + 2 * number] ^= 0x15
            file.write_bytes(bad)
            assert array.name.removeprefix("model/") not in self.right_but(array, place, written)
            file.write_bytes(good)

    def right_but(self, changed: ForeignArray, place: Path, written: Path) -> set[str]:
        """The parameters whose states are there; these are right."""
        arrays = wanted(written, "buckets")
        with ckptkit.open(place) as checkpoint:
            assert not same(checkpoint[changed.name][...], arrays[changed.name])
            there = [name for name in checkpoint.arrays if name.startswith("optimizer/")]
            assert all(same(checkpoint[name][...], arrays[name]) for name in there)
            return {name.split("/")[1] for name in there}

    def test_equal_parameters_of_unknown_modules_are_not_told_apart(
        self, place: Path, written: Path
    ) -> None:
        """All norms are ones here, and have the same size."""
        rename(place, lambda name: name.replace("linear_qkv.layer_norm_", "before."))
        with ckptkit.open(place) as checkpoint:
            there = {name.split("/")[1] for name in checkpoint.arrays if "/" in name[10:]}
            assert "decoder.layers.0.self_attention.linear_qkv.weight" in there
            assert not any("norm" in name or "before" in name for name in there)

    @pytest.mark.parametrize("what", ["bucket_idx_1.param", "bucket_idx_0.", "dp_group_idx_1."])
    def test_states_of_buckets_that_are_not_there_are_lost(
        self, what: str, place: Path, written: Path
    ) -> None:
        rename(place, lambda name: "" if what in name else name)
        assert len(self.right(place, written)) < 15

    def test_a_state_that_some_buckets_have_is_that_of_those(
        self, place: Path, written: Path
    ) -> None:
        rename(place, lambda name: "" if "bucket_idx_0.exp_avg" in name else name)
        assert len(self.right(place, written)) == 15

    def test_few_elements_are_read(self, written: Path) -> None:
        """Less than a thousandth of a large model; of this one it would be all of it."""
        assert sum(end - begin for begin, end in sampled(1 << 20)) == 256
        assert sampled(256) == [(0, 256)]
