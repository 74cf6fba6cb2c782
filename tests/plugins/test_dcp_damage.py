"""Under DCP, steps that are damaged: what a job does about them, and values that are none; and what
saves and loads leave behind.
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckptkit
from ckptkit.checkpoint.write.damage import REPLACEABLE
from ckptkit.errors import FormatError
from ckptkit.plugins.dcp import Reader, Writer
from ckptkit.plugins.dcp.names import Names, value_in
from tests.live.pool import Pool
from tests.plugins.planners import PlansAnew
from tests.plugins.test_dcp import differing, emptied


def fall_back(folder: str) -> int:
    state = {"model": {"w": torch.arange(8.0), "b": torch.ones(2)}, "step": 1}
    save(state, storage_writer=Writer(folder, step=1))
    save({**state, "step": 2}, storage_writer=Writer(folder, step=2))
    dist.barrier()
    if dist.get_rank() == 1:
        damage(Path(folder) / "step-0000000002", b"model/w")
    dist.barrier()
    found = emptied(state)
    with pytest.raises(CheckpointException, match=r"checksum"):
        load(found, storage_reader=Reader(folder))
    logging.disable(logging.CRITICAL)
    reader = Reader(folder, fallback=True)
    load(found, storage_reader=reader)
    logging.disable(logging.NOTSET)
    assert not differing(state, found)
    assert reader.step is not None
    # The job comes to that number again; what is sound then is no longer replaced.
    save({**state, "step": 2}, storage_writer=Writer(folder, step=2))
    with pytest.raises(CheckpointException, match="committed already"):
        save(state, storage_writer=Writer(folder, step=2))
    return reader.step


def damage(step: Path, array: bytes) -> None:
    """Flip a bit of the first chunk of an array."""
    (pack,) = [p for p in step.rglob("*.zip") if array + b"/c/0" in p.read_bytes()]
    data = bytearray(pack.read_bytes())
    at = data.index(array + b"/c/0")
    header = data.rindex(b"PK\x03\x04", 0, at)
    name, extra = (int.from_bytes(data[header + n : header + n + 2], "little") for n in (26, 28))
    data[header + 30 + name + extra] ^= 1
    pack.write_bytes(data)


def test_all_ranks_fall_back_to_the_step_before_a_damaged_one(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, fall_back, str(tmp_path)) == [1, 1]
    assert not ckptkit.verify(tmp_path)
    assert ckptkit.Run(tmp_path).steps() == [1, 2]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("rows", [6, 10])
def test_a_tensor_of_another_shape_in_the_step_before_is_refused(tmp_path: Path, rows: int) -> None:
    save({"model": {"w": torch.ones(rows, 4)}}, storage_writer=Writer(tmp_path, step=1))
    save({"model": {"w": torch.ones(8, 4)}}, storage_writer=Writer(tmp_path, step=2))
    damage(tmp_path / "step-0000000002", b"model/w")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"model": {"w": torch.zeros(8, 4)}}, storage_reader=Reader(tmp_path, fallback=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_planner_that_drops_what_ranks_are_told_cannot_fall_back(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}}
    save(state, storage_writer=Writer(tmp_path, step=1))
    load(state, storage_reader=Reader(tmp_path), planner=PlansAnew())
    with pytest.raises(CheckpointException, match=r"(?s)PlansAnew.*dataclasses\.replace"):
        load(state, storage_reader=Reader(tmp_path, fallback=True), planner=PlansAnew())


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("fallback", [False, True])
def test_a_load_that_fails_leaves_no_file_open(tmp_path: Path, fallback: bool) -> None:
    state = {"model": {"w": torch.ones(2)}}
    save(state, storage_writer=Writer(tmp_path, step=1))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 — of descriptors, not of paths
    planner = DefaultLoadPlanner()
    with (
        patch.object(planner, "commit_tensor", side_effect=RuntimeError("no room")),
        pytest.raises(CheckpointException, match="no room"),
    ):
        load(state, storage_reader=Reader(tmp_path, fallback=fallback), planner=planner)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_process_that_saves_knows_what_the_job_went_past(tmp_path: Path) -> None:
    for step in (1, 2):
        save({"w": torch.ones(8)}, storage_writer=Writer(tmp_path, step=step))
    manifest = tmp_path / "step-0000000002" / "manifest.msgpack"
    data = manifest.read_bytes()
    manifest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    load({"w": torch.zeros(8)}, storage_reader=Reader(tmp_path, fallback=True))
    # As `async_save` sends it to a process of its own.
    sent = pickle.dumps(Writer(tmp_path, step=2))
    REPLACEABLE.clear()
    save({"w": torch.ones(8)}, storage_writer=pickle.loads(sent))
    assert not ckptkit.verify(tmp_path)


def keys_in_the_store(folder: str) -> list[int]:
    """How many there are after each of some saves by other writers, and a load."""
    state, counts = {"model": {"w": torch.ones(8)}}, []
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        writer = pickle.loads(pickle.dumps(Writer(folder, step=step)))
        save(state, storage_writer=writer)
        load(state, storage_reader=Reader(folder, fallback=True))
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    return counts


def test_nothing_stays_in_the_store_of_a_job(gloo: Pool, tmp_path: Path) -> None:
    (counts, *_) = gloo.run(2, keys_in_the_store, str(tmp_path))
    assert counts == counts[:1] * 3


@pytest.mark.parametrize("said", [3, [], [3], [[]], [["x"]], [["x", 0]], [["x", [0]], 1]])
def test_a_value_of_a_damaged_step_is_refused(said: object) -> None:
    with pytest.raises(FormatError) as caught:
        value_in(Names(), {"extra/x": {"y": 1}} if said != [["x"]] else {}, said, "keys")
    assert caught.value.where == "keys"
