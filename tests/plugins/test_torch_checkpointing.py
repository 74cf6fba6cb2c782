"""torch_checkpointing saves through stores of ckptkit: whole or absent, and checked when read."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch_checkpointing import CheckpointManager, ItemSpec, checkpoint_writer
from torch_checkpointing.checkpoint_layout import (
    JsonSerialization,
    LayoutInfo,
    RawSerialization,
    SafetensorsSerialization,
)
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.default_resharder import DefaultResharder

import ckptkit
from ckptkit.errors import CorruptionError, UsageError
from ckptkit.live import load
from ckptkit.plugins.torch_checkpointing import CkptkitStorage, CkptkitStorageConfig
from tests.live import strategies
from tests.live.pool import Pool
from tests.plugins.torch_checkpointing_job import Training, manager_of
from tests.servers.s3_server import Bucket

ROOT = Path(__file__).resolve().parents[2]
STEP, BEGUN = Path("step-3"), Path("tmp_step-3")


@pytest.fixture(params=["folder", "bucket", "gcs_bucket"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CkptkitStorageConfig]:
    """A place for checkpoints, of each kind."""
    if request.param == "folder":
        yield CkptkitStorageConfig(str(tmp_path / "run"))
    else:
        bucket: Bucket = request.getfixturevalue(request.param)
        yield CkptkitStorageConfig(f"{bucket.url}/run", dict(bucket.options))


@pytest.fixture
def storage(config: CkptkitStorageConfig) -> CkptkitStorage:
    return config.create_storage()


def test_a_training_that_was_killed_goes_on_as_if_it_had_not_been(bucket: Bucket) -> None:
    whole = Training()
    losses = [whole.step(number) for number in range(1, 7)]
    url, options = f"{bucket.url}/run", dict(bucket.options)
    job = [sys.executable, "-m", "tests.plugins.torch_checkpointing_job"]
    killed = subprocess.run(
        [*job, json.dumps([url, options])],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    storage = CkptkitStorageConfig(url, options)
    (newest,) = storage.create_storage().ls(Path())
    again = Training()
    again.step(0)
    manager = manager_of(storage)
    again.go_on(dict(manager.load(newest, into=again.state())))
    manager.close()
    assert [again.step(number) for number in (4, 5, 6)] == losses[3:]


def test_every_way_to_write_an_item_is_read_back(config: CkptkitStorageConfig) -> None:
    specs = {
        "model": ItemSpec(resharder=DefaultResharder()),
        "rows": ItemSpec(
            layout=LayoutInfo("ranks/{rank}.safetensors", SafetensorsSerialization()),
            resharder=DefaultResharder(),
        ),
        "notes": ItemSpec(layout=LayoutInfo("notes.json", JsonSerialization())),
        "nothing": ItemSpec(layout=LayoutInfo("empty.bin", RawSerialization())),
    }
    saving = CheckpointManager.Config.with_sync_save()
    saving.items, saving.storage_config = specs, config
    # Several blocks and parts, and pieces that begin in the middle of a block.
    state: dict[str, Any] = {
        "model": {"small": torch.arange(5.0), "large": torch.rand(3000, 1100)},
        "rows": {"w": torch.rand(4, 3)},
        "notes": {"lr": 0.1},
        "nothing": b"",
        "plain": torch.rand(1500, 1100),
    }
    manager = saving.build()
    manager.save(str(STEP), state)
    found = {**state, "plain": torch.zeros(1500, 1100), "notes": None, "nothing": None}
    for item in ("model", "rows"):
        found[item] = {name: torch.zeros_like(value) for name, value in state[item].items()}
    loaded: Any = manager.load(str(STEP), into=found, strict=True)
    manager.close()
    for item in ("model", "rows"):
        for name, value in state[item].items():
            assert torch.equal(loaded[item][name], value)
    assert torch.equal(loaded["plain"], state["plain"])
    assert (loaded["notes"], loaded["nothing"]) == ({"lr": 0.1}, b"")


def test_a_checkpoint_is_there_from_its_commit_on(storage: CkptkitStorage) -> None:
    manager = manager_of(storage._config)
    storage.mkdir(BEGUN)
    storage.write(BEGUN / "model_0.pt", b"half")
    assert storage.exists(BEGUN)
    assert storage.ls(BEGUN) == ["model_0.pt"]
    assert not storage.exists(STEP)
    assert storage.ls(Path()) == []
    with pytest.raises(FileNotFoundError):
        manager.load(str(STEP), into={"model": None})
    storage.rename(BEGUN, STEP, is_directory=True)
    assert not storage.exists(BEGUN)
    assert storage.isdir(STEP)
    assert storage.ls(Path()) == ["step-3"]
    assert storage.ls(STEP) == ["model_0.pt"]
    assert storage.read(STEP / "model_0.pt") == b"half"
    assert storage.getsize(STEP / "model_0.pt") == 4
    assert not storage.exists(STEP / "model_1.pt")
    assert storage.glob("step-*") == ["step-3"]
    storage.rmdir(STEP)
    assert not storage.exists(STEP)
    manager.close()


def test_what_was_committed_is_not_overwritten(storage: CkptkitStorage) -> None:
    storage.write(BEGUN / "a", b"first")
    storage.rename(BEGUN, STEP)
    config = storage._config
    again = CkptkitStorageConfig(config.location, config.storage_options).create_storage()
    again.write(Path("b"), b"fourth")
    attempts: tuple[Callable[[], None], ...] = (
        lambda: again.mkdir(BEGUN),
        lambda: storage.write(BEGUN / "a", b"second"),
        lambda: again.rename(BEGUN, STEP),
        lambda: again.write(STEP / "a", b"third"),
        lambda: again.delete(STEP / "a"),
        lambda: again.rename(Path("b"), STEP),
        lambda: again.rename(STEP, Path("step-4")),
    )
    for attempt in attempts:
        with pytest.raises(OSError, match=r"there already|only all"):
            attempt()
    assert storage.read(STEP / "a") == b"first"


def test_a_file_replaces_a_file(storage: CkptkitStorage) -> None:
    storage.write(Path("out/model.safetensors"), b"old")
    with storage.stream_write(Path("out/.model.1.tmp")) as stream:
        stream.write(b"new")
    storage.rename(Path("out/.model.1.tmp"), Path("out/model.safetensors"))
    assert storage.ls(Path("out")) == ["model.safetensors"]
    assert storage.read(Path("out/model.safetensors")) == b"new"
    with pytest.raises(OSError, match="there already"):
        storage.rename(Path("out/model.safetensors"), Path("out"))
    storage.delete(Path("out/model.safetensors"))
    assert not storage.exists(Path("out"))
    with pytest.raises(FileNotFoundError):
        storage.delete(Path("out/model.safetensors"))


def test_a_write_that_fails_leaves_no_file(storage: CkptkitStorage) -> None:
    def fail() -> None:
        with storage.stream_write(BEGUN / "a") as stream:
            stream.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    storage.stream_write(BEGUN / "b").write(b"given up")
    assert not storage.exists(BEGUN)
    with pytest.raises(FileNotFoundError, match="not all files"):
        storage.rename(BEGUN, STEP)


def test_one_flipped_bit_is_found_in_whatever_is_read(tmp_path: Path) -> None:
    config = CkptkitStorageConfig(str(tmp_path))
    manager = manager_of(config)
    manager.save(str(STEP), {"model": torch.rand(3000, 1100)})
    (file,) = tmp_path.glob("step-3/files/*/model_0.pt")
    data = bytearray(file.read_bytes())
    data[9_000_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match="bytes from 8388608 on") as caught:
        manager.load(str(STEP), into={"model": None})
    assert "load another" in str(caught.value.hint)
    with config.create_storage().stream_read(STEP / "model_0.pt") as stream:
        stream.seek(8_388_607)
        assert stream.read(1) == data[8_388_607:8_388_608]
        with pytest.raises(CorruptionError):
            stream.read(1)
    record = tmp_path / "step-3" / "commit.msgpack"
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(CorruptionError, match="checksum"):
        manager.load(str(STEP), into={"model": None})
    manager.close()


def write_and_die(folder: str) -> None:
    storage = CkptkitStorageConfig(folder).create_storage()
    storage.write(BEGUN / f"model_{dist.get_rank()}.pt", b"of a job that died")


def train_and_save(folder: str) -> None:
    job = strategies.fsdp2(3, strategies.adamw)
    job.train(range(2))
    for name, buffer in job.modules[0].named_buffers():
        if name.endswith("seen"):
            dist.broadcast(buffer, 0)
    manager = manager_of(CkptkitStorageConfig(folder))
    model, optimizer = get_state_dict(job.modules[0], job.optimizer)
    manager.save(str(STEP), {"model": model, "optimizer": optimizer, "step": 2})
    dist.barrier()
    found = manager.load(str(STEP), into={"model": model, "optimizer": None, "step": None})
    assert found["step"] == 2
    manager.close()
    again = strategies.tp(5, strategies.adamw)
    restored = load(f"{folder}/{STEP}", model=again.model, optimizer=again.optimizer)
    assert restored.extra["step"] == 2
    assert again.train([2]) == pytest.approx(job.train([2]), abs=1e-6)


def die_and_come_back_with_a_rank_less(folder: str) -> list[str] | None:
    write_and_die(folder)
    dist.barrier()
    rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    dist.destroy_process_group()
    # torchrun's workers have one store over all restarts, where gloo would find old addresses.
    dist.init_process_group("fake", store=store, rank=rank % 2, world_size=2)
    if rank == 2:
        return None
    storage = CkptkitStorageConfig(folder).create_storage()
    storage.write(BEGUN / f"model_{rank}.pt", b"of the ranks that are left")
    store.set(f"written/{rank}", "")
    store.wait(["written/0", "written/1"])
    if rank == 0:
        storage.rename(BEGUN, STEP, is_directory=True)
        store.set("committed", "")
    store.wait(["committed"])
    return storage.ls(STEP)


def test_ranks_that_are_gone_after_a_restart_have_no_files_in_what_is_saved(
    gloo: Pool, tmp_path: Path
) -> None:
    found = gloo.run(3, die_and_come_back_with_a_rank_less, str(tmp_path))
    assert found == [["model_0.pt", "model_1.pt"]] * 2 + [None]


def test_what_ranks_saved_is_a_step_without_what_a_job_that_died_left(
    gloo: Pool, tmp_path: Path
) -> None:
    gloo.run(3, write_and_die, str(tmp_path))
    assert not ckptkit.Run(tmp_path).foreign()
    gloo.run(2, train_and_save, str(tmp_path))
    storage = CkptkitStorageConfig(str(tmp_path)).create_storage()
    assert "model_1.pt" in storage.ls(STEP)
    assert "model_2.pt" not in storage.ls(STEP)
    (files,) = (tmp_path / "step-3" / "files").iterdir()
    ckptkit.reshard(tmp_path / "step-3", tmp_path / "again", to="fsdp:3")
    with ckptkit.open(tmp_path / "step-3") as step, ckptkit.open(tmp_path / "again") as again:
        assert str(step.strategy) == "fsdp:2"
        assert step.foreign is not None
        assert step.foreign.format == "torch_checkpointing"
        assert step.info("optimizer/layers.0.up.weight/exp_avg").of == "model/layers.0.up.weight"
        assert not ckptkit.diff(step.location, again.location).arrays
    # What torch_checkpointing itself would have written.
    (files / "metadata.pkl").write_bytes(b"")
    with ckptkit.open(files) as step:
        assert str(step.strategy) == "fsdp:2"


def test_an_item_may_be_called_as_what_is_not_committed_yet(tmp_path: Path) -> None:
    manager = manager_of(CkptkitStorageConfig(str(tmp_path)))
    manager.save("runs/step-3", {"tmp_state": torch.ones(2), "step": 3})
    manager.close()
    config = CkptkitStorageConfig(str(tmp_path))
    manager, storage = manager_of(config), config.create_storage()
    found = manager.load("runs/step-3", into={"tmp_state": torch.zeros(2), "step": None})
    assert torch.equal(found["tmp_state"], torch.ones(2))
    assert "tmp_state_0.pt" in storage.ls(Path("runs/step-3"))
    assert storage.getsize(Path("runs/step-3/tmp_state_0.pt")) > 0
    manager.close()


def test_another_prefix_is_said_to_both(tmp_path: Path) -> None:
    saving = CheckpointManager.Config.with_sync_save()
    saving.save.writer_config = CheckpointWriterConfig(temp_dir_prefix="partial_")
    saving.storage_config = CkptkitStorageConfig(str(tmp_path))
    manager = saving.build()
    with pytest.raises(UsageError, match="only all of a checkpoint") as caught:
        manager.save(str(STEP), {"step": 3})
    assert "CkptkitStorageConfig(…, temp_dir_prefix='partial_')" in str(caught.value.hint)
    manager.close()
    saving.storage_config = CkptkitStorageConfig(str(tmp_path), temp_dir_prefix="partial_")
    manager = saving.build()
    manager.save(str(STEP), {"step": 3})
    assert manager.load(str(STEP), into={"step": None}) == {"step": 3}
    manager.close()


def test_files_of_ranks_that_no_process_group_knows_are_not_deleted(tmp_path: Path) -> None:
    first, second = (CkptkitStorageConfig(str(tmp_path)).create_storage() for _ in range(2))
    second.write(BEGUN / "model_1.pt", b"of rank 1")
    first.write(BEGUN / "model_0.pt", b"of rank 0")
    with pytest.raises(UsageError, match=r"other processes .*model_1\.pt") as caught:
        first.rename(BEGUN, STEP, is_directory=True)
    assert "init_process_group" in str(caught.value.hint)
    assert second.read(BEGUN / "model_1.pt") == b"of rank 1"
    assert not first.exists(STEP)
    first.rmdir(STEP)
    first.write(BEGUN / "model_0.pt", b"alone")
    first.rename(BEGUN, STEP, is_directory=True)
    assert first.ls(STEP) == ["model_0.pt"]


def test_names_elsewhere_are_refused_with_the_way_out(tmp_path: Path) -> None:
    storage = CkptkitStorageConfig(str(tmp_path / "run")).create_storage()
    manager = manager_of(storage._config)
    manager.save(str(tmp_path / "run" / "step-1"), {"step": 1})  # in full is fine, too
    assert storage.ls(Path()) == ["step-1"]
    for name in (str(tmp_path / "step-1"), "s3://bucket/step-1"):
        with pytest.raises(UsageError, match="not below the location") as caught:
            manager.save(name, {"step": 1})
        assert "manager.save('step-1000'" in str(caught.value.hint)
    with pytest.raises(UsageError, match="must not begin with tmp_"):
        manager.save("tmp_1", {"step": 1})
    manager.close()


def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(checkpoint_writer, "DEFAULT_TEMP_DIR_PREFIX")
    monkeypatch.delitem(sys.modules, "ckptkit.plugins.torch_checkpointing")
    with pytest.raises(UsageError, match=r"made for torch_checkpointing 0\.1, this is"):
        importlib.import_module("ckptkit.plugins.torch_checkpointing")
