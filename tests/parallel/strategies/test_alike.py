"""Ranks that call `as_distributed` in different ways, and calls that are made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckptkit.errors import PeerError
from ckptkit.parallel import as_distributed
from tests.live.pool import JobError, Pool
from tests.parallel.strategies.training import spread


def disagreeing(what: str) -> None:
    """Spread a model otherwise on rank 1 than on the others."""
    is_other = dist.get_rank() == 1
    model = nn.Linear(4, 5 if is_other and what == "model" else 4)
    model.bias.requires_grad_(not (is_other and what == "frozen"))
    options: dict[str, Any] = {"optimizer": torch.optim.SGD}
    spec = "fsdp"
    if is_other and what == "strategy":
        spec = "ddp"
    elif is_other and what == "group_below":
        options["group_below"] = 17
    elif is_other and what == "optimizer":
        options["optimizer"] = torch.optim.AdamW
    elif what == "options":
        options["optimizer_options"] = {"lr": 0.2 if is_other else 0.1, "momentum": 0.9}
    elif what == "function":
        rate = 0.2 if is_other else 0.1
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=rate)
    elif what == "instance":
        spec = "ddp"
        options["optimizer"] = torch.optim.AdamW(
            model.parameters(), betas=(0.9, 0.95 if is_other else 0.99)
        )
    elif is_other and what == "example":
        options["example"] = torch.zeros(1, 4)
    elif is_other and what == "refused":
        options["overlap"] = True
    as_distributed(model, spec, **options)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("model", "another model than rank 0: weight: \\(5, 4\\)"),
        ("frozen", "another model than rank 0: bias: \\(4,\\) torch.float32 \\(on rank 0"),
        ("strategy", "another strategy than rank 0: ddp:2"),
        ("group_below", "another group_below than rank 0: 17"),
        ("optimizer", "another optimizer than rank 0: AdamW"),
        ("options", "another optimizer_options than rank 0: lr=0.2 \\(on rank 0 lr=0.1\\)"),
        ("function", "another optimizer_options than rank 0: lr=0.2 \\(on rank 0 lr=0.1\\)"),
        ("instance", "another optimizer_options than rank 0: betas=\\(0.9, 0.95"),
        ("example", "another example than rank 0: given"),
    ],
)
def test_ranks_that_disagree_are_told_rather_than_left_waiting(
    gloo: Pool, what: str, said: str
) -> None:
    with pytest.raises(JobError, match=f"{PeerError.__name__}: rank 1 has {said}"):
        gloo.run(2, disagreeing, what)


def once_spread() -> bool:
    """Whether the schedule of a pipeline is known again."""
    made = spread("pp:2")
    return as_distributed(made.model, "pp:2") is made


def test_a_schedule_is_known_again(gloo: Pool) -> None:
    assert gloo.run(2, once_spread) == [True, True]


def test_ranks_are_told_when_one_is_refused(gloo: Pool) -> None:
    with pytest.raises(JobError, match="because of rank 1: UsageError: overlap is for zero1"):
        gloo.run(2, disagreeing, "refused")


def begun_with(dtype: torch.dtype) -> list[float]:
    """The values of a buffer that begins with the number of its rank."""
    model = nn.Linear(4, 4)
    model.register_buffer("scale", torch.full((2, 3), dist.get_rank() + 1.0).to(dtype).T)
    as_distributed(model, "fsdp")
    return model.get_buffer("scale").float().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint16, torch.float8_e4m3fn])
def test_buffers_of_any_dtype_begin_as_on_rank_0(gloo: Pool, dtype: torch.dtype) -> None:
    assert gloo.run(2, begun_with, dtype) == [[1.0] * 6] * 2
