"""What the commands say of checkpoints that other programs wrote."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ckptkit.cli.output import ABSENT, CORRUPT, STORAGE

import ckptkit
from ckptkit.checkpoint.read.stream import stored_arrays
from ckptkit.errors import FormatError, NotFoundError
from ckptkit.foreign import readers
from ckptkit.live import StateMismatchError, load
from ckptkit.model import Box
from tests.checkpoint.saving import Tensor, save
from tests.cli.programs import ckpt, document
from tests.foreign.contract import same
from tests.foreign.jobs import network
from tests.foreign.test_safetensors import random, write

ARRAYS = {"layers.0.weight": random(1, (6, 4)), "layers.0/odd": random(2, (3,)), "n": random(3, ())}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of one file."""
    write(tmp_path / "hf" / "model.safetensors", ARRAYS)
    return tmp_path / "hf"


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """A folder of numbered ones."""
    for number in (100, 20):
        shutil.copytree(model, tmp_path / "run" / f"checkpoint-{number}")
    (tmp_path / "run" / "step_7").mkdir()
    return tmp_path / "run"


def test_a_file_is_shown_without_a_look_into_the_folders_beside_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model / "photos").mkdir()
    looked_into, scandir = [], os.scandir

    def noting(folder: Any) -> Any:
        looked_into.append(str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", noting)
    with ckptkit.open(model / "model.safetensors") as checkpoint:
        assert len(checkpoint.names) == len(ARRAYS)
    assert str(model) in looked_into
    assert not any("photos" in folder for folder in looked_into)


def test_a_folder_of_data_beside_the_files_is_no_step_of_ours(model: Path) -> None:
    (model / "data").mkdir()
    (model / "data" / "words.txt").write_text("a b c")
    assert document("show", model)["format"] == "safetensors"
    (model / "model.safetensors").unlink()
    assert "no checkpoint: 1 other files" in ckpt("show", model).stderr


def test_show_names_the_format_and_claims_no_strategy(model: Path) -> None:
    head = ckpt("show", model).stdout.split("\n\n")[0]
    assert "format    safetensors, which has no checksums\n" in head
    assert "strategy  unknown" in head
    assert "in 1 file" in head
    found = document("show", model)
    assert (found["format"], found["strategy"], found["packs"]) == ("safetensors", None, 1)
    assert found["stored_bytes"] == (model / "model.safetensors").stat().st_size


def test_show_lists_the_names_here_and_there(model: Path) -> None:
    head, *lines = ckpt("show", model, "--mapping").stdout.splitlines()
    assert head.split() == ["NAME", "IN", "ITS", "FILES"]
    assert [line.split() for line in lines] == [
        ["model/layers.0%2Fodd", "layers.0/odd"],
        ["model/layers.0.weight", "layers.0.weight"],
        ["model/n", "n"],
    ]
    assert {a["theirs"] for a in document("show", model, "--mapping")["arrays"]} == ARRAYS.keys()


def test_a_step_of_ours_has_no_other_names(model: Path, tmp_path: Path) -> None:
    ckptkit.reshard(model, tmp_path / "ours", to="single")
    assert ckpt("show", tmp_path / "ours", "--mapping").exit_code == 2
    found = document("show", tmp_path / "ours")
    assert found["format"] is None
    assert found["strategy"]["text"] == "single"
    assert {array["theirs"] for array in found["arrays"]} == {None}


def test_ls_lists_numbered_ones_with_their_format(run: Path) -> None:
    found = document("ls", run)["steps"]
    assert [(s["step"], s["format"], s["committed"]) for s in found] == [
        (20, "a Hugging Face model", False),
        (100, "a Hugging Face model", False),
    ]
    lines = ckpt("ls", run).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "20", "100", "total"]
    assert lines[1].endswith("-         a Hugging Face model")
    with ckptkit.open(run) as newest:
        assert newest.step == 100


def test_of_two_with_one_number_nobody_knows_which_is_meant(run: Path) -> None:
    shutil.copytree(run / "checkpoint-20", run / "optim_step_100")
    found = document("ls", run)["steps"]
    assert [(s["step"], s["folder"]) for s in found] == [
        (20, "checkpoint-20"),
        (100, "checkpoint-100"),
        (100, "optim_step_100"),
    ]
    first, *twice, _ = ckpt("ls", run).stdout.splitlines()[1:]
    assert first.endswith("a Hugging Face model")
    for line, name in zip(twice, ("checkpoint-100", "optim_step_100"), strict=True):
        assert line.endswith(f"a Hugging Face model, in {name}")
    with pytest.raises(FormatError, match="the same number") as caught:
        ckptkit.open(run)
    assert caught.value.value == "['checkpoint-100', 'optim_step_100']"
    assert str(run / "checkpoint-100") in caught.value.hint
    # What nobody can read is not meant.
    (run / "optim_step_100" / "model.safetensors").rename(run / "optim_step_100" / "mp_rank_00")
    with ckptkit.open(run) as newest:
        assert newest.step == 100


def test_ls_lists_them_beside_steps_of_ours(run: Path) -> None:
    ckptkit.reshard(run / "checkpoint-20", run, to="fsdp:2")
    found = document("ls", run)["steps"]
    assert [(s["step"], s["strategy"]) for s in found] == [(20, "fsdp:2"), (20, None), (100, None)]
    lines = ckpt("ls", run).stdout.splitlines()
    assert lines[1].endswith("committed, in step-0000000020")
    assert lines[2].endswith("a Hugging Face model, in checkpoint-20")
    assert lines[3].endswith("a Hugging Face model")


def test_verify_says_that_there_is_nothing_to_compare_with(model: Path) -> None:
    result = ckpt("verify", model)
    assert result.exit_code == 0
    assert "ok: every tensor" in result.stdout
    assert "no checksums" in result.stdout
    found = document("verify", model, "--digest")
    assert (found["ok"], found["compared"]) == (True, False)
    assert found["digest"]["step"] == ckptkit.digest(model).step


def test_verify_finds_what_is_cut_short_or_overlaps(model: Path) -> None:
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    found = document("verify", model, code=3)
    assert [finding["kind"] for finding in found["findings"]] == ["corrupt"]
    assert "model.safetensors" in found["findings"][0]["where"]
    file.write_bytes(whole.replace(b"[96, 108]", b"[ 92,104]"))
    found = document("verify", model, code=3)
    assert "two tensors have the same bytes" in found["findings"][0]["what"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "complex64"])
def test_verify_finds_numbers_that_are_not_finite(dtype: str, tmp_path: Path) -> None:
    values = random(1, (300, 300)).astype(ckptkit.model.DType.of(dtype).numpy)
    values[7, 8] = np.nan
    values[299, 299] = np.inf
    place = write(tmp_path / "x.safetensors", {"bad": values, "good": np.arange(4)})
    assert document("verify", place)["ok"]
    (finding,) = document("verify", place, "--values", code=3)["findings"]
    assert finding["kind"] == "values"
    assert finding["where"] == f"{place}: model/bad"
    assert finding["what"] == "of 90000 elements 1 are NaN and 1 infinite"
    ckptkit.reshard(place, tmp_path / "ours", to="fsdp:2")
    assert not ckptkit.verify(tmp_path / "ours")
    assert [f.kind for f in ckptkit.verify(tmp_path / "ours", values=True)] == ["values"]


def test_verify_finds_them_in_the_halves_of_complex_numbers(tmp_path: Path) -> None:
    halves = np.zeros((300, 300, 2), np.float16)
    halves[7, 8] = np.nan
    halves[299, 299, 1] = np.inf
    values = halves.view(ckptkit.model.DType.of("complex_float16").numpy)[..., 0]
    save(tmp_path, {"model/bad": Tensor(values)}, strategy="single", step=1)
    (finding,) = ckptkit.verify(tmp_path, values=True)
    assert finding.what == "of 90000 elements 1 are NaN and 1 infinite"


def test_diff_and_unpack_take_them(model: Path, tmp_path: Path) -> None:
    ckptkit.reshard(model, tmp_path / "ours", to="fsdp:2")
    result = ckpt("diff", model, tmp_path / "ours")
    assert result.exit_code == 0
    assert "(A an unknown strategy, B fsdp:2)" in result.stdout
    assert ckpt("unpack", model, tmp_path / "plain").exit_code == 0
    assert (tmp_path / "plain" / "model" / "layers.0.weight" / "zarr.json").exists()


def test_a_chunk_too_large_to_be_read_whole_is_compared_with_nothing(tmp_path: Path) -> None:
    values = random(1, (32, 16))
    with ckptkit.open(write(tmp_path / "x.safetensors", {"w": values})) as checkpoint:
        found = np.empty(values.shape, "<u4")
        array = stored_arrays(checkpoint, chunk_bytes=256)["model/w"]
        array.fill([(array.name, Box.whole(values.shape), found)])
    assert same(found, values)


@pytest.mark.parametrize("command", ["prune", "rebuild"])
def test_what_others_wrote_is_not_changed(command: str, model: Path, run: Path) -> None:
    for place in (model, run):
        result = ckpt(command, place)
        assert result.exit_code in (2, 4)
        assert "error: " in result.stderr
    assert "the checkpoints of another program" in ckpt("prune", run).stderr
    assert "a Hugging Face model" in ckpt("rebuild", model).stderr


@pytest.mark.parametrize("is_export", [False, True])
def test_what_changes_while_it_is_read_becomes_nothing(
    is_export: bool, model: Path, tmp_path: Path
) -> None:
    """The copy would be of both."""

    def change(_: int) -> None:
        write(model / "model.safetensors", {name: value + 1 for name, value in ARRAYS.items()})

    work: Any = partial(ckptkit.reshard, to="single")
    if is_export:
        work = partial(ckptkit.export, to_format="hf")
    with pytest.raises(FormatError, match="its files were changed since it was opened"):
        work(model, tmp_path / "new", progress=change)
    with pytest.raises(NotFoundError):
        ckptkit.open(tmp_path / "new")


def test_of_a_strategy_that_nobody_knows_the_caller_is_believed(
    model: Path, tmp_path: Path
) -> None:
    result = ckpt("reshard", "--from", "fsdp:8", "--to", "fsdp:2", model, tmp_path / "ours")
    assert result.exit_code == 0, result.stderr


def test_two_objects_of_one_name_are_refused(tmp_path: Path) -> None:
    """They would become a step that cannot be opened."""
    torch.save({"model": {"w": torch.ones(2)}, 1: "one", "1": "other"}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match=r"two objects have this name .*extra/1"):
        ckptkit.open(tmp_path / "a.pt")


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-500"
    write(place / "model.safetensors", ARRAYS)
    beside = ("optimizer.pt", "pytorch_model.bin", "rng_state.pth", "scheduler.pt")
    for name in (*beside, "trainer_state.json", "config.json", "tokenizer.model"):
        (place / name).write_text("{}")
    unread = {*beside, "trainer_state.json"}
    assert document("show", place)["details"]["left_out"].keys() == unread
    assert "left out: optimizer.pt: a file that is not read\n" in ckpt("verify", place).stdout
    result = ckpt("import", place, tmp_path / "run")
    (line,) = result.stderr.splitlines()
    assert "left out: optimizer.pt, pytorch_model.bin, rng_state.pth and 2 more; " in line
    with ckptkit.open(tmp_path / "run") as checkpoint:
        assert checkpoint.details["left_out"].keys() == unread
        assert checkpoint.details["resharded"]["from"] == "unknown"
    # One file is itself, whatever lies beside it.
    assert document("show", place / "model.safetensors")["details"] == {}


def test_files_beside_the_model_are_named(tmp_path: Path) -> None:
    for name in ("model.pt", "ema.pt", "optimizer.pt", "scheduler.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.details["left_out"].keys() == {"ema.pt", "scheduler.pt"}


def test_an_optimizer_of_groups_without_names_is_elsewhere_and_a_load_says_so(
    tmp_path: Path,
) -> None:
    net = network()
    first, *others = net.parameters()
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": others}])
    net(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    states = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "memory": torch.ones(3).untyped_storage()}, tmp_path / "x.pt")
    with ckptkit.open(tmp_path / "x.pt") as checkpoint:
        assert checkpoint.foreign is not None
        name = "other/optimizer/state/0/exp_avg"
        assert checkpoint.foreign.theirs[name] == "optimizer.state.0.exp_avg"
        (why,) = checkpoint.details["left_out"].values()
        assert "ckptkit" not in why
    with pytest.raises(StateMismatchError) as caught:
        load(tmp_path / "x.pt", model=net, optimizer=optimizer)
    assert "only numbered" in caught.value.hint


@pytest.mark.parametrize("lost", ["gone", "cut", "a folder"])
def test_a_file_that_changes_once_it_was_looked_at_is_one_clear_error(
    lost: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a command was to do with it: none claims that all is well."""
    made, file = readers._manifest, model / "model.safetensors"
    whole = file.read_bytes()

    def changing(read: Any, folder: Any) -> Any:
        found = made(read, folder)
        if not file.is_file():
            return found
        file.unlink()
        if lost == "cut":
            file.write_bytes(whole[:40])
        elif lost == "a folder":
            file.mkdir()
        return found

    out, same = tmp_path / "out", shutil.copytree(model, tmp_path / "same")
    for arguments in (
        ("verify", model),
        ("verify", model, "--values"),
        ("verify", model, "--digest"),
        ("diff", model, same),
        ("reshard", "--to", "fsdp:2", model, out),
        ("import", model, out),
        ("export", model, out, "--to-format", "torch"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(readers, "_manifest", changing)
            result = ckpt(*arguments)
        assert isinstance(result.exception, SystemExit), arguments
        assert result.exit_code in (CORRUPT, ABSENT, STORAGE), arguments
        said = result.stderr or result.stdout
        assert said.count("error: ") <= 1
        assert "Traceback" not in said
        assert str(model) in said
        assert not out.is_file()
        assert not list(out.rglob("manifest.msgpack"))  # what was begun is no step
        shutil.rmtree(out, ignore_errors=True)
        if file.is_dir():
            file.rmdir()
        file.write_bytes(whole)
    assert ckpt("verify", model).exit_code == 0
