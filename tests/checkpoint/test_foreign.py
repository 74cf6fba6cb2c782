"""What is no checkpoint of ckptkit is named as what it is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptkit
from ckptkit.errors import FormatError, NotFoundError
from ckptkit.foreign.readers import format_of
from tests.checkpoint.saving import Tensor, random_values, save


def pickled(path: Path) -> Path:
    path.write_bytes(pickle.dumps({}, protocol=2))
    return path


FILES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "old.pt": (pickled, "a pickle, as torch.save wrote before torch 1.6"),
}
FOLDERS = {
    "mp_rank_00 mp_rank_01": "a Megatron checkpoint of a file for each rank",
    "iter_0000100 latest_checkpointed_iteration.txt": "checkpoints of Megatron",
    "zarr.json model": "a plain Zarr folder",
}
READ = {
    # A step, an item in it with arrays of Zarr in a database or as files, and a step of version 1.
    "_CHECKPOINT_METADATA commit_success.txt default": "a checkpoint of Orbax",
    "_METADATA _sharding array_metadatas d manifest.ocdbt ocdbt.process_0": "a checkpoint of Orbax",
    "_METADATA _sharding params.dense.bias params.dense.kernel": "a checkpoint of Orbax",
    "orbax.checkpoint commit_success.txt state": "a checkpoint of Orbax",
    "global_step100 latest zero_to_fp32.py": "a DeepSpeed checkpoint",
    "metadata.json .metadata __0_0.distcp": "a Megatron checkpoint (torch_dist)",
    ".snapshot_metadata replicated": "a snapshot of torchsnapshot",
    ".metadata __0_0.distcp": "a DCP checkpoint (torch.distributed.checkpoint)",
    "last.ckpt": "a folder of torch.save files",
    "pytorch_model.bin config.json": "a Hugging Face model",
    "model-00001-of-00002.safetensors": "a Hugging Face model",
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_told_by_its_first_bytes(name: str, tmp_path: Path) -> None:
    write, what = FILES[name]
    path = write(tmp_path / name)
    with pytest.raises(NotFoundError) as caught:
        ckptkit.open(path)
    assert str(caught.value).startswith(f"{path}: no checkpoint of ckptkit, but {what}\nhint: ")
    path.write_bytes(b"")
    with pytest.raises(NotFoundError, match="no checkpoint: nothing there"):
        ckptkit.open(path)


@pytest.mark.parametrize("names", FOLDERS)
def test_a_folder_is_told_by_its_names(names: str, tmp_path: Path) -> None:
    for name in names.split():
        (tmp_path / name).touch()
    with pytest.raises(NotFoundError) as caught:
        ckptkit.plan_reshard(tmp_path, tmp_path / "new", to="fsdp:2")
    assert caught.value.what == f"no checkpoint of ckptkit, but {FOLDERS[names]}"


@pytest.mark.parametrize("names", READ)
def test_what_is_read_is_told_by_its_names_too(names: str, tmp_path: Path) -> None:
    for name in names.split():
        (tmp_path / name).touch()
    known = format_of(ckptkit.open_store(tmp_path))
    assert known is not None
    assert known.what == READ[names]
    with pytest.raises(FormatError):  # the files are empty
        ckptkit.open(tmp_path)


def test_a_file_of_an_unknown_kind_is_not_called_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(NotFoundError, match="a file of a kind that is not known"):
        ckptkit.open(tmp_path / "notes.txt")


def test_parts_of_a_step_are_told_from_what_is_foreign(tmp_path: Path) -> None:
    save(tmp_path, {"model/w": Tensor(random_values((3,)))}, step=1)
    (pack,) = tmp_path.glob("*/data/*/*.zip")
    for path, what in (
        (pack, "the pack of one rank of a step"),
        (tmp_path / "step-0000000001" / "manifest.msgpack", "the manifest of a step"),
    ):
        with pytest.raises(NotFoundError, match=what):
            ckptkit.open(path)
    (tmp_path / "notes.pt").touch()
    (tmp_path / "model.safetensors").touch()
    with ckptkit.open(tmp_path) as checkpoint:
        assert checkpoint.step == 1
