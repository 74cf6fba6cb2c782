"""A data loader goes on in a job of any size, with each sample once in an epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptkit.errors import UsageError
from ckptkit.live import load, save
from ckptkit.plugins.torchdata import ElasticDataLoader, sizes_of_steps
from tests.live.pool import Pool

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning")
SIZES = (1, 2, 3, 4)


class Numbers(Dataset[int]):
    """Samples that are their own numbers."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, at: int) -> int:
        return at


class Stream(IterableDataset[int]):
    """Samples that come one after another."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


def loaders(
    count: int, ranks: int, batch_size: int = 3, *, equal: bool = False, seed: int = 0, **how: Any
) -> list[ElasticDataLoader]:
    """One for each rank of a job."""
    found = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(Numbers(count), ranks, rank, seed=seed, drop_last=equal)
        found.append(ElasticDataLoader(Numbers(count), batch_size, sampler=sampler, **how))
    return found


def steps(job: list[ElasticDataLoader], most: int | None = None) -> list[list[list[int]]]:
    """What the ranks are given in each step; all of them take as many steps."""
    running = [iter(loader) for loader in job]
    found = []
    for _ in itertools.count() if most is None else range(most):
        batches = [next(each, None) for each in running]
        if None in batches:
            assert batches == [None] * len(job)
            break
        found.append([batch.tolist() for batch in batches if batch is not None])
    return found


def position(job: list[ElasticDataLoader]) -> dict[str, Any]:
    """Where a job is: each rank says the same."""
    first, *others = [loader.state_dict() for loader in job]
    assert all(other == first for other in others)
    return first


def flat(given: list[list[list[int]]]) -> list[int]:
    """All samples, in their order."""
    return [sample for step in given for batch in step for sample in batch]


@pytest.mark.parametrize("here", SIZES)
@pytest.mark.parametrize("saved", SIZES)
def test_each_sample_comes_once_in_an_epoch_that_two_sizes_share(saved: int, here: int) -> None:
    for count, epoch in itertools.product((24, 37, 50), (0, 5)):
        most = len(loaders(count, saved)[0])
        for stop in range(most + 1):
            before, after = loaders(count, saved), loaders(count, here)
            for loader in before:
                loader.sampler.set_epoch(epoch)
            given = steps(before, stop)
            left = count - len(flat(given))
            for loader in after:
                loader.load_state_dicts([position(before)] * saved)
            promised = len(after[0])
            rest = steps(after)
            everything = sorted(flat(given) + flat(rest))
            if left >= here or left == 0:
                assert everything == list(range(count))
            else:  # fewer than ranks: each is given one all the same
                assert sorted(set(everything)) == list(range(count))
                assert len(everything) == count + here - left
            assert left == 0 or promised == len(given) + len(rest)
            # And so it does in the next epoch.
            for loader in after:
                loader.sampler.set_epoch(epoch + 1)
            assert len(after[0]) == len(loaders(count, here)[0])
            assert sorted(flat(steps(after))) == list(range(count))


def test_the_samples_come_in_one_order_at_any_size() -> None:
    chance = random.Random(1)
    whole = flat(steps(loaders(60, 1, 1, seed=9)))
    assert whole != list(range(60))
    seen: list[int] = []
    at = None
    while len(seen) < 56:  # the last four may be fewer than there are ranks
        job = loaders(60, chance.choice(SIZES), 1, seed=9)
        for loader in job:
            if at is not None:
                loader.load_state_dict(at)
        seen += flat(steps(job, chance.randrange(4)))
        at = position(job)
    assert seen == whole[: len(seen)]


def test_batches_are_those_of_a_distributed_sampler() -> None:
    for rank, mine in enumerate(loaders(24, 2, 3)):
        sampler: Any = DistributedSampler(Numbers(24), 2, rank, shuffle=True)
        theirs = StatefulDataLoader(Numbers(24), 3, sampler=sampler)
        assert [batch.tolist() for batch in mine] == [batch.tolist() for batch in theirs]
        assert len(mine) == len(theirs)


def test_workers_are_ahead_and_the_position_is_not() -> None:
    before = loaders(24, 2, 2, num_workers=2)
    given = steps(before, 2)
    after = loaders(24, 3, 2, num_workers=1, persistent_workers=True)
    for loader in after:
        loader.load_state_dicts([position(before)] * 2)
    assert sorted(flat(given) + flat(steps(after))) == list(range(24))


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_the_end_of_an_epoch_goes_round(ranks: int, batch_size: int) -> None:
    full = ranks * batch_size
    for left in range(4 * full + 3):
        dealt = sizes_of_steps(left, ranks, batch_size)
        assert sum(dealt) == left
        assert all(size <= full for size in dealt)
        for_all = dealt if batch_size > 1 and left >= ranks else dealt[:-1]
        assert all(size >= ranks for size in for_all)
        whole = sizes_of_steps(left, ranks, batch_size, drop_last=True)
        assert whole == [full] * (left // full)
        equal = sizes_of_steps(left, ranks, batch_size, equal=True)
        assert sum(equal) == left - left % ranks
        assert all(size % ranks == 0 for size in equal)


def test_what_is_dropped_comes_in_no_step() -> None:
    assert len(flat(steps(loaders(26, 4, 3, drop_last=True)))) == 24
    assert len(flat(steps(loaders(27, 4, 3, equal=True)))) == 24


def test_an_epoch_that_nobody_ended_begins_again() -> None:
    job = loaders(12, 1)
    first = steps(job, 2)
    assert flat(steps(job)) == flat(steps(job))
    assert flat(steps(job))[:6] == flat(first)
    # Nor does a position of one epoch mean anything in another.
    again = loaders(12, 1)
    again[0].load_state_dict({**position(job), "seen_by_all": 6})
    again[0].sampler.set_epoch(1)
    assert sorted(flat(steps(again))) == list(range(12))


def elastic(rank: int, ranks: int, kind: str) -> Any:
    sampler: Any = DistributedSampler(Numbers(24), ranks, rank)
    if kind == "elastic":
        return ElasticDataLoader(Numbers(24), 3, sampler=sampler)
    return ElasticDataLoader(Stream(), 3)


def save_job(folder: str, kind: str) -> list[int]:
    loader = elastic(dist.get_rank(), dist.get_world_size(), kind)
    taken = [sample for batch in itertools.islice(loader, 2) for sample in batch.tolist()]
    model = DistributedDataParallel(nn.Linear(2, 2))
    save(folder, step=1, model=model, dataloader=loader)
    return taken


def load_job(folder: str, kind: str) -> list[int]:
    loader = elastic(dist.get_rank(), dist.get_world_size(), kind)
    model = DistributedDataParallel(nn.Linear(2, 2))
    load(folder, model=model, dataloader=loader)
    return [sample for batch in loader for sample in batch.tolist()]


def test_a_step_brings_the_position_to_a_job_of_another_size(gloo: Pool, tmp_path: Path) -> None:
    given = gloo.run(2, save_job, str(tmp_path), "elastic")
    for ranks in (1, 2, 3):
        rest = gloo.run(ranks, load_job, str(tmp_path), "elastic")
        assert sorted(itertools.chain(*given, *rest)) == list(range(24))


def test_hidden_state_goes_on_at_the_same_size_only(gloo: Pool, tmp_path: Path) -> None:
    gloo.run(2, save_job, str(tmp_path), "stream")
    assert gloo.run(2, load_job, str(tmp_path), "stream") == [list(range(6, 12))] * 2
    with pytest.raises(Exception, match="only an iterable dataset itself knows"):
        gloo.run(3, load_job, str(tmp_path), "stream")


def test_what_cannot_be_gone_on_with_is_refused_with_the_way_out() -> None:
    (job,) = loaders(12, 1)
    here = job.state_dict()
    refused: list[tuple[str, Any]] = [
        ("another kind of loader", {"_num_yielded": 3}),
        ("another order of samples", {**here, "samples": 13}),
        ("another order of samples", {**here, "seed": 1}),
        ("another order of samples", {**here, "shuffle": False}),
    ]
    for why, state in refused:
        with pytest.raises(UsageError, match=why) as caught:
            job.load_state_dict(state)
        assert 'skip=["dataloader"]' in caught.value.hint
    with pytest.raises(UsageError, match="not at one place"):
        job.load_state_dicts([here, {**here, "seen_by_all": 6}])
    numbers = Numbers(12)
    for sampler in (None, RandomSampler(numbers)):
        with pytest.raises(UsageError, match="order of this sampler") as caught:
            ElasticDataLoader(numbers, 3, sampler=sampler)
        assert "DistributedSampler(dataset" in caught.value.hint
    one: Any = DistributedSampler(numbers, 1, 0)
    with pytest.raises(UsageError, match="the sampler shuffles"):
        ElasticDataLoader(numbers, 3, sampler=one, shuffle=True)
    with pytest.raises(UsageError, match="at least 1"):
        ElasticDataLoader(numbers, 0, sampler=one)
