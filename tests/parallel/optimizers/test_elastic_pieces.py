"""The pieces of an elastic training: the order of samples, learning rates, where to go on from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckptkit import Run
from ckptkit.errors import AccessError, FormatError, UsageError
from ckptkit.live import Checkpointer
from ckptkit.live.state.ranks import current_world
from ckptkit.parallel import ElasticTraining, GlobalSampler, as_distributed
from ckptkit.parallel.optimizers.elastic import replicas_in, rule_of, scale
from tests.checkpoint.saving import inodes, save, small_state
from tests.live.pool import Pool
from tests.parallel.optimizers.problem import flat, network

JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=12)


@given(st.integers(1, 20), JOBS, st.booleans())
def test_whatever_the_ranks_each_sample_comes_once_an_epoch(
    size: int, jobs: list[tuple[int, int]], shuffle: bool
) -> None:
    sampler, taken = GlobalSampler(size, seed=3, shuffle=shuffle), []
    for count, ranks in jobs:
        taken += [at for rank in range(ranks) for at in sampler.share(count, rank, ranks)]
        sampler.advance(count)
        again = GlobalSampler(size, seed=3, shuffle=shuffle)
        again.load_state_dict(sampler.state_dict())
        sampler = again
    assert sampler.position == len(taken)
    for epoch in range(len(taken) // size):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, other = GlobalSampler(50), GlobalSampler(50, seed=1)
    orders = [first.share(50), other.share(50)]
    first.advance(50)
    assert first.epoch == 1
    orders.append(first.share(50))
    assert len({tuple(order) for order in orders}) == 3
    with pytest.raises(UsageError, match="lost"):
        other.load_state_dict(first.state_dict())
    with pytest.raises(UsageError):
        GlobalSampler(0)


def test_the_order_does_not_depend_on_the_default_device() -> None:
    expected = GlobalSampler(9).share(9)
    with torch.device("meta"):
        assert GlobalSampler(9).share(9) == expected


def test_the_rate_follows_a_rule_and_schedulers_go_on_from_it() -> None:
    assert [rule_of(rule)(4) for rule in ("constant", "linear", "sqrt")] == [1, 4, 2]
    assert rule_of(lambda ratio: ratio**3)(2) == 8
    with pytest.raises(UsageError, match="linear"):
        rule_of("cubic")
    rates = {}
    for at in (None, 0, 2, 5):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
        then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=0.1)
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [3])
        for step in range(6):
            if step == at:
                scale(2.0, optimizer, scheduler)
            optimizer.step()
            scheduler.step()
        rates[at] = scheduler.get_last_lr()[0]
    doubled = pytest.approx(2 * rates.pop(None))
    assert all(rate == doubled for rate in rates.values())


class Job:
    """A small training of all ranks there are."""

    def __init__(self, location: str, replicas: str | None, **options: Any) -> None:
        self.model = network()
        wrapped = DistributedDataParallel(self.model) if dist.is_initialized() else self.model
        self.optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
        self.checkpointer = Checkpointer(location, timeout=30)
        self.training = ElasticTraining(
            self.checkpointer,
            model=wrapped,
            optimizer=self.optimizer,
            sampler=GlobalSampler(30),
            replicas=replicas,
            timeout=30,
            **{"batch": 8, "save_every": 5} | options,
        )
        self.wrapped = wrapped

    def train(self, last: int) -> list[list[int]]:
        """The samples of this rank, step by step."""
        taken = []
        for step in self.training.steps(last):
            self.settle()  # so that every step gets into memory
            inputs = torch.eye(30, 24)[step.samples]
            self.optimizer.zero_grad()
            (self.wrapped(inputs).square().mean() * step.weight).backward()
            self.optimizer.step()
            taken.append(step.samples)
        return taken

    def settle(self) -> None:
        """Wait for what is being written, as a job that is killed then has done."""
        self.checkpointer.wait()
        if self.training._replicas:
            self.training._replicas.wait()


def at_most_by_half(ratio: float) -> float:
    return min(ratio, 1.5)


def grow(location: str, replicas: str | None, last: int, rule: Any) -> dict[str, Any]:
    job = Job(location, replicas, rule=rule, batch=None, batch_per_rank=2)
    began = job.training.step, job.optimizer.param_groups[0]["lr"]
    samples = job.train(last)
    job.settle()
    return {"began": began, "samples": samples, "parameters": flat(job.model)}


@pytest.mark.parametrize(
    ("rule", "rates"), [("linear", (0.1, 0.2, 0.05)), (at_most_by_half, (0.1, 0.15, 0.05))]
)
def test_another_number_of_ranks_goes_on_from_memory_with_its_own_rate(
    gloo: Pool, tmp_path: Path, rule: Any, rates: tuple[float, ...]
) -> None:
    places = str(tmp_path / "run"), str(tmp_path / "memory")
    first = gloo.run(2, grow, *places, 7, rule)
    assert [each["began"] for each in first] == [(0, rates[0])] * 2
    second = gloo.run(4, grow, *places, 8, rule)
    assert [each["began"] for each in second] == [(7, pytest.approx(rates[1]))] * 4
    third = gloo.run(1, grow, *places, 12, rule)
    assert third[0]["began"] == (8, pytest.approx(rates[2]))
    taken = [at for step in range(7) for rank in first for at in rank["samples"][step]]
    taken += [at for rank in second for at in rank["samples"][0]]
    assert sorted(taken[:30]) == list(range(30))


def alone(tmp_path: Path, **options: Any) -> Job:
    return Job(str(tmp_path / "run"), str(tmp_path / "memory"), **options)


def test_what_another_run_left_in_memory_is_not_taken_for_a_step_of_this_one(
    tmp_path: Path,
) -> None:
    job = alone(tmp_path)
    job.train(8)
    job.settle()
    assert (Run(tmp_path / "memory").latest() or 0) > 5
    shutil.rmtree(tmp_path / "run")
    again = alone(tmp_path)
    assert again.training.step == 0
    assert Run(tmp_path / "memory").steps() == []


def test_a_step_in_memory_that_was_half_deleted_does_not_end_the_training(tmp_path: Path) -> None:
    job = alone(tmp_path)
    job.train(8)
    job.settle()
    (tmp_path / "memory" / "step-0000000006" / "data").mkdir(parents=True)
    again = alone(tmp_path)
    assert again.training.step == 8
    assert [info.step for info in Run(tmp_path / "memory").listing()] == [8]


def test_memory_that_cannot_be_freed_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(tmp_path).train(8)

    def refused(run: Run, steps: object) -> None:
        raise AccessError("not allowed", where=run.location)

    monkeypatch.setattr(Run, "delete", refused)
    assert alone(tmp_path).training.step >= 5


def test_damage_in_memory_leads_back_to_the_checkpoint(tmp_path: Path) -> None:
    job = alone(tmp_path)
    job.train(8)
    job.settle()
    for pack in (tmp_path / "memory").rglob("*.zip"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
        pack.write_bytes(data)
    again = alone(tmp_path)
    assert again.training.step == 5
    assert Run(tmp_path / "memory").steps() == []  # else each later job would begin with it
    again.train(9)


def test_a_step_that_was_not_done_is_done_again(tmp_path: Path) -> None:
    job = alone(tmp_path)
    missed: list[int] = []
    with job.training as training:
        for step in training.steps(7):
            if step.number == 3:
                missed = step.samples
                break
    again = alone(tmp_path)
    assert again.training.step == 2
    assert again.train(3) == [missed]


def test_the_end_is_saved_and_memory_is_free_then(tmp_path: Path) -> None:
    with alone(tmp_path).training as training:
        assert len(list(training.steps(7))) == 7
    assert Run(tmp_path / "run").latest() == 7
    assert not (tmp_path / "memory").exists()


def test_a_step_of_memory_is_saved_at_the_end_before_memory_is_freed(tmp_path: Path) -> None:
    job = alone(tmp_path)
    job.train(8)
    job.settle()
    with alone(tmp_path).training as training:
        assert training.step == 8
    assert Run(tmp_path / "run").latest() == 8
    assert not (tmp_path / "memory").exists()


def test_a_step_of_another_training_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    Checkpointer(tmp_path / "run").save(3, model=model, optimizer=optimizer)
    with pytest.raises(FormatError, match="ElasticTraining"):
        alone(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": None},
        {"batch_per_rank": 2},
        {"batch": 0},
        {"save_every": 0},
        {"replicate_every": 0},
        {"rule": "cubic"},
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        alone(tmp_path, **wrong)


def cut(location: str) -> list[list[int]]:
    """The samples of this rank of a model that ranks compute together, two by two."""
    rules = {"rules": [{"match": "*", "tp": "shard(0)"}]}
    sgd = torch.optim.SGD
    made = as_distributed(nn.Linear(4, 4), "ddp:2,tp:2", rules=rules, optimizer=sgd)
    with ElasticTraining(
        Checkpointer(location, timeout=30),
        model=made,
        optimizer=made.optimizer,
        sampler=GlobalSampler(16, shuffle=False),
        batch_per_rank=2,
        replicas=None,
        timeout=30,
    ) as training:
        return [step.samples for step in training.steps(2)]


def test_ranks_that_compute_together_get_the_same_samples(gloo: Pool, tmp_path: Path) -> None:
    first, second = [[0, 1], [4, 5]], [[2, 3], [6, 7]]
    assert gloo.run(4, cut, str(tmp_path)) == [first, first, second, second]


def unseen(folder: str) -> tuple[bool, int]:
    mine = Path(folder) / str(dist.get_rank())
    job = Job(f"{folder}/run", str(mine))
    job.train(3)
    return job.training._replicas is None, job.training.step


@pytest.mark.parametrize("rank_without", [None, 0, 1])
def test_memory_that_not_all_ranks_see_is_not_used(
    gloo: Pool, tmp_path: Path, rank_without: int | None
) -> None:
    if rank_without is not None:
        (tmp_path / str(rank_without)).touch()  # no folder can be made there
    assert gloo.run(2, unseen, str(tmp_path)) == [(True, 3), (True, 3)]


def test_a_link_that_somebody_else_made_where_replicas_go_is_refused(tmp_path: Path) -> None:
    mine, link = tmp_path / "mine", tmp_path / "link"
    save(mine, small_state(), strategy="fsdp:2")
    link.symlink_to(mine)
    if os.geteuid():
        pytest.skip("only root can give a link to somebody else")
    os.chown(link, 65534, 65534, follow_symlinks=False)
    before = inodes(mine)
    assert replicas_in(link, current_world(), 5.0) is None
    assert inodes(mine) == before
