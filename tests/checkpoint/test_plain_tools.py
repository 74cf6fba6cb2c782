"""A checkpoint without ckptkit: unzipped for plain Zarr readers, or opened as the zip it is."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from zarr.storage import ZipStore

import ckptkit
from ckptkit.model import DTYPES
from ckptkit.storage import LocalStore
from tests.checkpoint.saving import Tensor, Values, bits, random_values, same, save, save_by

# What tensorstore has no name for.
NOT_IN_TENSORSTORE = {"complex_float16", "float8_e8m0fnu"}


def state(strategy_axis: str = "fsdp") -> dict[str, Tensor]:
    tensors = {
        f"model/{name}": Tensor(random_values((7, 5), name, 1), {strategy_axis: "shard(0)"})
        for name in DTYPES
    }
    tensors["model/odd%20name/100%25"] = Tensor(random_values((130,), "float32", 2))
    tensors["scalar"] = Tensor(random_values((), "bfloat16", 3))
    tensors["empty"] = Tensor(random_values((0, 3), "float32"))
    return tensors


def packs_of(run: Path) -> list[Path]:
    return sorted(run.glob("step-*/data/*/*.zip"))


def assert_zarr_holds(group: Any, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        assert same(np.asarray(group[name][...]), tensor.whole), name


def assert_tensorstore_holds(kvstore: Any, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.whole.dtype not in {DTYPES[dtype].numpy for dtype in NOT_IN_TENSORSTORE}:
            assert np.array_equal(bits(read_by_tensorstore(kvstore, name)), bits(tensor.whole))


def read_by_tensorstore(kvstore: Any, name: str) -> Values:
    spec = {"driver": "zarr3", "kvstore": {**kvstore, "path": kvstore["path"] + f"{name}/"}}
    return np.asarray(tensorstore.open(spec).result().read().result())


@pytest.mark.parametrize("strategy", ["single", "fsdp:4", "fsdp:3,tp:2"])
def test_unzipped_packs_are_a_plain_zarr_directory(tmp_path: Path, strategy: str) -> None:
    tensors = state()
    if strategy == "single":
        tensors = {name: Tensor(tensor.whole) for name, tensor in tensors.items()}
    save(tmp_path / "run", tensors, strategy=strategy)
    plain = tmp_path / "plain"
    for pack in packs_of(tmp_path / "run"):
        with zipfile.ZipFile(pack) as archive:
            assert archive.testzip() is None
            assert not [name for name in archive.namelist() if (plain / name).exists()]
            archive.extractall(plain)
    assert_zarr_holds(zarr.open_group(plain, mode="r"), tensors)
    assert_tensorstore_holds({"driver": "file", "path": f"{plain}/"}, tensors)


def test_groups_that_rank_0_has_no_part_in_are_in_the_zarr_directory_too(tmp_path: Path) -> None:
    def fill(writer: ckptkit.Writer) -> None:
        stage = writer.rank
        placed = {"pp": f"stage({stage})"}
        writer.add(f"model/stage{stage}/deep/w", np.full(3, stage), placements=placed)

    save_by(tmp_path / "run", fill, strategy="pp:3")
    assert ckptkit.verify(tmp_path / "run") == []
    assert [pack.name for pack in packs_of(tmp_path / "run")][-1] == "rank-00002.zip"
    for pack in packs_of(tmp_path / "run"):
        with zipfile.ZipFile(pack) as archive:
            archive.extractall(tmp_path / "plain")
    group: Any = zarr.open_group(tmp_path / "plain", mode="r")
    assert sorted(name for name, _ in group["model"].groups()) == ["stage0", "stage1", "stage2"]
    assert group["model/stage2/deep/w"][...].tolist() == [2, 2, 2]


def test_a_checkpoint_of_one_writer_opens_with_the_zip_store_of_zarr(tmp_path: Path) -> None:
    tensors = {name: Tensor(tensor.whole) for name, tensor in state().items()}
    save(tmp_path / "run", tensors, chunk_bytes=64)
    (pack,) = packs_of(tmp_path / "run")
    with ZipStore(pack, mode="r") as store:
        assert_zarr_holds(zarr.open_group(store, mode="r"), tensors)


def test_a_checkpoint_of_one_writer_opens_with_the_zip_driver_of_tensorstore(
    tmp_path: Path,
) -> None:
    tensors = {name: Tensor(tensor.whole) for name, tensor in state().items()}
    save(tmp_path / "run", tensors, chunk_bytes=64)
    (pack,) = packs_of(tmp_path / "run")
    base = {"driver": "file", "path": str(pack)}
    assert_tensorstore_holds({"driver": "zip", "base": base, "path": ""}, tensors)


def test_entries_of_any_padding_open_with_the_zip_driver_of_tensorstore(tmp_path: Path) -> None:
    # Names of every length modulo the alignment, so that paddings of every length occur.
    tensors = {"x" * length: Tensor(np.arange(3)) for length in range(1, 131)}
    save(tmp_path / "run", tensors)
    (pack,) = packs_of(tmp_path / "run")
    base = {"driver": "file", "path": str(pack)}
    assert_tensorstore_holds({"driver": "zip", "base": base, "path": ""}, tensors)


def test_the_usual_unzip_finds_every_byte_in_order(tmp_path: Path) -> None:
    save(tmp_path / "run", state(), strategy="fsdp:2")
    try:
        for pack in packs_of(tmp_path / "run"):
            subprocess.run(["unzip", "-tq", str(pack)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no unzip here")


def test_entries_are_stored_and_aligned(tmp_path: Path) -> None:
    save(tmp_path / "run", state(), strategy="fsdp:2", chunk_bytes=16)
    for pack in packs_of(tmp_path / "run"):
        data = pack.read_bytes()
        with zipfile.ZipFile(pack) as archive:
            for entry in archive.infolist():
                assert entry.compress_type == zipfile.ZIP_STORED
                header = data[entry.header_offset : entry.header_offset + 30]
                name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
                assert (entry.header_offset + 30 + name + extra) % 64 == 0


def test_as_many_files_as_writers(tmp_path: Path) -> None:
    save(tmp_path / "run", state(), strategy="fsdp:4", chunk_bytes=16)
    keys = [entry.key for entry in LocalStore(tmp_path / "run").list()]
    assert len(keys) == 4 + 1
