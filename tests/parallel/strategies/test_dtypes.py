"""Dtypes and shapes of parameters that not every engine takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import mse_loss

from ckptkit.errors import UsageError
from ckptkit.model import Strategy
from ckptkit.parallel import as_distributed
from ckptkit.parallel.strategies.data_parallel import check_parameters
from ckptkit.parallel.strategies.options import StrategyOptions


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Uneven(nn.Module):
    """Has a factor of another dtype, or without dims, beside a layer."""

    def __init__(self, factor: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = nn.Parameter(factor.clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output times the factor."""
        out: torch.Tensor = self.layer(hidden) * self.factor.real.float()
        return out


@pytest.mark.parametrize("spec", ["zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_several_dtypes_are_refused_where_the_engine_takes_one(
    spec: str, dtype: torch.dtype
) -> None:
    with pytest.raises(UsageError, match=f"(?s)several dtypes.*{dtype}.*use ddp"):
        as_distributed(Uneven(torch.ones(4, dtype=dtype)), spec, optimizer=torch.optim.SGD)


def test_a_parameter_without_dims_is_refused_where_it_would_be_cut() -> None:
    with pytest.raises(UsageError, match="factor: a parameter without dims"):
        as_distributed(Uneven(torch.tensor(1.0)), "fsdp")


@pytest.mark.parametrize(
    ("spec", "factor"),
    [
        ("ddp", torch.ones(4, dtype=torch.bfloat16)),
        ("ddp", torch.ones(4, dtype=torch.complex64)),
        ("ddp", torch.tensor(1.0)),
        ("zero1", torch.tensor(1.0)),
    ],
)
def test_replicas_take_what_they_can(spec: str, factor: torch.Tensor) -> None:
    options = {"lr": 1.0}
    made = as_distributed(
        Uneven(factor), spec, optimizer=torch.optim.SGD, optimizer_options=options
    )
    made.step(mse_loss, (torch.ones(2, 4), torch.zeros(2, 4)))
    assert not torch.equal(made.model.module.factor, factor)


@pytest.mark.parametrize("spec", ["zero1", "fsdp"])
def test_what_is_not_trained_may_have_another_dtype(spec: str) -> None:
    model = Uneven(torch.ones(4, dtype=torch.bfloat16))
    model.factor.requires_grad = False
    made = as_distributed(model, spec, optimizer=torch.optim.SGD)
    made.step(mse_loss, (torch.ones(2, 4), torch.zeros(2, 4)))


def test_units_may_differ_in_dtype() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    check_parameters(model, Strategy.parse("fsdp:2"), StrategyOptions(group_below=1))
    with pytest.raises(UsageError, match=r"1\.weight: parameters of several dtypes"):
        check_parameters(model, Strategy.parse("fsdp:2"), StrategyOptions())
    for spec in ("ddp:2,tp:2", "pp:2,ddp:2"):
        with pytest.raises(UsageError, match=r"1\.weight: parameters of several dtypes"):
            check_parameters(model, Strategy.parse(spec), StrategyOptions())
    # Then the stages are in DDP, which takes any.
    check_parameters(model, Strategy.parse("pp:2,ddp:2"), StrategyOptions(compression="fp16"))
