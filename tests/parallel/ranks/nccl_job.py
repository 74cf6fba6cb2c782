"""What each rank of a job on GPUs runs; it leaves a document of what it found."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptkit.parallel.ranks import init
from ckptkit.parallel.ranks.communicator import Communicator
from tests.live.strategies import LAYOUTS
from tests.live.test_matrix import load, save
from tests.parallel.ranks.contract import CONTRACT
from tests.parallel.strategies.training import farthest, reference, spread, train, values

# Of any number of ranks, whatever their names say.
WAYS = [
    *("ddp:2", "zero1:2", "fsdp2:2", "zero2:2", "tp:2", "fsdp1:2", "fsdp1:2, flat"),
    "fsdp1:2, grad op",
]
KINDS = ["ddp", "zero1", "zero2", "fsdp", "tp"]
COMPRESSIONS = {"fp16": 1e-2, "bf16": 5e-2, "int8": 1e-1, "topk:1.0": 1e-4, "powersgd:8": 1e-1}


def strategies(comm: Communicator, kind: str) -> None:
    """The losses and parameters of one process."""
    compression = kind if kind in COMPRESSIONS else None
    made = spread(f"{'ddp' if compression else kind}:{comm.world_size}", compression=compression)
    losses, parameters = reference()
    found = train(made, range(len(losses)))
    most = COMPRESSIONS.get(kind, 1e-4)
    assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < most
    assert compression or farthest(values(made), parameters) < most


def main(folder: str) -> None:
    """Try all of it; leave the tracebacks, empty where it holds."""
    found: dict[str, str] = {}

    def attempt(name: str, check: Callable[[], Any]) -> None:
        try:
            found[name] = str(check() or "")
        except Exception:  # noqa: BLE001 - told to the test
            found[name] = traceback.format_exc()

    with init("nccl", timeout=60) as comm:
        for name, check in CONTRACT.items():
            attempt(name, partial(check, comm))
        steps: dict[str, Any] = {}

        def saved(way: str) -> None:
            steps[way] = f"{folder}/{LAYOUTS[way].build.__name__}", {}
            steps[way] = steps[way][0], save(way, steps[way][0])

        for way in WAYS:
            attempt(f"save {way}", partial(saved, way))

        def wrong(way: str) -> dict[str, list[str]]:
            return {source: each for source, each in load(way, steps).items() if each}

        for way in WAYS:
            attempt(way, partial(wrong, way))
            found[way] = found[f"save {way}"] + found[way]
        for kind in (*KINDS, *COMPRESSIONS):
            attempt(kind, partial(strategies, comm, kind))
        Path(folder, f"{comm.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
