"""How much of a foreign checkpoint is read for a part of it, and that it is the right part; and how
many requests it takes to look at one.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import ckptkit
from ckptkit.checkpoint.read import reader
from ckptkit.model import Box
from tests.cli.programs import ckpt
from tests.foreign.contract import same
from tests.foreign.test_safetensors import random, write
from tests.servers.proxy import Proxy
from tests.servers.s3_server import Bucket
from tests.storage.counting import CountingStore

ROWS = random(1, (40, 1 << 16), np.float16)
"""Of 128 KiB each."""


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (8, 3)])
@pytest.mark.parametrize("shape", [(40, 1 << 16), (2, 20, 1 << 16), (40, 256, 256)])
def test_wide_rows_are_not_read_for_some_of_their_columns(
    shape: tuple[int, ...], ranks: int, rank: int, tmp_path: Path
) -> None:
    """As tensor parallelism cuts them: 64 KiB of each row, or 16."""
    values = ROWS.reshape(shape)
    write(tmp_path / "model.safetensors", {"w": values})
    store = CountingStore(ckptkit.open_store(tmp_path))
    dim = 1 if shape[1] == 256 else len(shape) - 1
    count = shape[dim] // ranks
    index = (*(slice(None),) * dim, slice(rank * count, (rank + 1) * count))
    with ckptkit.open(store) as checkpoint:
        store.reset()
        found = checkpoint["model/w"][index]
    assert same(found, values[index])
    assert store.bytes_read == found.nbytes


def test_short_rows_are_read_together(tmp_path: Path) -> None:
    values = ROWS.reshape(-1, 1 << 10)
    write(tmp_path / "model.safetensors", {"w": values})
    store = CountingStore(ckptkit.open_store(tmp_path))
    with ckptkit.open(store) as checkpoint:
        store.reset()
        assert same(checkpoint["model/w"][:, 100:600], values[:, 100:600])
    assert store.operations["read_into"] <= 3


def test_some_rows_go_straight_to_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model.safetensors", {"w": ROWS})
    monkeypatch.setattr(reader.ReadPlan, "_scatter", None)  # which would be another copy
    with ckptkit.open(CountingStore(ckptkit.open_store(tmp_path))) as checkpoint:
        assert same(checkpoint["model/w"][5:11], ROWS[5:11])


@pytest.mark.parametrize("least_lent", [1, 1 << 30])
def test_any_box_is_that_of_the_array(
    least_lent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is copied from the page cache, or read: together, row by row, or straight into
    memory that has gaps itself.
    """
    monkeypatch.setattr(reader, "_LEAST_LENT", least_lent)
    monkeypatch.setattr(reader, "_ROW_GAP", 8)
    monkeypatch.setattr(reader, "WIDEST_GAP", 4)
    monkeypatch.setattr("ckptkit.foreign.extents._CHUNK_BYTES", 256)
    arrays = {f"{len(s)}": random(3, s) for s in ((97,), (11, 23), (5, 6, 7), (3, 4, 5, 6))}
    write(tmp_path / "st" / "model.safetensors", arrays)
    # Of the second folder no array lies in its file as it is.
    turned = {
        n: torch.from_numpy(a.T.copy()).permute(*range(a.ndim)[::-1]) for n, a in arrays.items()
    }
    torch.save(turned, tmp_path / "x.pt")
    chance = np.random.default_rng(5)
    for place in (tmp_path / "st", tmp_path / "x.pt"):
        with ckptkit.open(place) as checkpoint:
            for _ in range(50):
                boxes = []
                for name, array in arrays.items():
                    ends = [np.sort(chance.choice(n + 1, 2, replace=False)) for n in array.shape]
                    box = Box(
                        tuple(int(low) for low, _ in ends),
                        tuple(int(high - low) for low, high in ends),
                    )
                    # Twice, as tied tensors are: side by side, and with gaps.
                    whole = np.zeros((*box.shape, 2), np.float32)
                    boxes += [(name, box, np.zeros(box.shape, np.float32)), (name, box, whole)]
                checkpoint.read_many(
                    [(f"model/{n}", b, m if m.ndim == b.ndim else m[..., 1]) for n, b, m in boxes]
                )
                for name, box, memory in boxes:
                    index = tuple(
                        slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True)
                    )
                    found = memory if memory.ndim == box.ndim else memory[..., 1]
                    assert np.array_equal(found, arrays[name][index]), (place, name, box)
                    assert memory.ndim == box.ndim or not memory[..., 0].any()


def test_a_folder_in_a_bucket_takes_a_request_for_each_file_and_one_for_the_index(
    bucket: Bucket,
) -> None:
    store = ckptkit.open_store(bucket.url + "/llama", bucket.options)
    index = {}
    for number in range(3):
        name, file = f"layers.{number}.w", f"model-{number + 1:05d}-of-00003.safetensors"
        header = {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
        text = json.dumps(header).encode()
        store.put(file, len(text).to_bytes(8, "little") + text + bytes(24))
        index[name] = file
    store.put("model.safetensors.index.json", json.dumps({"weight_map": index}).encode())
    with Proxy(str(bucket.options["endpoint"])) as proxy:
        reached = [f"{k}={v}" for k, v in bucket.through(proxy.endpoint).items()]
        options = [word for each in reached for word in ("--storage-option", each)]
        assert "in 3 files" in ckpt("show", f"{bucket.url}/llama", *options).stdout
    asked = [each.target for each in proxy.requests]
    listings = [each for each in asked if "list-type" in each]
    read = [each.rpartition("/")[2] for each in asked if "list-type" not in each]
    assert sorted(read) == sorted([*index.values(), "model.safetensors.index.json"])
    assert len(listings) <= 3
