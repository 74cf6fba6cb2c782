"""What DeepSpeed wrote, and what is wrong with folders of it."""

from __future__ import annotations

import random
import re
import shutil
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptkit
from ckptkit.errors import CkptkitError, FormatError
from ckptkit.live import load
from tests.cli.programs import ckpt, document
from tests.foreign.contract import ForeignContract, Sample, same
from tests.foreign.frameworks.written import written_by
from tests.foreign.jobs import Wanted, wanted_of
from tests.live.pool import Pool

STRATEGIES = {
    "zero0-all": "ddp:2",
    "zero0-bf16": "ddp:2",
    "zero1": "zero1:2",
    "zero1-bf16": "zero1:2",
    "zero1-bf16-universal": "an unknown strategy",
    "zero2": "zero2:2",
    "zero2-alone": "single",
    "zero2-three": "zero2:3",
    "zero2-aligned": "zero2:2",
    "zero2-fp16": "zero2:2",
    "zero3": "zero3:2",
    "zero3-three": "zero3:3",
    "zero3-universal": "an unknown strategy",
    "pipe": "pp:2,zero1:2",
    "pipe-bf16": "pp:2,zero1:2",
    "tp": "zero1:2,tp:2",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_by("deepspeed", tmp_path_factory.mktemp("deepspeed"))


def wanted(written: Path, case: str) -> Wanted:
    with np.load(written / f"{case.removesuffix('-universal')}.npz") as file:
        return dict(file)


def tag_of(place: Path) -> Path:
    (latest,) = place.glob("latest*")
    return place / latest.read_text()


class TestWhatDeepSpeedWrites(ForeignContract):
    @pytest.fixture(scope="class", params=STRATEGIES)
    @classmethod
    def sample(cls, written: Path, request: pytest.FixtureRequest) -> Sample:
        """The folder of one tag: all its files count."""
        place = tag_of(written / request.param)
        files = (path for path in place.rglob("*") if path.is_file())
        parts = tuple(sorted(str(path.relative_to(place)) for path in files))
        if request.param.endswith("-universal"):
            # Of what has no state of its own DeepSpeed adds files that are not read.
            unread = ("zero/frozen", "zero/head", "zero/scale", "zero/seen")
            parts = tuple(part for part in parts if not part.startswith(unread))
        if request.param.startswith("pipe"):
            parts = tuple(part for part in parts if part != "layer_03-model_states.pt")  # is empty
        return Sample(place, wanted(written, request.param), parts)

    def test_opening_reads_no_tensor(self, sample: Sample, tmp_path: Path) -> None:
        """Between these small tensors there is more to read than they are."""

    def test_no_torch_and_no_pickle_is_needed(self, sample: Sample) -> None:
        """A process takes a second: one is enough."""
        if sample.place.parent.name == "zero3":
            super().test_no_torch_and_no_pickle_is_needed(sample)


@pytest.mark.parametrize("case", STRATEGIES)
def test_the_run_is_opened_at_its_tag_and_says_what_wrote_it(case: str, written: Path) -> None:
    with ckptkit.open(written / case) as checkpoint:
        assert checkpoint.written_by == STRATEGIES[case]
        assert checkpoint.step == 3
        assert set(checkpoint.arrays) == wanted(written, case).keys()
        for info in checkpoint.manifest.arrays:
            assert len(info.placements) == len(checkpoint.strategy.mesh.axes)


def objects_of(place: Path) -> dict[str, Any]:
    with ckptkit.open(place) as checkpoint:
        return {item.name: item.value for item in checkpoint.manifest.objects}


def test_tied_and_frozen_parameters_and_buffers_are_told_apart(written: Path) -> None:
    for case in ("zero1", "zero2", "zero3"):
        with ckptkit.open(written / case) as checkpoint:
            roles = {info.name: info.role for info in checkpoint.manifest.arrays}
            aliases = {alias.name: alias.alias_of for alias in checkpoint.manifest.aliases}
        assert aliases == {"model/head.weight": "model/embed.weight"}
        assert {name for name, role in roles.items() if role == "buffer"} == {
            "model/scale",
            "model/seen",
        }
        assert roles["model/frozen.weight"] == "param"
        assert "optimizer/frozen.weight/exp_avg" not in roles


def test_of_each_weight_there_is_one_copy_and_the_details_say_which(written: Path) -> None:
    with ckptkit.open(written / "zero2") as checkpoint:
        assert checkpoint.details["copies"] == "5 in bfloat16, left out for the master weights"
        kinds = {
            n: a.info.dtype.name for n, a in checkpoint.arrays.items() if n.startswith("model/")
        }
    assert kinds["model/up.weight"] == "float32"
    assert kinds["model/frozen.weight"] == "bfloat16"
    assert len(kinds) == 10


def test_the_optimizer_is_told_as_a_save_of_ours_tells_it(written: Path) -> None:
    for case in ("zero2-three", "zero3-three"):
        (told,) = objects_of(written / case)["optimizer"]
        assert told["kind"] == "AdamW"
        first, second = told["groups"]
        assert sorted(first["params"]) == ["embed.weight", "up.weight"]
        assert sorted(second["params"]) == ["norm.bias", "norm.weight", "up.bias"]
        assert first["options"]["weight_decay"] == 0.1
        assert second["options"]["weight_decay"] == 0.0


def test_what_is_saved_along_is_kept(written: Path) -> None:
    found = objects_of(written / "zero2-fp16")
    assert found["extra/epoch"] == 2
    assert found["extra/lr_scheduler"] == {"last_batch_iteration": 2}
    assert found["extra/global_steps"] == 3
    assert found["extra/loss_scaler"]["cur_scale"] == 256.0


def test_latest_says_which_tag_counts_and_else_it_is_the_newest(
    written: Path, tmp_path: Path
) -> None:
    place = tmp_path / "run"
    for number in (3, 20):
        shutil.copytree(tag_of(written / "zero1"), place / f"global_step{number}")
    shutil.copytree(tag_of(written / "zero1"), place / "best")
    torch.save({"w": torch.ones(2)}, place / "rng_state_0.pth")
    for latest, tag in (
        ("best\n", "best"),
        ("global_step3", "global_step3"),
        ("", "global_step20"),
    ):
        (place / "latest").write_text(latest)
        if not latest:
            (place / "latest").unlink()
        with ckptkit.open(place) as checkpoint:
            assert checkpoint.foreign is not None
            assert {key.partition("/")[0] for key in checkpoint.foreign.files} == {tag}
            assert checkpoint.details["left_out"].keys() == {"rng_state_0.pth"}
    (place / "latest").write_text("global_step7")
    with pytest.raises(FormatError, match="the folder that it names is missing"):
        ckptkit.open(place)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes of DeepSpeed's names, so that torch loads its files and saves them again."""
    for full in (
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    ):
        module, _, name = full.rpartition(".")
        bases = (int,) if name == "ZeroStageEnum" else ()
        stand_in = type(name, bases, {"__module__": module})
        made = types.ModuleType(module)
        setattr(made, name, stand_in)
        parts = module.split(".")
        for end in range(1, len(parts)):
            above = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, above, types.ModuleType(above))
        monkeypatch.setitem(sys.modules, module, made)


def changed(file: Path, change: Callable[[Any], object]) -> None:
    tree = torch.load(file, weights_only=False)
    change(tree)
    torch.save(tree, file)


@pytest.fixture(params=["zero1", "zero2-three", "zero3-three"])
def folder(request: pytest.FixtureRequest, written: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint's folder, to be damaged."""
    return Path(shutil.copytree(tag_of(written / request.param), tmp_path / "global_step3"))


def files_of(folder: Path, what: str) -> list[Path]:
    return sorted(folder.glob(f"*{what}_states.pt"))


def test_every_file_that_is_missing_is_named(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        moved = file.rename(folder.parent / "aside")
        with pytest.raises(FormatError) as caught:
            ckptkit.open(folder)
        assert file.name in str(caught.value)
        moved.rename(file)


def test_without_any_file_of_the_optimizer_the_weights_are_missing(folder: Path) -> None:
    for file in files_of(folder, "optim"):
        file.unlink()
    with pytest.raises(FormatError, match="files of the optimizer are missing"):
        ckptkit.open(folder)


def test_files_of_two_saves_are_not_mixed(folder: Path, stand_ins: None) -> None:
    """The step of the optimizer is another one, or its rate; or the model is older."""

    def other_step(tree: Any) -> None:
        said = tree["optimizer_state_dict"]
        said = said.get("base_optimizer_state", said.get("optimizer_state_dict"))
        said["state"][0]["step"] += 1

    def other_rate(tree: Any) -> None:
        said = tree["optimizer_state_dict"]
        said = said.get("base_optimizer_state", said.get("optimizer_state_dict"))
        said["param_groups"][0]["lr"] = 0.5

    file = files_of(folder, "optim")[1]
    whole = file.read_bytes()
    for change, what in ((other_step, "its step is not"), (other_rate, "its options of")):
        changed(file, change)
        with pytest.raises(FormatError, match=what) as caught:
            ckptkit.open(folder)
        assert file.name in str(caught.value)
        file.write_bytes(whole)
    for model in files_of(folder, "model"):
        changed(model, lambda tree: tree.update(global_steps=2))
    with pytest.raises(FormatError, match="the model is of step 2, the optimizer has made 3"):
        ckptkit.open(folder)


def test_more_files_than_the_checkpoint_has_ranks_are_refused(folder: Path) -> None:
    last = files_of(folder, "optim")[-1]
    number = int(re.findall(r"pp_rank_(\d)", last.name)[0])
    shutil.copy(last, folder / last.name.replace(f"rank_{number}", f"rank_{number + 1}"))
    with pytest.raises(FormatError, match="there are files of"):
        ckptkit.open(folder)
    (folder / last.name.replace(f"rank_{number}", f"rank_{number + 1}")).unlink()
    shutil.copy(last, folder / f"bf16_{last.name}")
    with pytest.raises(FormatError, match="two files of one rank"):
        ckptkit.open(folder)


def of_shapes(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda tree: change(tree["param_shapes"])


def swap(shapes: Any) -> None:
    items = list(shapes[0].items())
    shapes[0] = dict([items[1], items[0], *items[2:]])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (of_shapes(lambda s: s[0].update({"up.weight": torch.Size([11, 500])})), "by param_shapes"),
        (
            of_shapes(lambda s: s[0].update(more=torch.Size([40]))),
            "by param_shapes|not one padding",
        ),
        (of_shapes(lambda s: s[0].pop("up.weight")), "by param_shapes|not one padding"),
        (of_shapes(lambda s: s.append(s[0])), "a parameter is twice"),
        (lambda tree: tree.update(param_shapes=[[1]]), "no list of shapes"),
        (lambda tree: tree.update(param_shapes={}), "no list of shapes"),
        (
            lambda tree: tree.update(shared_params={"head.weight": "up.weight"}),
            "head.weight is not of the shape of up.weight|no file has the values",
        ),
        (lambda tree: tree.update(global_steps=np.ones(2)), "global_steps: must be an integer"),
        (lambda tree: tree.update(dp_world_size=5), "5 ranks belong together"),
        (lambda tree: tree.update(dp_world_size="x"), "must be an integer"),
        (lambda tree: tree.update(module=[]), "no model"),
        (lambda tree: tree["module"].pop("norm.bias"), "has no norm.bias"),
    ],
)
def test_a_model_that_says_something_else_than_the_optimizer_is_refused(
    change: Callable[[Any], object], what: str, folder: Path, stand_ins: None
) -> None:
    for file in files_of(folder, "model"):
        changed(file, change)
    with pytest.raises(FormatError, match=what):
        ckptkit.open(folder)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (of_shapes(swap), r"the file says that .* is at \(35, 5\)"),
        (of_shapes(lambda s: s.append({})), "the model has 2 groups of parameters"),
        (lambda tree: tree["module"].update({"norm.bias": torch.ones(6)}), r"has no norm.bias of"),
    ],
)
def test_stages_1_and_2_say_where_each_parameter_is(
    change: Callable[[Any], object], what: str, written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "zero1"), tmp_path / "x"))
    changed(place / "mp_rank_00_model_states.pt", change)
    with pytest.raises(FormatError, match=what):
        ckptkit.open(place)


def test_fragments_name_the_parameters_where_they_are_in_order(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    """Those of gradients by turns (`round_robin_gradients`) are not."""
    for case in ("zero1", "zero2"):
        place = Path(shutil.copytree(tag_of(written / case), tmp_path / case))
        changed(place / "mp_rank_00_model_states.pt", lambda tree: tree.update(param_shapes=None))
    with ckptkit.open(tmp_path / "zero1") as checkpoint:
        name = "optimizer/up.weight/exp_avg"
        assert same(checkpoint[name][...], wanted(written, "zero1")[name])
    with pytest.raises(FormatError, match="no list of shapes"):
        ckptkit.open(tmp_path / "zero2")


def of_optimizer(change: Callable[[Any, Any], object]) -> Callable[[Any], object]:
    """Change what an optimizer's file says, and the state of torch in it."""

    def apply(tree: Any) -> None:
        said = tree["optimizer_state_dict"]
        change(said, said.get("base_optimizer_state", said.get("optimizer_state_dict")))

    return apply


def weights(said: Any) -> Any:
    return said.get("fp32_flat_groups", said.get("single_partition_of_fp32_groups"))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda said, _: said.update(partition_count=4), "cut for .* ranks, there are the files"),
        (lambda said, _: said.update(partition_count=[4, 2]), "cut for .* ranks"),
        (lambda said, _: said.update(partition_count=np.ones(2)), "cut for .* ranks"),
        (lambda said, _: weights(said).pop(), "groups"),
        (
            lambda said, _: weights(said).__setitem__(0, torch.ones(7)),
            "of one length|as long as|by param_shapes",
        ),
        (lambda said, _: weights(said).__setitem__(0, torch.ones(7, 2)), "no row of numbers"),
        (lambda said, _: weights(said).__setitem__(0, None), "no row of numbers"),
        (lambda _, inner: inner["state"][0].update(exp_avg=torch.ones(3)), "of exp_avg are not"),
        (lambda _, inner: inner["state"][0].pop("exp_avg"), "of exp_avg are not|is missing"),
        (lambda _, inner: inner.pop("param_groups"), "not the state of an optimizer"),
        (lambda said, _: said.clear(), "no master weights"),
        (
            lambda said, _: weights(said).__setitem__(0, weights(said)[0].to(torch.float16)),
            "are of several types",
        ),
    ],
)
def test_a_rank_that_says_something_else_than_the_others_is_refused(
    change: Callable[[Any, Any], object], what: str, folder: Path, stand_ins: None
) -> None:
    file = files_of(folder, "optim")[-1]
    changed(file, of_optimizer(change))
    with pytest.raises(FormatError, match=what) as caught:
        ckptkit.open(folder)
    assert str(folder) in str(caught.value)


def test_what_a_pipeline_has_twice_is_read_once(written: Path) -> None:
    with ckptkit.open(written / "pipe") as checkpoint:
        cuts = {info.name: str(info.placements[0]) for info in checkpoint.manifest.arrays}
    assert cuts["model/1.weight"] == cuts["optimizer/1.weight/exp_avg"] == "stage(0)"
    assert cuts["model/4.weight"] == "stage(1)"
    assert cuts["model/tied_modules.embed.weight"] == "replicate"
    (told,) = objects_of(written / "pipe")["optimizer"]
    (group,) = told["groups"]
    assert group["params"].count("tied_modules.embed.weight") == 1
    assert {"1.weight", "4.bias"} < set(group["params"])


def test_how_ranks_of_tensor_parallelism_cut_is_told(written: Path) -> None:
    with ckptkit.open(written / "tp") as checkpoint:
        cuts = {info.name: str(info.placements[1]) for info in checkpoint.manifest.arrays}
    assert cuts["model/1.qkv_proj.weight"] == "shard(0, blocks=[4,4,4])"
    assert cuts["optimizer/1.down_proj.weight/exp_avg"] == "shard(1)"
    assert cuts["model/1.up_proj.bias"] == "shard(0)"
    assert cuts["model/0.weight"] == cuts["model/1.scale"] == "replicate"


INFO = "universal_checkpoint_info"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda tree: tree.pop(INFO), "nothing says how they are cut"),
        (
            lambda tree: tree[INFO].update(parameter_to_average_patterns=[".*norm.*"]),
            r"1.norm.weight cannot be put together",
        ),
        (
            lambda tree: tree[INFO]["autotp_unsupported_parameter_patterns"].update({".*": "x"}),
            "cannot be put together",
        ),
        (lambda tree: tree[INFO].update(sub_param_shard_widths={}, version=0.3), "^$"),
        (
            lambda tree: tree[INFO]["sub_param_shard_widths"].update(
                {r"^1\.qkv_proj\.weight$": [[1, 3], [2, 2], [2, 2]]}
            ),
            "do not fit together along dim 0",
        ),
        (
            lambda tree: tree[INFO]["sub_param_shard_widths"].update(
                {r"^1\.qkv_proj\.weight$": [[4]]}
            ),
            "not a width for each rank",
        ),
        (
            lambda tree: tree[INFO].update(tp_replicated_parameter_patterns=["(a*)*b", "("]),
            "a pattern that is not tried",
        ),
        (lambda tree: tree[INFO].update(tp_replicated_parameter_patterns=["("]), "not a pattern"),
        (lambda tree: tree[INFO].update(tp_replicated_parameter_patterns=4), "list of patterns"),
        (
            lambda tree: tree["checkpoint_parallel_dimensions"].update(pp_degree=2),
            "2 stages of 2 ranks",
        ),
    ],
)
def test_parts_of_tensors_that_nobody_knows_to_join_are_refused(
    change: Callable[[Any], object], what: str, written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "tp"), tmp_path / "x"))
    for file in files_of(place, "model"):
        changed(file, change)
    if what == "^$":  # cut evenly, as it was before the widths were told
        ckptkit.open(place).close()
        return
    with pytest.raises(FormatError, match=what):
        ckptkit.open(place)


def test_ranks_and_stages_at_different_steps_are_refused(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    for case in ("tp", "pipe"):
        place = Path(shutil.copytree(tag_of(written / case), tmp_path / case))

        def other_step(_: Any, inner: Any) -> None:
            inner["state"][0]["step"] -= 1

        for rank in (0, 1):
            changed(
                place / f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt", of_optimizer(other_step)
            )
        with pytest.raises(FormatError, match="step is not the same in all files"):
            ckptkit.open(place)
        shutil.copytree(tag_of(written / case), tmp_path / f"{case}-old")
        model = tmp_path / f"{case}-old" / "mp_rank_01_model_states.pt"
        changed(model, lambda tree: tree.update(global_steps=4))
        with pytest.raises(FormatError, match="global_steps is not that of rank 0"):
            ckptkit.open(model.parent)


def test_a_file_of_a_layer_or_of_a_parameter_that_is_missing_is_named(
    written: Path, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "pipe"), tmp_path / "pipe"))
    (place / "layer_01-model_states.pt").unlink()
    with pytest.raises(FormatError, match=r"the model has no 1.(weight|bias) of"):
        ckptkit.open(place)
    place = Path(shutil.copytree(tag_of(written / "zero3-universal"), tmp_path / "universal"))
    (place / "zero" / "up.bias" / "exp_avg_sq.pt").unlink()
    with pytest.raises(FormatError, match=r"a file of a parameter is missing") as caught:
        ckptkit.open(place)
    assert "up.bias/exp_avg_sq.pt" in str(caught.value)


def test_a_universal_checkpoint_keeps_what_only_the_model_has_as_it_was(
    written: Path, tmp_path: Path
) -> None:
    """Beside the weights DeepSpeed writes buffers as float32, and of tied weights the copy."""
    place = tmp_path / "run"
    shutil.copytree(written / "zero1-bf16", place)
    shutil.copytree(written / "zero1-bf16-universal", place, dirs_exist_ok=True)
    (place / "latest").unlink()
    with ckptkit.open(place) as checkpoint:
        assert checkpoint["model/seen"][...].dtype == np.int64
        assert checkpoint.foreign is not None
        assert all("_universal/" in key for key in checkpoint.foreign.files)


class Custom:
    pass


def test_a_class_of_somebody_else_is_refused_by_name(folder: Path, stand_ins: None) -> None:
    file = files_of(folder, "optim")[0]
    changed(file, lambda tree: tree.update(client=Custom()))
    with pytest.raises(FormatError, match="Custom") as caught:
        ckptkit.open(folder)
    assert file.name in str(caught.value)


def test_experts_are_refused_by_the_name_of_the_file(folder: Path) -> None:
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").touch()
    with pytest.raises(FormatError, match="experts, which ranks") as caught:
        ckptkit.open(folder)
    assert "layer_0_expert_1" in str(caught.value)


def test_a_byte_that_changed_gives_a_checkpoint_or_an_error_of_ours(folder: Path) -> None:
    store = ckptkit.open_store("memory://changed-deepspeed")
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    dice = random.Random(7)
    for file in (files_of(folder, "model")[-1], files_of(folder, "optim")[0]):
        whole = file.read_bytes()
        end = whole.index(b"PK\x03\x04", 100)
        for _ in range(100):
            data = bytearray(whole)
            data[dice.randrange(end)] = dice.choice([0, 1, 3, 75, dice.randrange(256)])
            store.put(file.name, bytes(data))
            with suppress(CkptkitError):
                ckptkit.open(store).close()
        store.put(file.name, whole)


def test_all_commands_take_a_folder_of_deepspeed(written: Path, tmp_path: Path) -> None:
    place, run = written / "zero3", tmp_path / "run"
    shown = ckpt("show", place)
    assert "format    DeepSpeed, which has no checksums" in shown.stdout
    assert "strategy  zero3:2" in shown.stdout
    mapping = ckpt("show", place, "--mapping").stdout
    assert "optimizer/up.weight/exp_avg" in mapping
    assert "up.weight.exp_avg" in mapping
    assert document("ls", place)["steps"][0]["format"] == "a DeepSpeed checkpoint"
    assert document("verify", place)["ok"]
    assert document("import", place, run, "--step", "12")["step"] == 12
    assert document("import", place, run)["step"] == 3
    assert ckpt("diff", place, run).exit_code == 0
    assert document("reshard", place, tmp_path / "four", "--to", "fsdp:4")["to"] == "fsdp:4"
    assert ckpt("diff", place, tmp_path / "four").exit_code == 0
    exported = ckpt("export", place, tmp_path / "hf", "--to-format", "hf")
    assert exported.exit_code == 0, exported.stderr
    with ckptkit.open(tmp_path / "hf") as checkpoint:
        arrays = wanted(written, "zero3")
        assert same(checkpoint["model/up.weight"][...], arrays["model/up.weight"])


class Model(torch.nn.Module):
    """The parameters of what was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.norm = torch.nn.LayerNorm(5)
        self.up = torch.nn.Linear(5, 11)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))


def filled(folder: str) -> Wanted:
    """What a job on two ranks has after it loaded a checkpoint under FSDP."""
    net = Model()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    load(folder, model=net, optimizer=optimizer, cast=True)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.00477, rel=1e-2)
    return wanted_of(net, optimizer)


def test_a_job_under_fsdp_goes_on_with_it(gloo: Pool, written: Path) -> None:
    for case in ("zero1", "zero3"):
        arrays = wanted(written, case)
        (found, _) = gloo.run(2, filled, str(written / case))
        assert found.keys() | {"other/rng"} == arrays.keys()
        for name, value in found.items():
            if name.startswith("model/frozen") and case == "zero3":
                continue  # in bfloat16 there
            assert np.array_equal(value, arrays[name]), name
