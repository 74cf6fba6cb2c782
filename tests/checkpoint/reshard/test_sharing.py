"""Chunks that several packs need a part of are read once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoint.read.reader import Wanted
from ckptkit.checkpoint.reshard.copy import SharedChunks
from ckptkit.errors import CkptkitError, StorageError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box
from ckptkit.storage import MemoryStore
from tests.checkpoint.remote import MIB, RemoteStore
from tests.checkpoint.saving import Tensor, contents, random_values, save
from tests.storage.failing import FailingStore

CUTS = {"rules": [{"match": "*", "tp": "shard(1)"}]}


@pytest.fixture(scope="module")
def wide() -> RemoteStore:
    """A step whose chunks are 256 columns wide."""
    store = RemoteStore()
    state = {f"model/w{n}": Tensor(random_values((512, 1024), seed=n)) for n in range(8)}
    save(store, state, chunk_bytes=512 << 10)
    return store


def total(store: RemoteStore) -> int:
    return sum(entry.size for entry in store.behind.list())


@pytest.mark.parametrize(("to", "share"), [("tp:8", 1.05), ("tp:16", 2.05)])
def test_packs_that_are_written_together_share_what_they_read(
    wide: RemoteStore, to: str, share: float
) -> None:
    source, remote, local = RemoteStore(wide.behind), RemoteStore(), MemoryStore()
    ckptkit.reshard(source, remote, to=to, rules=CUTS, workers=2)
    assert source.bytes_read <= share * total(wide)
    ckptkit.reshard(wide.behind, local, to=to, rules=CUTS)
    assert contents(remote.behind) == contents(local)


def test_with_room_for_nothing_all_is_read_again(wide: RemoteStore) -> None:
    source, remote = RemoteStore(wide.behind), RemoteStore()
    ckptkit.reshard(source, remote, to="tp:8", rules=CUTS, workers=2, memory=140 * MIB)
    assert ckptkit.verify(remote) == []


@pytest.fixture
def info(wide: RemoteStore) -> ArrayInfo:
    with ckptkit.open(wide) as checkpoint:
        return checkpoint.manifest.arrays[0]


def some_columns(info: ArrayInfo) -> tuple[Wanted, np.ndarray[Any, Any]]:
    shape = info.shape[0], 200
    values = np.zeros(shape, info.dtype.bits)
    return Wanted(0, Box((0, 0), shape), values), values


class Disk:
    """Reads what it is asked for as ones, when the gate is open, unless it is told to fail."""

    def __init__(self) -> None:
        self.asked: list[Wanted] = []
        self.begun, self.gate = Event(), Event()
        self.failures = 0

    def read(self, wanted: Sequence[Wanted]) -> None:
        self.begun.set()
        assert self.gate.wait(10)
        if self.failures:
            self.failures -= 1
            raise StorageError("fails on purpose")
        self.asked += wanted
        for each in wanted:
            each.target[...] = 1


@pytest.mark.parametrize("failures", [0, 1])
def test_who_comes_second_takes_what_the_first_has_read_or_reads_for_himself(
    info: ArrayInfo, failures: int
) -> None:
    disk = Disk()
    chunks = SharedChunks([info], disk.read, 4 * MIB)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(chunks.read, [some_columns(info)[0]])
        assert disk.begun.wait(10)
        wanted, values = some_columns(info)
        second = threads.submit(chunks.read, [wanted])
        disk.failures = failures
        disk.gate.set()
        assert isinstance(first.exception(), StorageError) == bool(failures)
        second.result()
    assert values.all()
    if not failures:
        column = info.shape[0] * info.grid.chunk_shape[1]
        assert sum(each.target.size for each in disk.asked) == column


def test_what_is_kept_makes_room_for_what_is_used_later(info: ArrayInfo) -> None:
    rows = info.grid.chunk_shape[0]
    disk = Disk()
    disk.gate.set()
    chunks = SharedChunks([info], disk.read, info.grid.chunk_elements * info.dtype.itemsize)

    def asked(*numbers: int) -> list[int]:
        """The rows that are asked for where parts of these chunks are needed."""
        disk.asked.clear()
        boxes = [Box((number * rows, 0), (rows, 9)) for number in numbers]
        values = [np.zeros(box.shape, info.dtype.bits) for box in boxes]
        chunks.read([Wanted(0, *each) for each in zip(boxes, values, strict=True)])
        assert all(each.all() for each in values)
        return [each.box.shape[1] for each in disk.asked]

    whole = info.grid.chunk_shape[1]
    assert asked(0, 1) == [whole, 9]
    assert asked(0) == []
    assert asked(1) == [whole]
    assert asked(0) == [whole]


def test_a_read_that_fails_fails_the_reshard_and_keeps_nobody_waiting(wide: RemoteStore) -> None:
    for number in (5, 9, 14):
        failing = FailingStore(RemoteStore(wide.behind), fail_at=number)
        with pytest.raises(CkptkitError, match="fails on purpose"):
            ckptkit.reshard(failing, RemoteStore(), to="tp:8", rules=CUTS, workers=2)
