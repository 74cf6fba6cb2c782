"""What the stages of ZeRO promise: who holds what, and what is sent in a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from ckptkit.parallel import Distributed, as_distributed
from tests.live.pool import Pool
from tests.parallel.strategies.training import Layered

LAYERS, WIDTH = 40, 16
LAYER = WIDTH * WIDTH * 4
WHOLE = LAYERS * LAYER

GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"


def spread(spec: str, **options: Any) -> Distributed:
    """Some tiny layers under a strategy."""
    torch.manual_seed(0)
    model = Layered(LAYERS, WIDTH)
    return as_distributed(model, spec, optimizer=torch.optim.Adam, **options)


def step(dist: Distributed) -> Counter[str]:
    """The collectives of a forward and a backward pass."""
    # The counter hooks into modules, and warns where inputs need no gradients.
    batch = torch.randn(2, WIDTH, requires_grad=True), torch.randn(2, WIDTH)
    with CommDebugMode() as counted:
        dist.backward(nn.functional.mse_loss, batch)
    return Counter({str(kind).split(".")[-1]: n for kind, n in counted.get_comm_counts().items()})


def counts(spec: str, options: dict[str, Any]) -> Counter[str]:
    """Those of the second step, which torch has settled by."""
    dist = spread(spec, **options)
    step(dist)
    return step(dist)


def shares(spec: str) -> dict[str, Any]:
    """The memory report after a step, and what is whole between forward and backward."""
    dist = spread(spec, group_below=LAYER)
    dist.step(nn.functional.mse_loss, (torch.randn(2, WIDTH), torch.randn(2, WIDTH)))
    found = asdict(dist.memory())
    output = dist.model(torch.randn(2, WIDTH))
    held = [layer.weight for layer in dist.modules[0].modules() if isinstance(layer, nn.Linear)]
    local = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in held]
    found["between"] = sum(tensor.numel() * tensor.element_size() for tensor in local)
    output.sum().backward()
    return found


@pytest.mark.parametrize(
    ("spec", "parameters", "gradients", "state", "between"),
    [
        ("ddp:4", 1, 1, 1, 1),
        ("zero1:4", 1, 1, 4, 1),
        ("zero2:4", 4, 4, 4, 1),
        ("zero3:4", 4, 4, 4, 4),
        ("ddp:2,fsdp:2", 2, 2, 2, 2),
    ],
)
def test_each_stage_shares_out_more(
    gloo: Pool, spec: str, parameters: int, gradients: int, state: int, between: int
) -> None:
    ranks = gloo.run(4, shares, spec)
    for found in ranks:
        assert found["parameters"] == {"here": WHOLE // parameters, "whole": WHOLE}
        assert found["gradients"] == {"here": WHOLE // gradients, "whole": WHOLE}
        kept = 2 * WHOLE + LAYERS * 4  # and how many steps each was made
        assert found["optimizer"]["whole"] == kept
        assert found["optimizer"]["here"] == pytest.approx(kept / state, rel=0.1)
        assert found["between"] == pytest.approx(WHOLE / between, rel=0.2)


def test_zero2_gathers_once_and_zero3_twice(gloo: Pool) -> None:
    options = {"group_below": 10 * LAYER}
    zero2, *_ = gloo.run(2, counts, "zero2:2", options)
    zero3, *_ = gloo.run(2, counts, "zero3:2", options)
    assert (zero2[GATHER], zero2[SCATTER], zero2[REDUCE]) == (4, 4, 0)
    # The unit that the forward pass ends with is the one that the backward pass begins with.
    assert (zero3[GATHER], zero3[SCATTER], zero3[REDUCE]) == (7, 4, 0)


def test_grouping_saves_collectives(gloo: Pool) -> None:
    alone, *_ = gloo.run(2, counts, "fsdp:2", {"group_below": 0})
    grouped, *_ = gloo.run(2, counts, "fsdp:2", {"group_below": 20 * LAYER})
    assert alone[GATHER] == 2 * LAYERS - 1
    assert grouped[GATHER] == 3


def test_ddp_reduces_and_gathers_nothing(gloo: Pool) -> None:
    ddp, *_ = gloo.run(2, counts, "ddp:2", {})
    assert ddp[GATHER] == ddp[SCATTER] == 0
