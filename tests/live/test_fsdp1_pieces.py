"""What lies in the flat parameters of FSDP1: tied and frozen pieces, and what goes wrong."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.optim import SGD, Optimizer

import ckptkit
from ckptkit.errors import CkptkitError
from ckptkit.live import Checkpointer, load, load_state, save
from ckptkit.live.fill import fill
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.live.state.ranks import current_world
from tests.live.fsdp1_ways import WAYS, Way, as_job, ddp, make_adamw, restore, store
from tests.live.network import PARTS, Block, network
from tests.live.pool import JobError, Pool
from tests.live.strategies import Job


class Odd(nn.Module):
    """Has a tied weight, one that never learns, one that learns later, and one on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.frozen: nn.Module = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.later: nn.Module = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.block: nn.Module = Block()
        self.apart = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.later(self.frozen(self.embed(inputs)))
        scores: torch.Tensor = self.head(self.apart(self.block(hidden)))
        return scores


def odd(seed: int, way: Way) -> Job:
    """A job that FSDP leaves a part of alone; all ranks train on the same."""
    torch.manual_seed(seed)
    model = Odd()
    wrap = functools.partial(way.wrap, auto_wrap_policy=None)
    model.block = wrap(model.block)
    if not way.use_orig_params:
        # Flat, all parameters of a unit learn or do not.
        model.frozen, model.later = wrap(model.frozen), wrap(model.later)
    job = as_job(wrap(model, ignored_modules=[model.apart]), make_adamw)
    job.replica, job.replicas = 0, 1
    return job


def stop_an_odd_one(way: Way, location: str) -> None:
    job = odd(0, way)
    job.train(range(3))
    job.model.later.requires_grad_()
    store(job, location)
    resumed = odd(1, way)
    resumed.train([7])
    resumed.model.later.requires_grad_()
    assert restore(resumed, location) == "nothing differs"
    assert job.train(range(3, 6)) == resumed.train(range(3, 6))


@pytest.mark.parametrize("way", ["full", "full, flat"])
def test_what_is_tied_frozen_ignored_or_learns_later(gloo: Pool, tmp_path: Path, way: str) -> None:
    location = str(tmp_path)
    gloo.run(4, stop_an_odd_one, WAYS[way], location)
    with ckptkit.open(location) as step:
        trained = {name.split("/")[1] for name in step.arrays if name.startswith("optimizer/")}
        assert {"embed.weight", "apart.weight", "block.up.bias"} <= trained
        assert not {n for n in trained if n.startswith(("frozen", "later", "head"))}
        assert [(a.name, a.alias_of) for a in step.manifest.aliases] == [
            ("model/head.weight", "model/embed.weight")
        ]


def two_optimizers(seed: int) -> tuple[nn.Module, list[Optimizer]]:
    """One for the weights, one for the rest, whose groups differ: all cut one flat parameter."""
    model = WAYS["full"].wrap(network(seed), auto_wrap_policy=None)
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    scale = [p for name, p in model.named_parameters() if name.endswith("scale")]
    rest = [{"params": biases, "lr": 0.1}, {"params": scale, "lr": 0.3, "momentum": 0.9}]
    return model, [make_adamw(weights), SGD(rest, lr=0.2)]


def train_with_two(model: nn.Module, optimizers: Sequence[Optimizer], steps: range) -> list[float]:
    job = Job(model, [model], optimizers[0], dist.get_rank(), dist.get_world_size())
    losses = []
    for step in steps:
        optimizers[1].zero_grad()
        losses += job.train([step])
        optimizers[1].step()
    return losses


def stop_with_two_optimizers(location: str) -> None:
    model, optimizers = two_optimizers(0)
    train_with_two(model, optimizers, range(3))
    optimizers[1].param_groups[1]["lr"] = 0.05
    save(location, step=3, model=model, optimizer=optimizers, differing=["*seen"], timeout=20)
    resumed, others = two_optimizers(1)
    load(location, model=resumed, optimizer=others, timeout=20)
    assert others[1].param_groups[1]["lr"] == 0.05
    went_on = train_with_two(resumed, others, range(3, 6))
    assert went_on == train_with_two(model, optimizers, range(3, 6))


def test_several_optimizers_of_one_flat_parameter(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(4, stop_with_two_optimizers, str(tmp_path))


def unwrapped(seed: int) -> Job:
    """A job that every rank does alike."""
    model = network(seed)
    return Job(model, [model], make_adamw(model.parameters()))


def load_what_did_not_all_learn(location: str, way: Way) -> list[float]:
    source = unwrapped(0)
    source.model.layers["1"].down.bias.requires_grad_(requires_grad=False)
    source.train(range(3))
    store(source, location)
    target = way.job(1)
    assert restore(target, location) == "nothing differs"
    pairs = zip(source.train(range(3, 5)), target.train(range(3, 5)), strict=True)
    return [abs(a - b) for a, b in pairs]


@pytest.mark.parametrize("way", ["full", "full, flat"])
def test_state_of_some_pieces_of_a_flat_parameter(gloo: Pool, tmp_path: Path, way: str) -> None:
    for first, _ in gloo.run(2, load_what_did_not_all_learn, str(tmp_path), WAYS[way]):
        assert first < 1e-6


def load_what_learned_at_different_times(location: str) -> None:
    source = unwrapped(0)
    bias = source.model.layers["1"].down.bias
    bias.requires_grad_(requires_grad=False)
    source.train([0])
    bias.requires_grad_()
    source.train([1])
    store(source, location)
    assert restore(WAYS["full"].job(1), location) == "nothing differs"
    restore(WAYS["full, flat"].job(1), location)


def test_flat_parameters_cannot_have_two_step_counts(gloo: Pool, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"(?s)different values of step.*use_orig_params=True"):
        gloo.run(2, load_what_learned_at_different_times, str(tmp_path))


def load_what_is_no_number(location: str) -> None:
    source, target = WAYS["full, flat"].job(0), WAYS["full, flat"].job(1)
    source.train([0])
    for state in source.optimizer.state.values():
        state["step"].fill_(torch.nan)
    store(source, location)
    assert restore(target, location) == "nothing differs"
    assert all(state["step"].isnan() for state in target.optimizer.state.values())


def test_what_is_no_number_does_not_differ_from_itself(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, load_what_is_no_number, str(tmp_path))


def load_where_rank_1_fails(location: str) -> str:
    job = WAYS["full"].job(0)
    store(job, location)
    broken = mock.Mock(side_effect=OSError("a broken disk"))
    with mock.patch("ckptkit.live.restore.fill", broken if dist.get_rank() else fill):
        return problem_of(job, location)


def load_less_than_was_saved(location: str) -> str:
    store(ddp(0), location)
    return problem_of(as_job(WAYS["full"].wrap(network(0).keep(PARTS[::3])), make_adamw), location)


def problem_of(job: Job, location: str) -> str:
    before = [p.clone() for p in job.model.parameters()]
    try:
        restore(job, location)
    except (CkptkitError, OSError) as error:
        assert all(map(torch.equal, before, job.model.parameters()))
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("job", "rank", "told"),
    [
        (load_where_rank_1_fails, 1, "a broken disk"),
        (load_less_than_was_saved, 0, "layers.0.down.bias"),
    ],
)
def test_a_failure_of_one_rank_reaches_all(
    gloo: Pool, tmp_path: Path, job: Callable[[str], str], rank: int, told: str
) -> None:
    problems = gloo.run(2, job, str(tmp_path), timeout=60)
    assert told in problems[rank]
    # What all ranks find together is told alike, what one of them found with who it was.
    assert problems[1 - rank] == problems[rank] or f"because of rank {rank}" in problems[1 - rank]
    assert told in problems[1 - rank]


BROKEN = {
    "state": "ckptkit.live.snapshot.tree_of",
    "extra": "ckptkit.live.snapshot.plain_extra",
    "optimizer": "ckptkit.live.wrappers.fsdp1.FSDP1Optimizer._kept_here",
    "optimizer, what is not flat": "ckptkit.live.wrappers.fsdp1.PlainOptimizer.entries",
    "load": "ckptkit.live.wrappers.fsdp1.FSDP1Optimizer.prepare",
}


def fail_on_rank_1(location: str, name: str) -> tuple[str, float]:
    """What is said of it, and after how long; rank 1 lives on, as a job that tries again does."""
    job = WAYS["full"].job(0)
    job.train([0])
    broken = mock.patch(name, mock.Mock(side_effect=MemoryError("no memory")))
    objects: Any = {"model": job.model, "optimizer": job.optimizer, "state": {"own": {"x": 1}}}
    began = time.monotonic()
    with (  # noqa: PT012 — one of them fails in the load
        broken if dist.get_rank() else nullcontext(),
        pytest.raises((CkptkitError, MemoryError)) as caught,
    ):
        save(location, step=5, extra={"y": 1}, differing=["*seen"], timeout=20, **objects)
        load(location, timeout=20, **objects)
    took = time.monotonic() - began
    store_of_job = current_world().rendezvous
    assert store_of_job is not None
    if dist.get_rank():
        store_of_job.wait(["heard"])
    else:
        store_of_job.set("heard", "")
    return str(caught.value), took


@pytest.mark.parametrize("what", BROKEN)
def test_a_failure_before_a_collective_is_heard_at_once(
    gloo: Pool, tmp_path: Path, what: str
) -> None:
    (heard, took), (own, _) = gloo.run(2, fail_on_rank_1, str(tmp_path), BROKEN[what], timeout=90)
    assert own == "no memory"
    assert "rank 1: MemoryError: no memory" in heard
    assert took < 30  # the collective would end after 50 seconds


def save_while_training_goes_on(location: str) -> None:
    job = WAYS["full, flat"].job(0)
    job.train(range(3))
    store(job, f"{location}/now")
    later = Checkpointer(f"{location}/later", asynchronous=True, timeout=20, differing=["*seen"])
    with later as checkpointer:
        checkpointer.save(5, model=job.model, optimizer=job.optimizer)
        job.train(range(3, 6))


def test_a_save_in_the_background_is_of_its_moment(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_while_training_goes_on, str(tmp_path))
    now, later = load_state(tmp_path / "now"), load_state(tmp_path / "later")
    assert now.keys() == later.keys()
    assert all(torch.equal(now[name], later[name]) for name in now)


def load_into_a_larger_model(location: str) -> tuple[str, bool]:
    store(WAYS["full"].job(0), location)
    model = network(1)
    model.extra = nn.Linear(3, 3)
    job = as_job(WAYS["full, flat"].wrap(model), make_adamw)
    with pytest.raises(StateMismatchError, match=r"missing: model/extra"):
        restore(job, location)
    report = restore(job, location, partial=True)
    with FullyShardedDataParallel.summon_full_params(job.model):
        return report, bool(torch.equal(model.extra.weight, network_with_extra(1)))


def network_with_extra(seed: int) -> torch.Tensor:
    network(seed)
    return nn.Linear(3, 3).weight


def test_a_partial_load_leaves_the_rest_as_it_was(gloo: Pool, tmp_path: Path) -> None:
    for report, is_untouched in gloo.run(2, load_into_a_larger_model, str(tmp_path)):
        assert "model/extra.weight" in report
        assert is_untouched


def load_into_a_larger_job(location: str) -> bool:
    def make(parameters: Sequence[nn.Parameter]) -> Optimizer:
        return torch.optim.Adagrad(parameters, initial_accumulator_value=7.0)

    store(as_job(WAYS["full"].wrap(network(0)), make), location)
    model = network(1)
    model.extra = nn.Linear(3, 3)
    job = as_job(WAYS["full"].wrap(model), make)
    before = {p: s["sum"].clone() for p, s in job.optimizer.state.items()}
    restore(job, location, partial=True)
    state = job.optimizer.state
    return all(torch.equal(before[p], state[p]["sum"]) for p in model.extra.parameters())


def test_a_partial_load_leaves_the_state_that_an_optimizer_began_with(
    gloo: Pool, tmp_path: Path
) -> None:
    assert gloo.run(2, load_into_a_larger_job, str(tmp_path)) == [True, True]


PRECISION = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)


def stop_in_mixed_precision(location: str) -> None:
    def job(seed: int) -> Job:
        model = WAYS["grad op, flat"].wrap(network(seed), mixed_precision=PRECISION)
        return as_job(model, make_adamw)

    first, resumed = job(0), job(1)
    first.train(range(3))
    store(first, location)
    assert restore(resumed, location) == "nothing differs"
    assert first.train(range(3, 6)) == resumed.train(range(3, 6))


def test_the_manifest_says_how_the_model_was_sharded(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, stop_in_mixed_precision, str(tmp_path))
    with ckptkit.open(tmp_path) as step:
        assert step["model/embed.weight"].dtype == step["model/layers.0.seen"].dtype
        assert step["model/embed.weight"].dtype.torch == "float32"
        assert step.details["fsdp"] == {
            "sharding_strategy": "SHARD_GRAD_OP",
            "zero_stage": 2,
            "units": 3,
            "use_orig_params": False,
            "mixed_precision": {
                "parameters": "bfloat16",
                "reduction": None,
                "buffers": "bfloat16",
            },
            "cpu_offload": False,
        }


def save_under_many_wrappers(location: str) -> None:
    model = network(0)
    compiled: Any = torch.compile(model.layers["0"], backend="eager")
    model.layers["0"] = checkpoint_wrapper(compiled)
    wrapped = WAYS["full"].wrap(model)
    apply_activation_checkpointing(wrapped, check_fn=lambda m: m is model.layers["1"])
    job = as_job(wrapped, make_adamw)
    store(job, location)
    assert restore(job, location) == "nothing differs"


def test_names_are_the_authors(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_under_many_wrappers, str(tmp_path))
    with ckptkit.open(tmp_path) as step:
        names = {name.removeprefix("model/") for name in step.arrays if name[:5] == "model"}
    assert names == set(network(0).state_dict())
