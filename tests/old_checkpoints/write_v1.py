"""Writes v1/, the checkpoint of format version 1 that every later ckptkit must read.

    PYTHONPATH=. python -m tests.old_checkpoints.write_v1

Run again only as long as version 1 has not been released: a released checkpoint is never rewritten.
"""

from __future__ import annotations

import datetime
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from ckptkit import PerRank, Sum, ThreadBarrier, Writer
from ckptkit.model import Box, Strategy, layout_of, parse_placement

FOLDER = Path(__file__).parent / "v1"
STRATEGY = "pp:2,fsdp:2"
STEP = 1200
SAVE_ID = "20261121T101500Z-0123456789ab"
TIME = 1795256100.25

Value = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tensor:
    """A whole array and how it is cut."""

    whole: Value
    cut: Mapping[str, str]
    role: str
    of: str | None = None

    @property
    def stage(self) -> int | None:
        """The pipeline stage that has it; None where both have."""
        return int(self.cut["pp"][6]) if "pp" in self.cut else None


def counted(shape: tuple[int, ...], dtype: Any) -> Value:
    """Small whole numbers, which every dtype here holds exactly."""
    return (np.arange(np.prod(shape, dtype=int)) % 97 - 40).reshape(shape).astype(dtype)


FIRST, LAST = {"pp": "stage(0)"}, {"pp": "stage(1)"}
ARRAYS = {
    "model/embed": Tensor(
        counted((24, 10), ml_dtypes.bfloat16), {**FIRST, "fsdp": "shard(0)"}, "param"
    ),
    "model/fused": Tensor(
        counted((7, 4), np.float32), {**LAST, "fsdp": "shard(0, blocks=[3,4])"}, "param"
    ),
    "model/layers.1.a%2Fb": Tensor(counted((5, 3), np.float32), LAST, "param"),
    "model/empty": Tensor(counted((0, 3), np.float16), {"fsdp": "shard(0)"}, "buffer"),
    "model/scale": Tensor(counted((), np.float32), {}, "buffer"),
    "optimizer/embed/exp_avg": Tensor(
        counted((24, 10), np.float32), {**FIRST, "fsdp": "shard(0)"}, "optimizer", "model/embed"
    ),
    "head/mask": Tensor(counted((9,), np.int64) > 0, LAST, "other"),
}
ALIASES = {"model/lm_head": "model/embed"}
DETAILS = {"precision": "bf16", "stages": (1, 2), "seed": 2**70}
SCHEDULE = {
    "lr": 0.125,
    "at": datetime.datetime(2026, 11, 21, 10, 15, tzinfo=datetime.UTC),
    "steps": (1, 2**80, -1),
    "by_group": {0: None, 1: [True, b"\0\xff"]},
    "window": counted((3,), np.float32),
    "best": np.float64(0.5),
}
RANDOM_STATES = [bytes([rank] * 4) for rank in range(4)]
TOKENS = [100 + rank for rank in range(4)]


def part_of(tensor: Tensor, rank: int) -> Value | None:
    """What a rank holds, cut out of the whole."""
    strategy = Strategy.parse(STRATEGY)
    row = [parse_placement(tensor.cut.get(axis.name, "replicate")) for axis in strategy.mesh.axes]
    part = layout_of(tensor.whole.shape, strategy, row).part(rank)
    if part.is_empty:
        return None
    local = np.empty(part.shape, tensor.whole.dtype)
    for box, place in zip(part.boxes, part.places, strict=True):
        local[within(place)] = tensor.whole[within(box)]
    return local


def within(box: Box) -> Any:
    """The index of a box, also of an array without dims."""
    return (*(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True)), ...)


def write(location: Path, barrier: ThreadBarrier) -> None:
    """One rank; it knows the arrays of its own stage only."""
    rank = barrier.rank
    with Writer(
        location, step=STEP, strategy=STRATEGY, rank=rank, barrier=barrier, details=DETAILS
    ) as writer:
        for name, tensor in ARRAYS.items():
            if tensor.stage in (None, rank // 2):
                writer.add(
                    name,
                    part_of(tensor, rank),
                    shape=tensor.whole.shape,
                    dtype=tensor.whole.dtype,
                    placements=tensor.cut,
                    role=tensor.role,
                    of=tensor.of,
                )
        if rank < 2:
            for name, alias_of in ALIASES.items():
                writer.add_alias(name, alias_of)
        writer.add_object("schedule", SCHEDULE)
        writer.add_object("rng", PerRank(RANDOM_STATES[rank]))
        writer.add_object("tokens", Sum(TOKENS[rank]))


def main(folder: Path = FOLDER) -> None:
    """All ranks, with a fixed time and save id, so that the bytes are the same each time."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with (
        mock.patch("ckptkit.checkpoint.write.writer.new_save_id", return_value=SAVE_ID),
        mock.patch("time.time", return_value=TIME),
    ):
        ranks = [
            threading.Thread(target=write, args=(folder, barrier))
            for barrier in ThreadBarrier.group(4, 60)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main()
