"""A run to look at, and copies of it to damage."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from ckptkit import PerRank, Sum, Writer
from tests.checkpoint.saving import Tensor, add, random_values, save, save_by

STRATEGY = "ddp:2,fsdp:2"
TENSORS = {
    "model/qkv": Tensor(random_values((8, 6)), {"fsdp": "shard(0, blocks=[4,2,2])"}),
    "model/w": Tensor(random_values((5, 6), "bfloat16"), {"fsdp": "shard(0)"}),
    "model/none": Tensor(random_values((0, 2), "int8"), {"fsdp": "shard(0)"}),
    "model/scale": Tensor(random_values((), "float64")),
    "optimizer/w/exp_avg": Tensor(random_values((5, 6)), {"fsdp": "shard(0)"}),
}


def _fill(writer: Writer) -> None:
    for name, tensor in TENSORS.items():
        of = "model/w" if name.startswith("optimizer") else None
        add(writer, name, tensor, role="optimizer" if of else "param", of=of)
    writer.add_alias("model/tied", "model/w")
    writer.add_object("rate", 0.5)
    writer.add_object("seed", PerRank(b"\x00\x01"))
    writer.add_object("tokens", Sum(10))
    writer.add_object("odd", {"t": (1, 2), "nan": float("nan"), "array": np.arange(3)})
    writer.add_object("evil", "\x1b[2J")
    writer.add_object("when", datetime(2026, 1, 2, tzinfo=UTC))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "7b"
    for step in (10, 20):
        save_by(run, _fill, strategy=STRATEGY, step=step, details={"precision": "bf16"})
    (run / "step-0000000030" / "data" / "20260101T000000Z-abc").mkdir(parents=True)
    (run / "step-0000000030" / "data" / "20260101T000000Z-abc" / "rank-00000.zip").write_bytes(
        b"x" * 100
    )
    return run


@pytest.fixture
def run(made_once: Path, tmp_path: Path) -> Path:
    """Steps 10 and 20 of two times two ranks, and a step 30 that was never committed."""
    return Path(shutil.copytree(made_once, tmp_path / "7b"))


@pytest.fixture(scope="session")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step that is small, but takes a while to unpack: it is thousands of chunks."""
    run = tmp_path_factory.mktemp("slow")
    save(run, {"model/w": Tensor(random_values((24000, 64)))}, chunk_bytes=256)
    return run
