"""Tensors that are views of a step's files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit import Writer
from ckptkit.errors import CorruptionError
from ckptkit.live import load_state
from ckptkit.live.state.tensors import as_bits, dtype_of, torch_dtype
from ckptkit.live.state_dict import mapped
from ckptkit.model import DTYPES
from tests.checkpoint.saving import Tensor, files, random_values
from tests.checkpoint.saving import save as save_parts

LARGE = 300_000
"""Elements of four bytes that are more than one chunk at the usual size."""


def save_whole(location: Path, tensors: dict[str, torch.Tensor], **options: Any) -> Path:
    with Writer(location, step=1, **options) as writer:
        for name, tensor in tensors.items():
            bits, dtype = as_bits(name, tensor), dtype_of(name, tensor)
            writer.add(name, bits, shape=tuple(tensor.shape), dtype=dtype)
    return location


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is that of a pack."""
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(edge, 16) for edge in line.split()[0].split("-"))
        if first <= at < last:
            return line.endswith(".zip")
    return False


def pack_of(location: Path) -> Path:
    (pack,) = location.rglob("rank-00000.zip")
    return pack


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_small_tensor_of_any_dtype_is_a_view_of_the_file(tmp_path: Path, dtype: str) -> None:
    bits = torch.from_numpy(random_values((3, 5 * DTYPES[dtype].itemsize), "uint8"))
    if dtype == "bool":
        bits &= 1
    tensor = bits.view(torch_dtype(DTYPES[dtype]))
    save_whole(tmp_path, {"w": tensor})
    loaded = load_state(tmp_path, mmap=True)["w"]
    assert is_mapped(loaded)
    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(loaded.view(torch.uint8), bits)


def test_a_number_is_mapped_and_a_tensor_without_elements_is_read(tmp_path: Path) -> None:
    save_whole(tmp_path, {"step": torch.tensor(7.0), "none": torch.empty(0, 3)})
    loaded = load_state(tmp_path, mmap=True)
    assert is_mapped(loaded["step"])
    assert loaded["step"].shape == ()
    assert loaded["step"] == 7
    assert loaded["none"].shape == (0, 3)


def test_what_is_written_to_a_view_never_reaches_the_file(tmp_path: Path) -> None:
    save_whole(tmp_path, {"w": torch.arange(8.0)})
    before = files(tmp_path)
    loaded = load_state(tmp_path, mmap=True)["w"]
    loaded.fill_(-1)
    assert loaded.eq(-1).all()
    assert files(tmp_path) == before
    assert torch.equal(load_state(tmp_path, mmap=True)["w"], torch.arange(8.0))


def test_a_view_keeps_only_its_own_elements_for_whoever_stores_it(tmp_path: Path) -> None:
    save_whole(tmp_path, {"w": torch.ones(8), "other": torch.zeros(50_000)})
    loaded = load_state(tmp_path, mmap=True)["w"]
    assert loaded.untyped_storage().nbytes() == loaded.nbytes


def test_a_view_outlives_its_step(tmp_path: Path) -> None:
    save_whole(tmp_path, {"w": torch.arange(8.0)})
    loaded = load_state(tmp_path, mmap=True)["w"]
    pack_of(tmp_path).unlink()
    assert torch.equal(loaded, torch.arange(8.0))


def test_mapping_keeps_no_file_open(tmp_path: Path) -> None:
    save_whole(tmp_path, {"w": torch.ones(8)})
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 — of descriptors, not of paths
    loaded = load_state(tmp_path, mmap=True)
    assert is_mapped(loaded["w"])
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_tensor_of_several_chunks_is_read(tmp_path: Path) -> None:
    large = torch.arange(LARGE, dtype=torch.float32)
    save_whole(tmp_path, {"large": large, "small": torch.ones(2)})
    loaded = load_state(tmp_path, mmap=True)
    assert [is_mapped(loaded[name]) for name in ("large", "small")] == [False, True]
    assert torch.equal(loaded["large"], large)


def test_a_large_tensor_is_mapped_where_it_was_saved_as_one_chunk(tmp_path: Path) -> None:
    large = torch.arange(LARGE, dtype=torch.float32).reshape(500, -1)
    save_whole(tmp_path, {"large": large}, chunk_bytes=1 << 30)
    loaded = load_state(tmp_path, mmap=True)["large"]
    assert is_mapped(loaded)
    assert torch.equal(loaded, large)


def test_a_tensor_that_several_ranks_wrote_is_read(tmp_path: Path) -> None:
    cut = Tensor(np.arange(12.0).reshape(4, 3), {"fsdp": "shard(0)"})
    save_parts(tmp_path, {"cut": cut}, strategy="fsdp:2")
    loaded = load_state(tmp_path, mmap=True)["cut"]
    assert not is_mapped(loaded)
    assert torch.equal(loaded, torch.from_numpy(cut.whole))


def test_tensors_of_two_packs_are_views_of_both(tmp_path: Path) -> None:
    state = {
        f"w{owner}": Tensor(random_values((4,), seed=owner), {"zero1": f"owner({owner})"})
        for owner in range(2)
    }
    save_parts(tmp_path, state, strategy="zero1:2")
    loaded = load_state(tmp_path, mmap=True)
    for name, tensor in state.items():
        assert is_mapped(loaded[name])
        assert loaded[name].numpy().tobytes() == tensor.whole.tobytes()


def test_a_tied_tensor_is_one_view(tmp_path: Path) -> None:
    with Writer(tmp_path, step=1) as writer:
        writer.add("head", np.ones(4, np.float32))
        writer.add_alias("tail", "head")
    loaded = load_state(tmp_path, mmap=True)
    assert loaded["head"].data_ptr() == loaded["tail"].data_ptr()


def test_only_files_are_mapped(tmp_path: Path) -> None:
    location = f"memory://{tmp_path.name}"
    with Writer(location, step=1) as writer:
        writer.add("w", np.ones(4, np.float32))
    with ckptkit.open(location) as checkpoint:
        assert mapped(checkpoint, ["w"]) == {}
    assert torch.equal(load_state(location, mmap=True)["w"], torch.ones(4))


@pytest.mark.parametrize("length", [0, 100])
def test_a_pack_that_was_cut_short_is_refused_before_it_is_mapped(
    tmp_path: Path, length: int
) -> None:
    save_whole(tmp_path, {"w": torch.ones(1000)})
    os.truncate(pack_of(tmp_path), length)
    with pytest.raises(CorruptionError, match=rf"the pack has {length} bytes, written were"):
        load_state(tmp_path, mmap=True)


def test_a_missing_pack_is_an_error(tmp_path: Path) -> None:
    save_whole(tmp_path, {"w": torch.ones(8)})
    pack_of(tmp_path).unlink()
    with pytest.raises(CorruptionError, match="a pack of the step is missing"):
        load_state(tmp_path, mmap=True)


def test_views_of_a_file_can_go_to_another_device(tmp_path: Path) -> None:
    save_whole(tmp_path, {"w": torch.ones(8)})
    assert load_state(tmp_path, mmap=True, device="meta")["w"].device.type == "meta"


def test_what_the_system_does_not_map_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap: Cannot allocate memory")

    save_whole(tmp_path, {"w": torch.ones(8)})
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    loaded = load_state(tmp_path, mmap=True)["w"]
    assert not is_mapped(loaded)
    assert torch.equal(loaded, torch.ones(8))
