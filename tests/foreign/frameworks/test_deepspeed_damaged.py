"""Folders of DeepSpeed that something is wrong with are refused: what is missing, of another save,
or says something else than the rest.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.errors import CkptkitError, FormatError
from tests.foreign.contract import same
from tests.foreign.frameworks.deepspeed_folders import tag_of, wanted, written_as


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
    more = folder / last.name.replace(f"rank_{number}", f"rank_{number + 1}")
    written_as(more, last.read_bytes(), last.name)
    with pytest.raises(FormatError, match="there are files of"):
        ckptkit.open(folder)
    more.unlink()
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
        (
            lambda tree: tree.update(shared_params={"head.weight": "up.weight"}),
            "head.weight is not of the shape of up.weight",
        ),
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


def test_tied_parameters_are_known_where_only_their_copies_tell(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    """Of several files of models only the first says which are tied."""
    place = Path(shutil.copytree(tag_of(written / "zero1-bf16"), tmp_path / "x"))
    changed(place / "mp_rank_00_model_states.pt", lambda tree: tree.update(shared_params={}))
    with ckptkit.open(place) as checkpoint:
        arrays = wanted(written, "zero1-bf16")
        assert same(checkpoint["model/head.weight"][...], arrays["model/head.weight"])


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


def test_an_elastic_checkpoint_keeps_the_step_that_its_groups_count(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "zero1"), tmp_path / "x"))

    def elastic(said: Any, inner: Any) -> None:
        state = dict(inner["state"][0])
        step = state.pop("step").item()
        said.update(base_optimizer_state=[state], base_optimizer_state_step=step)

    for file in files_of(place, "optim"):
        changed(file, of_optimizer(elastic))
    with ckptkit.open(place) as checkpoint:
        (told,) = (it.value for it in checkpoint.manifest.objects if it.name == "optimizer")
        assert told[0]["values"]["up.weight"] == {"step": 3.0}
    changed(file, of_optimizer(lambda said, _: said.update(base_optimizer_state_step=2)))
    with pytest.raises(FormatError, match="its step is not that of rank 0"):
        ckptkit.open(place)


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


def test_a_state_that_is_a_list_is_not_taken_for_pieces_of_ranks(
    folder: Path, stand_ins: None
) -> None:
    def betas(_: Any, inner: Any) -> None:
        for state in inner["state"].values():
            state["betas"] = [0.5]

    for file in files_of(folder, "optim"):
        changed(file, of_optimizer(betas))
    with ckptkit.open(folder) as checkpoint:
        assert "optimizer/up.weight/betas" not in checkpoint.arrays


def test_a_rank_of_tensor_parallelism_that_lacks_a_tensor_or_a_state_is_named(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "tp"), tmp_path / "tp"))
    model = place / "mp_rank_01_model_states.pt"
    whole = model.read_bytes()
    changed(model, lambda tree: tree["module"].pop("1.scale"))
    with pytest.raises(FormatError, match=r"this rank .* has no 1.scale, and another") as caught:
        ckptkit.open(place)
    assert model.name in str(caught.value)
    model.write_bytes(whole)
    for file in sorted(place.glob("*mp_rank_01_optim_states.pt")):
        changed(file, of_optimizer(lambda _, inner: inner["state"][0].pop("exp_avg_sq")))
    with pytest.raises(FormatError, match=r"has no state exp_avg_sq of ") as caught:
        ckptkit.open(place)
    assert model.name in str(caught.value)


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
            lambda tree: tree[INFO].update(parameter_with_sub_params=[{"patterns": 4}]),
            "list of patterns",
        ),
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


def test_before_the_widths_were_told_a_number_of_even_parts_was(
    written: Path, stand_ins: None, tmp_path: Path
) -> None:
    place = Path(shutil.copytree(tag_of(written / "tp"), tmp_path / "x"))

    def older(version: float, parts: int) -> Callable[[Any], object]:
        def change(tree: Any) -> None:
            info = tree[INFO]
            for each in info["parameter_with_sub_params"]:
                each["shape"] = (parts, *each["shape"][1:])
            info.update(sub_param_shard_widths={}, affine_map={})
            info["universal_checkpoint_version"] = version

        return change

    def write(version: float, parts: int) -> None:
        for file in files_of(place, "model"):
            changed(file, older(version, parts))

    write(0.2, 3)
    with ckptkit.open(place) as checkpoint:
        name = "model/1.qkv_proj.weight"
        assert same(checkpoint[name][...], wanted(written, "tp")[name])
    for version, parts, what in ((0.4, 3, "nothing says how wide"), (0.2, 5, "do not fit")):
        write(version, parts)
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


def test_a_file_of_a_parameter_that_has_a_number_is_refused(written: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(tag_of(written / "zero3-universal"), tmp_path / "universal"))
    for value, what in (
        (3, "no parameter is in the file"),
        (torch.tensor(3.0), r"has the shape \("),
    ):
        torch.save(value, place / "zero" / "up.bias" / "fp32.pt")
        with pytest.raises(FormatError, match=what) as caught:
            ckptkit.open(place)
        assert "up.bias/fp32.pt" in str(caught.value)


def test_a_parameter_without_elements_may_be_the_last(written: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(tag_of(written / "zero3-three"), tmp_path / "x"))
    with ckptkit.open(place) as step:
        before = step.names
    empty = of_shapes(lambda shapes: shapes[-1].update(empty=torch.Size([0, 3])))
    for file in files_of(place, "model"):
        changed(file, empty)
        changed(file, lambda tree: tree["module"].update(empty=torch.zeros(0, 3)))
    with ckptkit.open(place) as step:
        assert step["model/empty"].read().shape == (0, 3)
        assert {*step.names} - {*before} >= {"model/empty"}


class Custom:
    pass


def test_a_class_of_somebody_else_is_refused_by_name(folder: Path, stand_ins: None) -> None:
    file = files_of(folder, "optim")[0]
    changed(file, lambda tree: tree.update(client=Custom()))
    with pytest.raises(FormatError, match="Custom") as caught:
        ckptkit.open(folder)
    assert file.name in str(caught.value)


def test_an_expert_that_is_not_of_the_model_is_refused(folder: Path) -> None:
    (folder / "layer_0_expert_1_mp_rank_00_model_states.pt").touch()
    with pytest.raises(FormatError, match="the layer has 0 experts") as caught:
        ckptkit.open(folder)
    assert "layer_0_expert_1" in str(caught.value)


def test_shards_in_groups_of_ranks_are_refused_by_their_name(folder: Path, stand_ins: None) -> None:
    """What is missing then are no files, which would be said else."""
    for model in files_of(folder, "model"):
        changed(
            model, lambda tree: tree["ds_config"]["zero_optimization"].update(mics_shard_size=2)
        )
    files_of(folder, "optim")[-1].unlink()
    with pytest.raises(FormatError, match=r"\(MiCS\) are not read here") as caught:
        ckptkit.open(folder)
    assert "mics_shard_size 2" in str(caught.value)
    assert "save it with `ckptkit.live.save`" in str(caught.value)


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
