"""A rank of a pool, as the launchers of accelerate leave it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def launched(strategy: str) -> Iterator[None]:
    """What accelerate looks for in the environment; under `fsdp` it is told that the CPU is one of
    the devices on which it shards.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: PLC0415
    from accelerate.utils import DistributedType  # noqa: PLC0415

    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    values = dict(zip(NAMES, (rank, rank, ranks, ranks, "127.0.0.1", "1"), strict=True))
    if ranks == "1":
        values = {}

    def on_cpu(self: Any) -> None:
        self.device = torch.device("cpu")

    kind = DistributedType.MULTI_GPU, on_cpu
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}):
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ |= values
        try:
            if strategy.startswith("fsdp"):
                with (
                    patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", kind[0])),
                    patch.object(PartialState, "set_device", kind[1]),
                ):
                    yield
            else:
                yield
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def whole(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """All of a tensor of which this rank may have a part."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().numpy().copy()
