"""What the ranks of a tensor-parallel group keep of what they hold alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckptkit import activation
from ckptkit.activation import DistributedActivationStore, TensorParallelPolicy
from ckptkit.errors import NotFoundError, UsageError
from tests.activation.scenarios import on_gloo, on_threads
from tests.live.pool import Pool


def policies(ranks: int, **given: Any) -> list[TensorParallelPolicy]:
    return [TensorParallelPolicy(rank, ranks, **given) for rank in range(ranks)]


def test_each_replicated_layer_is_kept_by_one_rank_that_all_agree_on() -> None:
    ranks = policies(4)
    for layer in [*range(40), *(f"layers.{n}" for n in range(40))]:
        owners = {policy.owner(layer) for policy in ranks}
        assert len(owners) == 1
        assert sum(policy.keeps(layer) for policy in ranks) == 1
    held = [sum(policy.keeps(f"layers.{n}") for n in range(200)) for policy in ranks]
    assert min(held) > 20


def test_a_layer_goes_to_the_rank_that_it_is_registered_for() -> None:
    for policy in policies(3, replicated="cut"):
        policy.register("a", 2)
        policy.register("b", is_sharded=True)
        policy.register("c")
        assert policy.owner("a") == 2
        assert policy.keeps("a") == (policy.rank == 2)
        assert (policy.owner("b"), policy.keeps("b"), policy.kind("b")) == (None, True, "each")
        assert (policy.owner("c"), policy.keeps("c"), policy.kind("c")) == (None, True, "cut")


def test_who_keeps_what_can_be_said_from_the_start() -> None:
    said = {"a": 1, 7: 0}
    for policy in policies(2, owners=said, replicated="cut"):
        policy.register("b", 0)
        assert (policy.owner("a"), policy.owner(7), policy.kind("c")) == (1, 0, "cut")
    assert said == {"a": 1, 7: 0}
    with pytest.raises(UsageError):
        TensorParallelPolicy(0, 2, owners={"a": 2})


def test_ranks_and_ways_that_do_not_exist_are_refused() -> None:
    bad: Any
    for bad in (-1, 2, True, "0"):
        with pytest.raises(UsageError):
            TensorParallelPolicy(bad, 2)
        with pytest.raises(UsageError):
            TensorParallelPolicy(0, 2).register("a", bad)
    bad = "twice"
    with pytest.raises(UsageError):
        TensorParallelPolicy(0, 2, bad)


def kept(store: DistributedActivationStore, replicated: Any) -> int:
    """The bytes of this rank, after all could get back all that they kept."""
    policy = TensorParallelPolicy(store.rank, store.world_size, replicated)
    policy.register("mine", is_sharded=True)
    policy.register("last", store.world_size - 1)
    whole = torch.arange(101.0).view(101, 1)
    for layer in (*range(8), "last"):
        policy.keep(store, layer, whole.clone().requires_grad_())
    policy.keep(store, "mine", whole + store.rank)
    for layer in (*range(8), "last"):
        found = policy.get(store, layer)
        assert torch.equal(found, whole)
        assert found.requires_grad
        assert found.is_leaf
    assert torch.equal(policy.get(store, "mine"), whole + store.rank)
    with pytest.raises(NotFoundError):
        policy.get(store, "other")
    return sum(each.current for each in store.memory_stats())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("replicated", ["once", "cut"])
def test_all_ranks_get_back_what_is_kept_once(gloo: Pool, ranks: int, replicated: str) -> None:
    whole = 404
    for totals in (
        on_threads(ranks, kept, replicated),
        gloo.run(ranks, on_gloo, kept, replicated),
    ):
        assert totals == [(9 + ranks) * whole] * ranks


@pytest.mark.parametrize("policy", [TensorParallelPolicy(0, 2), TensorParallelPolicy(1, 2)])
def test_a_store_of_other_ranks_is_refused(policy: TensorParallelPolicy) -> None:
    with DistributedActivationStore() as store:
        with pytest.raises(UsageError, match=f"rank {policy.rank} of 2 with .* rank 0 of 1"):
            policy.keep(store, "a", torch.ones(2))
        with pytest.raises(UsageError, match="rank 0 of 1"):
            policy.get(store, "a")


def test_all_is_what_there_is() -> None:
    public = {
        name
        for name, value in vars(activation).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("ckptkit.")
    }
    assert public == set(activation.__all__)
