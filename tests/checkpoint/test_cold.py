"""What only a device has and nobody else reads: past the page cache, the first time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit.checkpoint.read import reader
from ckptkit.errors import CorruptionError
from ckptkit.model import Box
from ckptkit.storage.base.disk import LocalSource
from tests.checkpoint.saving import Tensor, random_values, same, save
from tests.checkpoint.test_side_by_side import parts_of
from tests.storage.page_cache import forget

MB = 1 << 20
STATE = {
    "rows": Tensor(random_values((600, 1001), seed=1)),
    "columns": Tensor(random_values((64, 8192), seed=2)),
    "one": Tensor(random_values((9 * MB + 3,), "int8", seed=3)),
    **{f"small/{n}": Tensor(random_values((n, 100), "bfloat16", seed=n)) for n in range(1, 100)},
}


@pytest.fixture(scope="module", params=[MB, 32 * MB], ids=["chunks", "chunks beyond a request"])
def saved(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A step of 14 MB in some folder."""
    folder = tmp_path_factory.mktemp("cold")
    if not os.major(folder.stat().st_dev):
        pytest.skip("a file system without a device is always read through the cache")
    save(folder, STATE, chunk_bytes=request.param)
    return folder


@pytest.fixture
def past_cache(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each request that went past the cache, which 1 MB is enough for."""
    monkeypatch.setattr(reader, "_LEAST_COLD", MB)
    found: list[int] = []
    bring = LocalSource._bring

    def noting(self: LocalSource, memory: memoryview, offset: int) -> int:
        found.append(len(memory))
        return bring(self, memory, offset)

    monkeypatch.setattr(LocalSource, "_bring", noting)
    return found


def pack_of(folder: Path) -> Path:
    """The one pack of it, of which the system has nothing in memory."""
    (path,) = folder.rglob("*.zip")
    forget(path)
    return path


def everything(part: int = 0) -> list[tuple[str, Box, Any]]:
    """Memory for all of each array, or for another of its parts."""
    boxes = {name: list(parts_of(tensor.whole.shape))[part] for name, tensor in STATE.items()}
    kinds = {name: tensor.whole.dtype for name, tensor in STATE.items()}
    return [(name, box, np.zeros(box.shape, kinds[name])) for name, box in boxes.items()]


def assert_read(wanted: list[tuple[str, Box, Any]]) -> None:
    for name, box, values in wanted:
        whole = STATE[name].whole
        assert same(values, whole[box.within(Box.whole(whole.shape))]), (name, box)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("part", range(4))
def test_it_is_read_past_the_cache_once(
    saved: Path, past_cache: list[int], part: int, verify: bool
) -> None:
    for is_cold in (True, False):
        pack_of(saved) if is_cold else past_cache.clear()
        with ckptkit.open(saved) as step:
            step.read_many(wanted := everything(part), verify=verify, alone=True)
        assert_read(wanted)
        nbytes = sum(values.nbytes for _, _, values in wanted)
        assert is_cold == bool(past_cache)
        assert sum(past_cache) >= nbytes * is_cold
        assert not verify or sum(past_cache) < 3 * nbytes


def test_what_others_read_too_goes_through_the_cache(saved: Path, past_cache: list[int]) -> None:
    pack_of(saved)
    with ckptkit.open(saved) as step:
        step.read_many(wanted := everything())
    assert_read(wanted)
    assert not past_cache


def test_little_goes_through_the_cache(saved: Path, past_cache: list[int]) -> None:
    pack_of(saved)
    with ckptkit.open(saved) as step:
        step.read_many(wanted := everything()[3:13], alone=True)
    assert_read(wanted)
    assert not past_cache


@pytest.mark.parametrize("name", ["rows", "columns", "one"])
def test_each_flipped_bit_is_found(saved: Path, past_cache: list[int], name: str) -> None:
    pack = pack_of(saved)
    with ckptkit.open(saved) as step:
        row = step.first_row(name)
        start, length = (int(at[row]) for at in (step.manifest.offset, step.manifest.length))
    whole = pack.read_bytes()
    for place in (start, start + length - 1):
        pack.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        pack_of(saved)
        with ckptkit.open(saved) as step, pytest.raises(CorruptionError) as caught:
            step.read_many(everything(), alone=True)
        assert f"at byte {start}" in caught.value.where
        assert f"chunk {name}" in caught.value.what
    pack.write_bytes(whole)
    assert past_cache


def test_a_pack_that_is_cut_while_it_is_read_is_reported(
    saved: Path, tmp_path: Path, past_cache: list[int]
) -> None:
    for path in saved.rglob("*"):
        there = tmp_path / path.relative_to(saved)
        there.mkdir() if path.is_dir() else there.write_bytes(path.read_bytes())
    pack = pack_of(tmp_path)
    with ckptkit.open(tmp_path) as step:
        with step.packs.use(0):
            os.truncate(pack, pack.stat().st_size // 2)
        with pytest.raises(CorruptionError, match="ends at byte"):
            step.read_many(everything(), alone=True)
    assert past_cache
