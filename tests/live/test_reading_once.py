"""Reading together: the manifest once for all ranks, and with `read_once` every byte once."""

from __future__ import annotations

import time
import weakref
import zlib
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptkit
from ckptkit.checkpoint.places import MANIFEST
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.live import Checkpointer, fill, load, restore, save
from ckptkit.storage import open_store
from tests.live.gathering import Arrays, Comparison, gathered, scramble
from tests.live.pool import Pool
from tests.live.strategies import LAYOUTS, build
from tests.storage.counting import CountingStore


class Noting(CountingStore):
    """Also notes which keys are read whole."""

    def __init__(self, location: str) -> None:
        super().__init__(open_store(location))
        self.whole: list[str] = []

    def read_whole(self, key: str, most: int) -> bytes:
        """Read a small object."""
        self.whole.append(key)
        return super().read_whole(key, most)

    @property
    def manifests(self) -> int:
        """How many manifests have been read."""
        return sum(key.endswith(MANIFEST) for key in self.whole)


def save_and_gather(layout: str, location: str) -> Arrays:
    job = build(layout)
    job.train(range(2))
    save(location, step=2, model=job.model, optimizer=job.optimizer, differing=["*seen"])
    return gathered(job)


def saved(gloo: Pool, layout: str, location: Path) -> Arrays:
    whole: dict[str, Any] = {}
    for rank in gloo.run(LAYOUTS[layout].ranks, save_and_gather, layout, str(location)):
        whole = dict(rank) | whole
    return whole


def load_counting(layout: str, location: str, whole: Arrays) -> list[Any]:
    """Load in place and from nothing, in few and in many turns; what is wrong, and how many
    manifests were read.
    """
    job = build(layout, seed=9)
    job.train([5])
    comparison = Comparison(job)
    wrong: list[str] = []
    store = Noting(location)
    for batch, forget in product((64 << 20, 300), (True, False)):
        scramble(job, forget=forget)
        with patch.object(fill, "_TURN_BYTES", batch):
            restored = load(store, model=job.model, optimizer=job.optimizer, read_once=True)
        wrong += [] if restored.report.is_exact else [str(restored.report)]
        wrong += comparison.differences(whole)
    return [wrong, store.manifests]


@pytest.mark.parametrize(
    "layout",
    ["plain", "ddp:3", "hsdp:2x2", "ddp:2,tp:2", "fsdp2:2", "zero1:3", "pp:2", "pp:2,fsdp:1,tp:2"],
)
def test_what_is_read_once_is_the_same_bit_for_bit(gloo: Pool, tmp_path: Path, layout: str) -> None:
    whole = saved(gloo, layout, tmp_path)
    found = gloo.run(LAYOUTS[layout].ranks, load_counting, layout, str(tmp_path), whole)
    assert [wrong for wrong, _ in found] == [[]] * len(found)
    assert sum(manifests for _, manifests in found) == 4  # of four loads


def load_noting(layout: str, location: str, ranks_here: int, once: bool) -> dict[str, int]:
    """How many arrays this rank reads alone, and how many it says that others read."""
    job = build(layout, seed=9)
    job.train([5])
    found = {"alone": 0, "others too": 0}
    read_many = Checkpoint.read_many

    def noting(self: Checkpoint, wanted: Any, *, alone: bool = False, **options: Any) -> None:
        found["alone" if alone else "others too"] += len({name for name, _, _ in wanted})
        read_many(self, wanted, alone=alone, **options)

    with (
        patch.object(Checkpoint, "read_many", noting),
        patch.object(restore, "ranks_here", lambda _: ranks_here),
    ):
        load(location, model=job.model, optimizer=job.optimizer, read_once=once)
    return found


@pytest.mark.parametrize(
    ("layout", "ranks_here", "once", "is_alone"),
    [
        ("fsdp2:2", 2, False, True),
        ("ddp:2", 2, False, False),
        ("ddp:2", 2, True, True),
        ("hsdp:2x2", 2, False, True),
    ],
)
def test_who_shares_a_machine_says_whether_it_reads_alone(
    gloo: Pool, tmp_path: Path, layout: str, ranks_here: int, once: bool, is_alone: bool
) -> None:
    count = LAYOUTS[layout].ranks
    saved(gloo, layout, tmp_path)
    for found in gloo.run(count, load_noting, layout, str(tmp_path), ranks_here, once):
        assert (found["alone"] > found["others too"]) == is_alone
        assert is_alone or not found["alone"]


WIDE, PIECE = 700, 1 << 18


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3))


def digests(model: nn.Module) -> list[int]:
    return [zlib.crc32(parameter.detach().numpy().tobytes()) for parameter in model.parameters()]


def load_wide(location: str, read_once: bool) -> list[Any]:
    model = DistributedDataParallel(wide_model())
    store = Noting(location)
    with patch.object(fill, "_PIECE_BYTES", PIECE):
        load(store, model=model, read_once=read_once)
    return [store.bytes_read, store.manifests, digests(model)]


def test_replicas_read_each_byte_once_in_all_and_share_the_reading(
    gloo: Pool, tmp_path: Path
) -> None:
    model = wide_model()
    save(tmp_path, step=1, model=model, chunk_bytes=1 << 16)
    manifest = next(tmp_path.rglob(MANIFEST)).stat().st_size
    apart = gloo.run(4, load_wide, str(tmp_path), False)
    once = gloo.run(4, load_wide, str(tmp_path), True)
    assert [found[2] for found in apart + once] == [digests(model)] * 8
    assert sum(found[1] for found in apart) == sum(found[1] for found in once) == 1
    alone = [found[0] - manifest * found[1] for found in apart]
    shares = [found[0] - manifest * found[1] for found in once]
    assert min(alone) == max(alone) >= sum(parameter.nbytes for parameter in model.parameters())
    assert sum(shares) == alone[0]
    assert max(shares) <= sum(shares) / 4 + PIECE


def load_other_dtypes(location: str) -> list[Any]:
    low = nn.Linear(8, 8)
    model = nn.ModuleDict({"low": low, "new": nn.Linear(2, 2)})
    report = load(location, model=model, read_once=True, cast=True, partial=True).report
    return [report.missing, len(report.cast), low.weight.tolist()]


def test_reading_once_converts_and_leaves_what_is_not_there(gloo: Pool, tmp_path: Path) -> None:
    low = nn.Linear(8, 8).to(torch.bfloat16)
    save(tmp_path, step=1, model=nn.ModuleDict({"low": low}))
    expected = [["model/new.weight", "model/new.bias"], 2, low.weight.to(torch.float32).tolist()]
    assert gloo.run(2, load_other_dtypes, str(tmp_path)) == [expected] * 2


def load_other_objects(location: str) -> list[float]:
    state = {"x": torch.zeros(5)}
    if dist.get_rank() == 1:
        state = {"x": torch.zeros(6), "y": torch.full((3,), 1.0)}
    load(location, state={"s": state}, read_once=True, partial=True)
    return [float(value.sum()) for value in state.values()]


def test_ranks_that_want_different_tensors_read_for_themselves(gloo: Pool, tmp_path: Path) -> None:
    save(tmp_path, step=1, state={"s": {"x": torch.ones(5)}})
    assert gloo.run(2, load_other_objects, str(tmp_path)) == [[5.0], [0.0, 3.0]]


def load_by_two_ways(location: str) -> str:
    started = time.monotonic()
    with pytest.raises(UsageError) as caught:
        load(location, state={"s": {"x": torch.zeros(5)}}, read_once=dist.get_rank() == 1)
    assert time.monotonic() - started < 60
    return str(caught.value)


def test_all_ranks_read_once_or_none(gloo: Pool, tmp_path: Path) -> None:
    save(tmp_path, step=1, state={"s": {"x": torch.ones(5)}})
    what = "read_once is not the same on all ranks"
    assert gloo.run(2, load_by_two_ways, str(tmp_path)) == [
        f"{what} (got {once})\nhint: pass it on all ranks, or on none" for once in (False, True)
    ]


def load_damaged(location: str) -> list[Any]:
    model = DistributedDataParallel(wide_model())
    started = time.monotonic()
    with pytest.raises(CkptkitError) as caught:
        load(location, model=model, read_once=True, timeout=20)
    took = time.monotonic() - started
    other = DistributedDataParallel(nn.Linear(2, 2))  # the ranks can still talk to each other
    assert other is not None
    return [str(caught.value), took]


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_rank_that_finds_damage_raises_on_all(gloo: Pool, tmp_path: Path, chunk: int) -> None:
    save(tmp_path, step=1, model=wide_model(), chunk_bytes=1 << 16)
    with ckptkit.open(tmp_path) as step:
        offset = int(step.manifest.offset[chunk])
    (path,) = tmp_path.rglob("*.zip")
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    for message, took in gloo.run(3, load_damaged, str(tmp_path)):
        assert "has the checksum" in message
        assert took < 15


def load_without_memory(location: str) -> list[Any]:
    model = DistributedDataParallel(wide_model())
    started = time.monotonic()

    circle = fill._FillByTurns

    def with_memory(*args: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no bytes left")
        return circle(*args)

    with (
        patch.object(fill, "_FillByTurns", with_memory),
        pytest.raises((CkptkitError, MemoryError)) as caught,
    ):
        load(location, model=model, read_once=True, timeout=20)
    return [f"{type(caught.value).__name__}: {caught.value}", time.monotonic() - started]


def test_a_rank_without_memory_keeps_nobody_waiting(gloo: Pool, tmp_path: Path) -> None:
    save(tmp_path, step=1, model=wide_model())
    for message, took in gloo.run(3, load_without_memory, str(tmp_path)):
        assert "MemoryError: no " in message
        assert took < 15


def load_noting_circles(layout: str, location: str) -> list[int]:
    """How many earlier circles are in memory when each is made."""
    job = build(layout, seed=9)
    circle, made, left = fill._FillByTurns, list[Any](), list[int]()

    def noted(*args: Any) -> Any:
        left.append(sum(each() is not None for each in made))
        new = circle(*args)
        made.append(weakref.ref(new))
        return new

    with patch.object(fill, "_FillByTurns", noted):
        load(location, model=job.model, read_once=True)
    return left


def test_one_circle_is_in_memory_at_a_time(gloo: Pool, tmp_path: Path) -> None:
    layout = "ddp:2,tp:2"
    saved(gloo, layout, tmp_path)
    found = gloo.run(LAYOUTS[layout].ranks, load_noting_circles, layout, str(tmp_path))
    assert found == [[0, 0]] * 4


def restore_counting(location: str) -> list[Any]:
    store = Noting(location)
    with Checkpointer(store, timeout=20) as checkpointer:
        state = {"x": torch.zeros(2)}
        restored = checkpointer.restore(state={"s": state})
    assert restored
    return [restored.step, state["x"].tolist(), store.manifests, store.operations["children"]]


def test_one_of_four_ranks_lists_the_steps_and_reads_the_manifest(
    gloo: Pool, tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path, step=step, state={"s": {"x": torch.full((2,), float(step))}})
    found = gloo.run(4, restore_counting, str(tmp_path))
    assert [each[:2] for each in found] == [[2, [2.0, 2.0]]] * 4
    assert [each[2] for each in found] == [1, 0, 0, 0]
    assert [each[3] > 0 for each in found] == [True, False, False, False]
