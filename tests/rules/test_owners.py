"""Optimizer state of ZeRO-1 lies where torch's own optimizer looks for it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptkit.plan.chunks import owners_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of what it imports itself
    from torch.distributed.optim import ZeroRedundancyOptimizer

RANKS = 3


@pytest.fixture
def alone() -> Iterator[None]:
    """A group whose other ranks are not there."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", range(5))
def test_owners_are_those_of_torch(alone: None, seed: int) -> None:
    numbers = random.Random(seed)
    sizes = {f"p{i}": numbers.choice([1, 2, 3, 5, 8, 40, 41]) for i in range(17)}
    parameters = {name: torch.nn.Parameter(torch.zeros(n)) for name, n in sizes.items()}
    optimizer: Any = ZeroRedundancyOptimizer(
        list(parameters.values()), optimizer_class=torch.optim.AdamW
    )
    of = optimizer._param_to_rank
    assert owners_of(sizes, RANKS) == {name: of[p] for name, p in parameters.items()}
