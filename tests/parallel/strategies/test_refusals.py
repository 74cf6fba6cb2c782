"""What cannot be right is refused before anything changes, and says why."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from ckptkit.errors import LayoutError, RulesError, StrategyError, UsageError
from ckptkit.model import Strategy
from ckptkit.parallel import Distributed, as_distributed
from ckptkit.parallel.strategies import device_of
from ckptkit.parallel.strategies.options import StrategyOptions, resolved, schedule_of, share
from tests.live.network import batch, loss_of, network
from tests.live.pool import Pool
from tests.parallel.strategies.training import RULES, Layered, spread


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("spec", "ranks", "wanted"),
    [
        ("fsdp", 6, "fsdp:6"),
        ("tp:2, fsdp", 6, "tp:2,fsdp:3"),
        ("pp:2,ddp,tp:2", 8, "pp:2,ddp:2,tp:2"),
        ("hsdp:2x4", 8, "ddp:2,fsdp:4"),
        ("single", 1, "single"),
        ("inner=fsdp", 2, "inner=fsdp:2"),
    ],
)
def test_a_strategy_fills_the_job(spec: str, ranks: int, wanted: str) -> None:
    assert str(resolved(spec, ranks)) == wanted


@pytest.mark.parametrize(
    ("spec", "ranks", "reason"),
    [
        ("fsdp:8", 4, "8 ranks, the job has 4"),
        ("tp:4,fsdp", 6, "6 ranks cannot be divided by the 4"),
        ("tp:8,fsdp", 4, "4 ranks cannot be divided by the 8"),
        ("tp,fsdp", 4, "more than one axis leaves its size out"),
        ("fdsp", 4, "did you mean fsdp"),
        ("ep:2,fsdp:2", 4, "expert parallelism"),
        ("ddp:2,zero1:2", 4, "zero1 repeats"),
        ("zero1:2,tp:2", 4, "takes no DTensors"),
        ("fsdp:2,ddp:2", 4, "write ddp before fsdp"),
        ("a=tp:2,b=tp:2", 4, "more than one tp"),
        ("fsdp:2,zero1:2", 4, "at most one axis"),
    ],
)
def test_a_strategy_that_does_not_fit_is_refused(spec: str, ranks: int, reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        resolved(spec, ranks)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload": True}, "offload is for"),
        ({"mixed_precision": "fp7"}, "no precision"),
        ({"mixed_precision": torch.int8}, "no precision"),
        ({"mixed_precision": torch.float64}, "no precision"),
        ({"group_below": "many"}, "no size"),
        ({"microbatches": 0}, "no number of micro-batches"),
        ({"schedule": "zigzag"}, "no schedule"),
        ({"balance": "luck"}, "no way to balance"),
        ({"optimizer": 3}, "no optimizer"),
        ({"optimizer": lambda parameters: parameters}, "not an optimizer"),
        ({"optimizer_options": {"lr": 1.0}}, "without an optimizer"),
        ({"compression": "zip"}, "no compression"),
    ],
)
def test_an_option_that_means_nothing_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        as_distributed(network(0), "ddp", **options)


@pytest.mark.parametrize(
    ("spec", "compression", "reason"),
    [
        ("tp:1", "int8", "compression of gradients is for ddp, zero1, zero2 and fsdp"),
        ("ddp:1,fsdp:1", "int8", "an all-reduce that torch lets nobody replace"),
        ("fsdp:1", "topk:0.1", "what is left unsent is as large as all gradients"),
        ("zero2:1", "powersgd:2", "and zero2 keeps a part of them only"),
        ("ddp:2,tp:2", "int8", "an all-reduce that torch lets nobody replace"),
        ("pp:2,ddp:2", "topk:0.1", "what stages have left unsent"),
    ],
)
def test_compression_is_refused_where_torch_or_memory_does_not_allow_it(
    spec: str, compression: str, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        StrategyOptions(compression=compression).check(Strategy.parse(spec))


def test_compression_is_for_one_stage_on_each_rank() -> None:
    options = StrategyOptions(compression="int8", schedule="interleaved", stages_per_rank=2)
    with pytest.raises(UsageError, match="one stage on each rank"):
        options.check(Strategy.parse("pp:2,ddp:2"))


def test_an_interleaved_schedule_takes_two_stages_or_more() -> None:
    assert schedule_of("interleaved:3") == ("interleaved", 3)
    with pytest.raises(UsageError, match="two stages or more"):
        schedule_of("interleaved:1")


def test_the_optimizer_of_another_model_is_refused() -> None:
    model, other = network(0), network(1)
    with pytest.raises(UsageError, match="not the model's"):
        as_distributed(model, "ddp", optimizer=torch.optim.SGD(other.parameters()))
    assert type(as_distributed(model, "fsdp").model).__name__.startswith("FSDP")


@pytest.mark.parametrize("spec", ["fsdp", "zero1"])
def test_an_optimizer_made_before_spreading_is_refused_where_parameters_change(spec: str) -> None:
    model = network(0)
    with pytest.raises(UsageError, match="before the model was spread"):
        as_distributed(model, spec, optimizer=torch.optim.SGD(model.parameters()))


def test_an_optimizer_made_before_goes_with_replicas() -> None:
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert as_distributed(model, "ddp", optimizer=optimizer).optimizer is optimizer


def test_a_function_may_make_the_optimizer() -> None:
    def decaying(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]]
        return torch.optim.AdamW([{"params": group} for group in groups])

    made = as_distributed(network(0), "fsdp", optimizer=decaying)
    assert len(made.optimizer.param_groups) == 2


@pytest.mark.parametrize("spec", ["ddp", "fsdp", "single"])
def test_spreading_twice_is_spreading_once(spec: str) -> None:
    model = network(0)
    made = as_distributed(model, spec, optimizer=torch.optim.SGD)
    for again in (made, made.model, model):
        assert as_distributed(again, spec) is made
    assert as_distributed(made, str(made.strategy)) is made
    with pytest.raises(StrategyError, match="already"):
        as_distributed(made, "zero2")
    with pytest.raises(UsageError, match="another optimizer"):
        as_distributed(made, spec, optimizer=torch.optim.SGD(model.parameters()))


def test_what_is_chosen_otherwise_the_second_time_is_refused() -> None:
    model = network(0)
    made = as_distributed(model, "ddp", optimizer=torch.optim.SGD, optimizer_options={"lr": 0.5})
    same: dict[str, Any] = {
        "optimizer": torch.optim.SGD,
        "optimizer_options": {"lr": 0.5},
        "microbatches": 1,
    }
    assert as_distributed(model, "ddp", **same) is made
    others: dict[str, Any] = {
        "optimizer": torch.optim.AdamW,
        "optimizer_options": {"lr": 0.1},
        "compression": "int8",
        "mixed_precision": "bf16",
        "microbatches": 2,
        "rules": RULES,
    }
    for name, value in others.items():
        with pytest.raises(UsageError, match=f"another ({name}|precision)"):
            as_distributed(model, "ddp", **{name: value})


def test_an_optimizer_cannot_be_added_later() -> None:
    made = as_distributed(network(0), "ddp")
    with pytest.raises(UsageError, match="spread without an optimizer"):
        as_distributed(made, "ddp", optimizer=torch.optim.SGD)


def test_a_model_is_not_changed_by_being_known() -> None:
    model = network(0)
    before = set(vars(model))
    made = as_distributed(model, "single")
    assert set(vars(model)) == before
    assert as_distributed(model, "single") is made
    assert as_distributed(copy.deepcopy(model), "single") is not made


@pytest.mark.parametrize("model", [3, "model", [nn.Linear(1, 1)]])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(UsageError, match="no module"):
        as_distributed(model, "ddp")


def test_ranks_compute_where_the_model_is_unless_they_communicate_from_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.device("meta"):  # any device that is not the host
        model = nn.Linear(4, 4)
    assert device_of(model, None).type == "meta"
    assert device_of(model, "cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl"):
        monkeypatch.setattr(dist, "get_backend_config", backends.strip)
        assert str(device_of(model, None)) == "cuda:1"
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:ckptkit_mpi,cuda:ckptkit_mpi")
    assert device_of(model, None).type == "meta"


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="meta device"):
        as_distributed(model, "fsdp")


def test_a_model_that_something_else_has_wrapped_is_refused() -> None:
    with pytest.raises(UsageError, match="spread already"):
        as_distributed(DistributedDataParallel(network(0)), "ddp")


def test_a_step_needs_an_optimizer_and_a_pair() -> None:
    made = as_distributed(network(0), "fsdp")
    with pytest.raises(UsageError, match="no optimizer"):
        made.step(loss_of, batch(0))
    with pytest.raises(UsageError, match="pair of inputs and targets"):
        made.backward(loss_of, batch(0)[0])


def test_a_batch_that_cannot_be_shared_evenly_is_refused() -> None:
    made = as_distributed(network(0), "fsdp", microbatches=5)
    with pytest.raises(UsageError, match="evenly"):
        made.backward(loss_of, batch(0))


class Pair(NamedTuple):
    """Inputs that have names of their own."""

    tokens: torch.Tensor
    factor: torch.Tensor


class Scaled(nn.Module):
    """Takes a pair, of which one is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(0)

    def forward(self, pair: Pair) -> torch.Tensor:
        """The scores of its tokens."""
        scores: torch.Tensor = self.inner(pair.tokens) * pair.factor
        return scores


def test_a_whole_batch_may_hold_named_tuples_and_numbers() -> None:
    made = as_distributed(Scaled(), "ddp")
    tokens, targets = batch(0)
    (loss,) = made.backward(loss_of, ((Pair(tokens, torch.tensor(1.0)),), targets))
    assert loss == loss_of(network(0)(tokens), targets)
    assert share(Pair(tokens, targets), 1, 2).tokens.equal(tokens[6:])


class Fused(nn.Module):
    """A layer that no style of torch fits."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(4, 12), nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("rules", "reason", "kind"),
    [
        ("auto", "no rule matches", RulesError),
        ({"rules": [{"match": "*", "tp": "replicate"}]}, "no parameter is cut", RulesError),
        ({"rules": [{"match": "*norm*", "tp": "shard(0)"}]}, "no rule matches", RulesError),
        (
            {
                "rules": [
                    {"match": "norm*", "tp": "shard(0)"},
                    {"match": "*", "tp": "replicate"},
                ]
            },
            "no style for a LayerNorm",
            LayoutError,
        ),
        (
            {
                "rules": [
                    {"match": "qkv*", "tp": {"shard": 0, "blocks": 3}},
                    {"match": "*", "tp": "replicate"},
                ]
            },
            "fused projection",
            LayoutError,
        ),
        (
            {
                "rules": [
                    {"match": "qkv.weight", "tp": "shard(0)"},
                    {"match": "*", "tp": "replicate"},
                ]
            },
            "bias is not cut as the output",
            LayoutError,
        ),
        (
            {
                "rules": [
                    {"match": "qkv*", "tp": {"shard": 0, "unit": 4}},
                    {"match": "*", "tp": "replicate"},
                ]
            },
            "3 heads cannot be cut evenly over 2 ranks",
            LayoutError,
        ),
    ],
)
def test_rules_that_torch_cannot_follow_are_refused(
    gloo: Pool, rules: Any, reason: str, kind: type[Exception]
) -> None:
    for name, said in gloo.run(2, refusal, rules):
        assert name == kind.__name__
        assert reason in said


def refusal(rules: Any) -> tuple[str, str]:
    """How tensor parallelism by some rules is refused."""
    try:
        as_distributed(Fused(), "tp:2", rules=rules)
    except UsageError as error:
        return type(error).__name__, str(error)
    return "", ""


def pipelines() -> list[str]:
    """How pipelines that cannot be are refused."""
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    attempts: list[tuple[Any, dict[str, Any]]] = [
        (network(0), {}),
        (nn.Sequential(nn.Linear(4, 4)), {}),
        (tied, {}),
        (network(0), {"example": batch(0)[0], "microbatches": 1}),
        (network(0), {"example": batch(0)[0], "schedule": "interleaved", "microbatches": 3}),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"balance": "time"}),
        (Doubled(), {"example": torch.randn(2, 4)}),
        (network(0), {"example": {"hidden": batch(0)[0]}}),
        ([nn.Linear(4, 4)] if dist.get_rank() else network(0), {}),
    ]
    found = []
    for model, options in attempts:
        try:
            as_distributed(model, "pp:2", **options)
        except UsageError as error:
            found.append(str(error))
    return found


class Doubled(Layered):
    """A model that does more to its hidden state than run its layers."""

    def __init__(self) -> None:
        super().__init__(2, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Twice what comes out of the last."""
        return super().forward(hidden) * 2


def test_pipelines_that_cannot_be_are_refused(gloo: Pool) -> None:
    for found in gloo.run(2, pipelines):
        for said, reason in zip(
            found,
            [
                "pass example=",
                "too few for 2 stages",
                "tied weights on two stages",
                "as many micro-batches as there are stages",
                "a multiple of 2",
                "takes an example",
                "do not give what the whole model gives",
                "a pipeline takes positional inputs",
                "no module",
            ],
            strict=True,
        ):
            assert reason in said


def test_one_rank_alone_needs_no_job(tmp_path: Any) -> None:
    made = spread("fsdp", rules=RULES)
    assert isinstance(made, Distributed)
    assert str(made.strategy) == "fsdp:1"
    made.step(loss_of, batch(0))
    made.save(tmp_path, 1)
    assert made.load(tmp_path).step == 1
