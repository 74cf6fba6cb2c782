"""Chunks that several packs need a part of are read once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoint.read.reader import Request
from ckptkit.checkpoint.reshard.copy import PartsOfChunks, SharedChunks
from ckptkit.errors import CkptkitError
from ckptkit.format.arrays import ArrayInfo
from ckptkit.model import Box
from ckptkit.storage import MemoryStore
from tests.checkpoint.remote import MIB, RemoteStore
from tests.checkpoint.saving import Tensor, contents, random_values, save
from tests.storage.failing import FailingStore

CUTS = {"rules": [{"match": "*", "tp": "shard(1)"}]}
STATE = {f"model/w{n}": Tensor(random_values((512, 1024), seed=n)) for n in range(8)}


@pytest.fixture(scope="module")
def wide() -> RemoteStore:
    """A step whose chunks are 256 columns wide."""
    store = RemoteStore()
    save(store, STATE, chunk_bytes=512 << 10)
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


def some_columns(info: ArrayInfo) -> tuple[Request, np.ndarray[Any, Any]]:
    shape = info.shape[0], 200
    values = np.zeros(shape, info.dtype.bits)
    return Request(0, Box((0, 0), shape), values), values


def test_who_comes_second_takes_what_the_first_has_read(info: ArrayInfo) -> None:
    chunks = SharedChunks(4 * MIB)
    with PartsOfChunks(chunks) as first, PartsOfChunks(chunks) as second:
        whole = list(first.requests(some_columns(info)[0], info))
        request, values = some_columns(info)
        assert list(second.requests(request, info)) == []
        for number, each in enumerate(whole):
            each.target[...] = number + 1
        assert first.copied() == []
        assert second.copied() == []
    assert set(np.unique(values)) == set(range(1, len(whole) + 1))


def test_who_waits_for_one_that_fails_reads_for_himself(info: ArrayInfo) -> None:
    chunks = SharedChunks(4 * MIB)
    with PartsOfChunks(chunks) as second:
        with PartsOfChunks(chunks) as first:
            assert list(first.requests(some_columns(info)[0], info))
            assert list(second.requests(some_columns(info)[0], info)) == []
        left = second.copied()
        assert sum(each.target.size for each in left) == some_columns(info)[1].size
    with PartsOfChunks(chunks) as third:
        assert list(third.requests(some_columns(info)[0], info))


def test_what_is_in_use_is_kept_and_the_rest_makes_room(info: ArrayInfo) -> None:
    one = info.grid.chunk_elements * info.dtype.itemsize
    chunks = SharedChunks(one)
    first, is_mine = chunks.use(0, info, 0)
    assert is_mine
    assert first
    assert chunks.use(0, info, 1) == (None, False)
    chunks.read([first])
    chunks.release([first])
    again, is_mine = chunks.use(0, info, 0)
    assert (again, is_mine) == (first, False)
    chunks.release([first])
    assert chunks.use(0, info, 1)[1]


def test_a_read_that_fails_fails_the_reshard_and_keeps_nobody_waiting(wide: RemoteStore) -> None:
    for number in (5, 9, 14):
        failing = FailingStore(RemoteStore(wide.behind), fail_at=number)
        with pytest.raises(CkptkitError, match="fails on purpose"):
            ckptkit.reshard(failing, RemoteStore(), to="tp:8", rules=CUTS, workers=2)
