"""Eight writers save one step, a reader takes what it wants of it.

Run: python examples/sharded_save.py
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import ckptkit
from ckptkit import PerRank, Sum, ThreadBarrier, Writer

RANKS = 8
WEIGHT = np.arange(1024 * 256, dtype=np.float32).reshape(1024, 256)


def save(run: str, rank: int, barrier: ThreadBarrier) -> None:
    """What each rank of a job does; there they are processes, and FileBarrier lets them meet."""
    mine = np.array_split(WEIGHT, RANKS)[rank]
    with Writer(run, step=100, strategy=f"fsdp:{RANKS}", rank=rank, barrier=barrier) as writer:
        writer.add("model/weight", mine, shape=WEIGHT.shape, placements={"fsdp": "shard(0)"})
        writer.add("model/bias", np.ones(256, np.float32))  # the same on all: written once
        writer.add_object("learning rate", 3e-4)
        writer.add_object("tokens", Sum(1000 + rank))
        writer.add_object("seed", PerRank(rank))


def main() -> None:
    """Save, then read a column slice, which no writer had."""
    with tempfile.TemporaryDirectory() as run:
        with ThreadPoolExecutor(RANKS) as ranks:
            barriers = ThreadBarrier.group(RANKS)
            list(ranks.map(save, [run] * RANKS, range(RANKS), barriers))
        with ckptkit.open(run) as checkpoint:
            columns = checkpoint["model/weight"][:, 64:128]
            print(f"step {checkpoint.step}, saved by {checkpoint.strategy}")
            print(f"columns as they were: {np.array_equal(columns, WEIGHT[:, 64:128])}")
            print(f"objects: {dict(checkpoint.objects)}")
        print(f"damage: {ckptkit.verify(run) or 'none'}")


if __name__ == "__main__":
    main()
