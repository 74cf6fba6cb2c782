"""After `stage()` nothing the caller changes reaches the step."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, Sum, ThreadBarrier, Writer
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.errors import UsageError
from ckptkit.storage import BufferPool, MemoryStore


def test_what_changes_after_staging_is_not_saved() -> None:
    store = MemoryStore()
    weight = np.arange(3000.0)
    seen = np.arange(4)
    state = {"lr": 0.1, "seen": seen}
    writer = Writer(store, step=1, details={"precision": state})
    writer.add("model/w", weight)
    writer.add_object("state", state)
    writer.stage()
    weight[:] = -1
    state["lr"] = 7.0
    seen[:] = 9
    writer.commit()
    with ckptkit.open(store) as checkpoint:
        assert checkpoint["model/w"][...].tolist() == np.arange(3000.0).tolist()
        assert checkpoint.objects["state"]["lr"] == 0.1
        assert checkpoint.objects["state"]["seen"].tolist() == [0, 1, 2, 3]
        assert checkpoint.details["precision"]["lr"] == 0.1
    assert ckptkit.verify(store) == []


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("threads", [1, 3])
def test_arrays_that_are_gathered_row_by_row_are_those_of_the_moment_they_were_staged(
    order: Literal["C", "F"], threads: int
) -> None:
    store, pool, generator = MemoryStore(), BufferPool(), np.random.default_rng(0)
    # Cut by rows and columns, between small ones that share segments with them, and one whose last
    # chunks are padded.
    shapes = {"a": (3,), "b": (512, 512), "c": (7,), "d": (300, 500), "e": (2000,), "f": (64, 4096)}
    state = {
        f"model/{name}": np.asarray(generator.random(shape, np.float32), order=order)
        for name, shape in shapes.items()
    }
    wanted = {name: array.copy() for name, array in state.items()}
    for step in (1, 2):
        writer = Writer(store, step=step, chunk_bytes=64 << 10, threads=threads)
        for name, array in state.items():
            array[...] = wanted[name] + step
            writer.add(name, array)
        writer.stage(pool)
        for array in state.values():
            array[...] = -1
        writer.commit()
        assert writer.plan is not None
        assert writer.plan.scattered
        with ckptkit.open(store) as checkpoint:
            for name, array in wanted.items():
                assert np.array_equal(checkpoint[name][...], array + step)
        assert ckptkit.verify(store) == []
        # Nothing looks at the memory any more: the next save has it again.
        image = writer.plan.end
        assert image <= pool.kept_bytes < 2 * image


def test_copies_that_share_out_their_chunks_are_staged_too() -> None:
    store, barriers = MemoryStore(), ThreadBarrier.group(2)
    wanted = np.random.default_rng(0).random((512, 512), np.float32)

    def save(rank: int) -> None:
        array = wanted.copy()
        writer = Writer(
            store,
            step=1,
            strategy="ddp:2",
            rank=rank,
            barrier=barriers[rank],
            chunk_bytes=64 << 10,
        )
        writer.add("model/w", array)
        writer.stage()
        array[...] = -1
        writer.commit()

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(save, range(2)))
    with ckptkit.open(store) as checkpoint:
        assert np.array_equal(checkpoint["model/w"][...], wanted)
    assert ckptkit.verify(store) == []


def test_nothing_can_be_added_or_staged_after_staging() -> None:
    writer = Writer(MemoryStore(), step=1)
    writer.add("model/w", np.zeros(3))
    writer.stage()
    with pytest.raises(UsageError):
        writer.add("model/v", np.zeros(3))
    with pytest.raises(UsageError):
        writer.add_alias("model/v", "model/w")
    with pytest.raises(UsageError):
        writer.add_object("n", 1)
    with pytest.raises(UsageError):
        writer.stage()


def test_what_was_staged_may_be_freed() -> None:
    array = np.arange(1 << 20, dtype=np.float32)
    kept = weakref.ref(array)
    writer = Writer(MemoryStore(), step=1)
    writer.add("model/w", array)
    writer.stage()
    del array
    assert kept() is None
    writer.commit()


def test_a_writer_whose_staging_was_interrupted_writes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    store = MemoryStore()
    writer = Writer(store, step=1)
    writer.add("model/w", np.zeros(3))
    monkeypatch.setattr(Pack, "stage", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.stage()
    with pytest.raises(UsageError, match="this writer is done"):
        writer.commit()
    assert not Run(store).steps()


def test_sums_do_not_wrap() -> None:
    store = MemoryStore()
    with Writer(store, step=1) as writer:
        writer.add_object("small", Sum(np.int32(2**31 - 1)))
        writer.add_object("bytes", Sum(np.full(2, 200, np.uint8)))
    with ckptkit.open(store) as checkpoint:
        assert checkpoint.objects["small"] == 2**31 - 1
        assert checkpoint.objects["bytes"].dtype == np.uint64
