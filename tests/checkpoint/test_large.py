"""Arrays larger than chunks, segments and requests, on a disk: where the data plane has borders."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.model import Box
from tests.checkpoint.saving import Tensor, assert_holds, random_values, same, save

MB = 1 << 20
TALL = random_values((3001, 1001), "float32", 1)
STATE = {
    "model/tall": Tensor(TALL, {"fsdp": "shard(0)"}),
    "model/wide": Tensor(random_values((7, 1_000_003), "int8", 2), {"fsdp": "shard(1)"}),
    "model/same": Tensor(random_values((3 * MB + 5,), "uint8", 3)),
    "model/tiny": Tensor(random_values((3,), "float64", 4)),
}


@pytest.fixture(scope="module", params=[64 << 10, 4 * MB, 64 * MB], ids="{}-byte chunks".format)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save(folder, STATE, strategy="fsdp:3", chunk_bytes=request.param)
    return folder


def test_everything_is_read_bit_for_bit(run: Path) -> None:
    assert ckptkit.verify(run) == []
    for verify in (True, False):
        with ckptkit.open(run) as checkpoint:
            assert_holds(checkpoint, STATE, verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (3001, 1)),
        Box((0, 250), (3001, 250)),
        Box((1000, 0), (2, 1001)),
        Box((1, 1), (2999, 999)),
        Box((3000, 1000), (1, 1)),
        Box((5, 5), (0, 3)),
    ],
    ids=str,
)
def test_rows_and_columns_are_read_bit_for_bit(run: Path, box: Box, verify: bool) -> None:
    with ckptkit.open(run) as checkpoint:
        expected = np.ascontiguousarray(TALL[box.within(Box.whole(TALL.shape))])
        assert same(checkpoint.read("model/tall", box, verify=verify), expected)


def test_one_checkpoint_serves_many_threads(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fewer than there are packs, so that some are opened for each read.
    monkeypatch.setattr("ckptkit.checkpoint.read.packs._KEPT_OPEN", 1)
    wrong: list[str] = []
    with ckptkit.open(run) as checkpoint:

        def read(name: str) -> None:
            if not same(checkpoint.read(name), STATE[name].whole):
                wrong.append(name)

        threads = [threading.Thread(target=read, args=(name,)) for name in [*STATE, *STATE]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
