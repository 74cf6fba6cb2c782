"""The store that spans ranks: on threads, on gloo processes, and alone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit.activation import DistributedActivationStore as Store
from ckptkit.activation import GroupMemoryStats, MemoryStats, ThreadTransport
from ckptkit.errors import PeerError
from tests.activation import scenarios
from tests.activation.scenarios import on_gloo, on_threads
from tests.live.pool import Died, Pool

Run = Callable[..., list[Any]]


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario on some ranks."""
    if request.param == "threads":
        return on_threads
    gloo: Pool = request.getfixturevalue("gloo")
    return lambda ranks, *what: gloo.run(ranks, on_gloo, *what)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.fetches,
        scenarios.fetch_is_a_copy,
        scenarios.waits,
        scenarios.unknown,
        scenarios.broadcasts,
        scenarios.clears,
        scenarios.recomputes,
    ],
)
def test_each_method_keeps_its_promise(run: Run, ranks: int, scenario: Any) -> None:
    run(ranks, scenario)


def test_a_fetch_is_answered_while_the_owner_computes(run: Run) -> None:
    assert all(run(3, scenarios.busy_owner))


def test_ranks_that_keep_different_layers_are_told_who_lacks_what(run: Run) -> None:
    for said in run(3, scenarios.disagreement):
        assert "rank 1 lacks mine; rank 2 lacks mine" in said
    assert run(1, scenarios.disagreement) == [""]


def test_memory_is_counted_over_all_ranks(run: Run) -> None:
    before = time.time()
    for stats in run(3, scenarios.counts):
        assert isinstance(stats, GroupMemoryStats)
        assert stats.per_rank == (400, 800, 1200)
        assert (stats.total, stats.min, stats.max, stats.mean) == (2400, 400, 1200, 800.0)
        assert stats.counts == (1, 2, 3)
        assert stats.peak == 2400
        assert before <= stats.timestamp <= time.time()
        assert "activations of 3 ranks" in str(stats)
        assert "rank 2: 3 activations, 1.2 KiB (peak 1.2 KiB)" in str(stats)
        assert stats.to_dict()["ranks"][1] == MemoryStats(800, 800, 2).to_dict()


def test_random_interleavings_never_deadlock(run: Run) -> None:
    assert min(run(4, scenarios.interleaved, 1000)) > 50


def test_one_process_needs_no_group() -> None:
    with Store() as store:
        assert (store.rank, store.world_size) == (0, 1)
        assert torch.equal(store.register_broadcast("a", torch.ones(2)), torch.ones(2))
        assert torch.equal(store.retrieve_or_fetch("a", 0), torch.ones(2))
        assert store.synchronize() == ["a"]
        assert store.memory_stats().total == 8
        assert store.local_memory_stats().count == 1
    assert store.keys() == []


def test_an_exception_closes_the_store_without_waiting_for_the_others() -> None:
    mine, other = (Store(transport=each) for each in ThreadTransport.world(2))

    def forward() -> None:
        with mine:
            mine.register("a", torch.ones(2))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert mine.keys() == []
    with pytest.raises(PeerError, match="rank 0"):
        other.retrieve_or_fetch("a", 0)
    other.close()
    other.close()


def test_who_does_not_come_is_missed_in_time() -> None:
    alone = Store(transport=ThreadTransport.world(2, timeout=0.1)[0])
    with pytest.raises(PeerError, match="in time"):
        alone.memory_stats()
    alone.close()


def late(*_: object) -> torch.Tensor:
    """An answer after the time-out."""
    time.sleep(2.0)
    return torch.ones(1)


def different_calls(store: Store) -> str:
    """What is said where rank 0 is in another call."""
    try:
        if store.rank:
            store.synchronize()
        else:
            store.memory_stats()
    except PeerError as error:
        return str(error)
    return ""


def test_ranks_in_different_calls_are_told_so(run: Run) -> None:
    assert all("in different calls" in said for said in run(2, different_calls))


def dying(way: str) -> str:
    """Rank 1 ends or stops when it is asked; what rank 0 is told, and how soon."""
    store = Store(timeout=1.0)
    store.register(store.rank, torch.ones(4))
    other = 1 - store.rank
    assert store.retrieve_or_fetch(other, other, wait=20.0).sum() == 4
    dist.barrier()
    if store.rank == 1:
        if way == "dies":
            os._exit(3)
        if way == "closes":
            store.close()
            dist.barrier()
            return ""
        # Its answers stop, as those of a process that hangs do.
        store._transport._server._answer = late  # type: ignore[attr-defined]
        dist.barrier()
        dist.barrier()
        store.close()
        return ""
    if way == "dies":
        time.sleep(0.3)
    else:
        dist.barrier()
    try:
        store.retrieve_or_fetch(1, 1)
    except PeerError as error:
        if way == "hangs":
            dist.barrier()
        store.close()
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("way", "said"),
    [("dies", "has gone"), ("closes", "has gone"), ("hangs", "did not answer within 1 s")],
)
def test_a_rank_that_is_lost_makes_an_error_not_a_hang(gloo: Pool, way: str, said: str) -> None:
    results = gloo.run(2, dying, way, may_die=[1])
    assert results[0].startswith("activation 1: rank 1")
    assert said in results[0]
    assert isinstance(results[1], Died) == (way == "dies")


def strangers() -> bool:
    """Who does not know the token gets nothing, and harms nobody."""
    with Store() as store:
        store.register(store.rank, torch.ones(4))
        address = store._transport._addresses[1 - store.rank]  # type: ignore[attr-defined]
        for said in (b"x" * 32, b"", b"GET / HTTP/1.1\r\n" * 10):
            with socket.create_connection(address, 5) as sock:
                sock.sendall(said)
                sock.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    assert sock.recv(100) == b""
        other = 1 - store.rank
        return bool(store.retrieve_or_fetch(other, other, wait=20.0).sum() == 4)


def test_a_stranger_gets_nothing(gloo: Pool) -> None:
    assert gloo.run(2, strangers) == [True, True]


def subgroups() -> list[int]:
    """Ranks 1 and 3 make a group; they are 0 and 1 in it."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    with Store(group) as store:
        store.register(store.rank, torch.full((2,), dist.get_rank()))
        found = [int(store.retrieve_or_fetch(r, r, wait=20.0)[0]) for r in range(2)]
        store.register_broadcast("b", torch.ones(1) * dist.get_rank(), source_rank=1)
        return [*found, int(store.retrieve("b"))]


def test_a_group_of_some_ranks_has_numbers_of_its_own(gloo: Pool) -> None:
    assert gloo.run(4, subgroups) == [[], [1, 3, 3], [], [1, 3, 3]]


def threads_left() -> int:
    """Stores that are closed leave no thread behind."""
    before = threading.active_count()
    for _ in range(3):
        with Store() as store:
            store.register(store.rank, torch.ones(3))
            for rank in range(store.world_size):
                store.retrieve_or_fetch(rank, rank, wait=20.0)
            store.memory_stats()
    return threading.active_count() - before


def test_no_thread_is_left_behind(gloo: Pool) -> None:
    assert gloo.run(2, threads_left) == [0, 0]
