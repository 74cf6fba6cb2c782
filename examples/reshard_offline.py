"""A step of eight FSDP ranks becomes one of four tensor-parallel ranks; no model, no torch.

Run: python examples/reshard_offline.py
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import ckptkit
from ckptkit import ThreadBarrier, Writer

RANKS = 8
SHAPES = {
    f"layers.{layer}.{name}.weight": shape
    for layer in range(4)
    for name, shape in {"q_proj": (256, 256), "o_proj": (256, 256), "norm": (256,)}.items()
}
RULES = {
    "rules": [
        {"match": "*.q_proj.weight", "tp": "shard(0, unit=32)"},  # never cut inside a head
        {"match": "*.o_proj.weight", "tp": "shard(1, unit=32)"},
        {"match": "*norm*", "tp": "replicate"},
    ]
}


def state() -> dict[str, np.ndarray]:
    """Parameters and one moment of each."""
    random = np.random.default_rng(0)
    groups = ["model/{}", "optimizer/{}/exp_avg"]
    return {
        group.format(name): random.standard_normal(shape, np.float32)
        for name, shape in SHAPES.items()
        for group in groups
    }


def save(run: Path, rank: int, barrier: ThreadBarrier) -> None:
    """What each rank of the training job did."""
    with Writer(run, step=100, strategy=f"fsdp:{RANKS}", rank=rank, barrier=barrier) as writer:
        for name, whole in state().items():
            _, parameter, *moment = name.split("/")
            writer.add(
                name,
                np.array_split(whole, RANKS)[rank],
                shape=whole.shape,
                placements={"fsdp": "shard(0)"},
                role="optimizer" if moment else "param",
                of=f"model/{parameter}" if moment else None,
            )


def main() -> None:
    """Plan, reshard, compare; then read what rank 1 of the new job needs."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = Path(folder, "fsdp8"), Path(folder, "tp4")
        with ThreadPoolExecutor(RANKS) as ranks:
            list(ranks.map(save, [old] * RANKS, range(RANKS), ThreadBarrier.group(RANKS)))
        plan = ckptkit.plan_reshard(old, new, to="tp:4", rules=RULES)
        print(f"{plan.from_strategy} -> {plan.to_strategy}: {plan.bytes_written} bytes")
        print(f"read {plan.read_amplification:.2f} times, {plan.files} files")
        ckptkit.reshard(old, new, to="tp:4", rules=RULES, memory="256MiB")
        print(f"the same state: {ckptkit.diff(old, new).same}")
        with ckptkit.open(new) as checkpoint:
            weight = checkpoint["model/layers.0.o_proj.weight"]
            (box,) = weight.part(1).boxes
            print(f"rank 1 holds {box} of {weight.name}, all of it in its own pack")
            whole = state()[weight.name]
            print(f"bit for bit: {np.array_equal(weight.read(box), whole[:, 64:128])}")


if __name__ == "__main__":
    main()
