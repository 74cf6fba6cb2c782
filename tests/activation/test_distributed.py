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
from ckptkit.activation import MemoryStats, ThreadTransport
from ckptkit.errors import NotFoundError, PeerError, UnsupportedTypeError, UsageError
from ckptkit.live.state.sockets import message
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
        scenarios.wakes,
        scenarios.finds,
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
    assert run(3, scenarios.disagreement) == [{1: {"mine"}, 2: {"mine"}}] * 3
    assert run(1, scenarios.disagreement) == [{}]


def test_memory_is_counted_on_all_ranks(run: Run) -> None:
    each = [MemoryStats(400 * count, 400 * count, count) for count in (1, 2, 3)]
    assert run(3, scenarios.counts) == [each] * 3
    assert str(each[2]) == "3 activations, 1.2 KiB (peak 1.2 KiB)"


def test_a_closed_store_takes_nothing() -> None:
    scenarios.ended(Store())


def test_random_interleavings_never_deadlock(run: Run) -> None:
    assert min(run(4, scenarios.interleaved, 1000)) > 50


def test_one_process_needs_no_group() -> None:
    with Store() as store:
        assert (store.rank, store.world_size) == (0, 1)
        assert torch.equal(store.register_broadcast("a", torch.ones(2)), torch.ones(2))
        assert torch.equal(store.retrieve_or_fetch("a", 0), torch.ones(2))
        assert store.synchronize() == {}
        assert store.memory_stats() == [MemoryStats(8, 8, 1)]
        assert store.local.memory_stats().count == 1
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


def test_a_wait_that_is_no_time_and_a_layer_that_is_no_name_are_refused() -> None:
    one, other = (Store(transport=each) for each in ThreadTransport.world(2))
    bad: Any
    for bad in (float("inf"), float("nan"), -1, "1", None, True):
        for call in (one.fetch, one.retrieve_or_fetch):
            with pytest.raises(UsageError, match="not so many seconds"):
                call("a", 1, wait=bad)
    bad = ("a", 1)
    for call in (one.fetch, one.retrieve_or_fetch):
        with pytest.raises(UnsupportedTypeError, match="a layer is a name or a number"):
            call(bad, 1)
    one.close()
    other.close()


def test_who_does_not_come_is_missed_in_time() -> None:
    alone = Store(transport=ThreadTransport.world(2, timeout=0.1)[0])
    with pytest.raises(PeerError, match=r"did not come within 0\.1 s"):
        alone.memory_stats()
    alone.close()


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("stats", "synchronize", "in different calls"),
        ("a from 0", "synchronize", "in different calls"),
        ("stats", "a from 0", "in different calls"),
        ("a from 0", "b from 0", "broadcast different layers"),
        ("a from 0", "a from 1", "broadcast different layers"),
    ],
)
def test_ranks_in_different_calls_are_told_so(run: Run, one: str, other: str, said: str) -> None:
    assert all(said in each for each in run(2, scenarios.different_calls, one, other))


def absent() -> float:
    """Rank 1 does not come; the seconds until rank 0 is told."""
    with suppress(PeerError), Store(timeout=2.0) as store:
        if store.rank == 0:
            started = time.monotonic()
            with pytest.raises(PeerError, match="did not come within 2 s") as caught:
                store.memory_stats()
            assert "make another" in str(caught.value.hint)
            dist.barrier()
            return time.monotonic() - started
        dist.barrier()
    return 0.0


def test_the_time_out_is_that_of_the_store_not_of_the_job(gloo: Pool) -> None:
    assert gloo.run(2, absent)[0] < 20.0  # the job's is 50 s


def late(*_: object) -> torch.Tensor:
    """An answer after the time-out."""
    time.sleep(2.5)
    return torch.ones(1)


def ends(*_: object) -> torch.Tensor:
    """A process that is killed before it answers."""
    os._exit(3)


def sends_half(sock: socket.socket, *_: object) -> None:
    """A process that is killed while it answers."""
    head, data = message(("kept", torch.ones(1_000_000), "cpu", False))[:2]
    sock.sendall(head)
    sock.sendall(data[:2_000_000])
    os._exit(3)


def dying(way: str) -> str:
    """Rank 1 ends or stops when it is asked; what rank 0 is told, and how soon."""
    store = Store(timeout=2.0)
    store.register(store.rank, torch.ones(1_000_000))
    other = 1 - store.rank
    assert store.retrieve_or_fetch(other, other, wait=20.0).sum() == 1_000_000
    dist.barrier()
    if store.rank == 1:
        stop(store, way)
        return ""
    if way == "dies":
        time.sleep(0.3)
    else:
        dist.barrier()
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        store.retrieve_or_fetch(1, 1)
    assert time.monotonic() - started < 10.0
    if way == "hangs":
        dist.barrier()
    store.close()
    return str(caught.value)


def stop(store: Store, way: str) -> None:
    """As a rank does that is killed, closed, or hangs."""
    if way == "dies":
        os._exit(3)
    if way == "closes":
        store.close()
        dist.barrier()
        return
    if way == "dies while it answers":
        store._transport._reply = sends_half  # type: ignore[attr-defined]
    else:
        local: Any = store.local
        local.retrieve = late if way == "hangs" else ends
    dist.barrier()
    if way == "hangs":
        dist.barrier()
        store.close()
        return
    time.sleep(60.0)  # the thread that answers ends the process


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("dies", "has gone"),
        ("dies before it answers", "has gone"),
        ("dies while it answers", "has gone"),
        ("closes", "has gone"),
        ("hangs", "did not answer within 2 s"),
    ],
)
def test_a_rank_that_is_lost_makes_an_error_not_a_hang(gloo: Pool, way: str, said: str) -> None:
    results = gloo.run(2, dying, way, may_die=[1])
    assert results[0].startswith("activation 1: rank 1")
    assert said in results[0]
    assert isinstance(results[1], Died) == ("dies" in way)


def asked_by_two_threads() -> float:
    """One waits for what never comes; the seconds until the other one has its activation."""
    with Store() as store:
        store.register(store.rank, torch.ones(4))
        other = 1 - store.rank
        store.retrieve_or_fetch(other, other, wait=20.0)
        waits = threading.Thread(target=lambda: _sought(store, "never", other, 3.0))
        waits.start()
        time.sleep(0.2)
        started = time.monotonic()
        assert store.retrieve_or_fetch(other, other).sum() == 4
        found = time.monotonic() - started
        waits.join()
        return found


def _sought(store: Store, layer_id: str, rank: int, wait: float) -> None:
    with suppress(NotFoundError):
        store.retrieve_or_fetch(layer_id, rank, wait=wait)


def test_a_fetch_that_waits_holds_up_no_other(gloo: Pool) -> None:
    assert max(gloo.run(2, asked_by_two_threads)) < 2.5


def runs_out(*_: object) -> torch.Tensor:
    """An answer for which there is no memory."""
    raise MemoryError


def failing_owner() -> list[str]:
    """What is said of a rank that cannot answer; it goes on."""
    with Store() as store:
        store.retrieve_or_recompute("sparse", torch.eye(2).to_sparse)
        store.register("dense", torch.ones(4))
        store.memory_stats()
        other = 1 - store.rank
        said = []
        with pytest.raises(PeerError) as caught:
            store.fetch("sparse", other)
        said.append(str(caught.value))
        store.memory_stats()
        local: Any = store.local
        retrieve, local.retrieve = local.retrieve, runs_out
        store.memory_stats()
        with pytest.raises(PeerError) as caught:
            store.fetch("dense", other)
        said.append(str(caught.value))
        store.memory_stats()
        local.retrieve = retrieve
        store.memory_stats()
        assert store.fetch("dense", other).sum() == 4
        store.memory_stats()
        assert len(store._transport._listener._open) == 1  # type: ignore[attr-defined]
        return said


def test_a_rank_that_cannot_answer_is_not_taken_for_dead(gloo: Pool) -> None:
    for rank, (sparse, memory) in enumerate(gloo.run(2, failing_owner)):
        assert f"rank {1 - rank}: UnsupportedTypeError: only dense tensors" in sparse
        assert f"rank {1 - rank}: MemoryError" in memory


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"]
)
def test_what_cannot_be_sent_is_refused_where_it_is_registered(tensor: torch.Tensor) -> None:
    with Store() as store, pytest.raises(UnsupportedTypeError, match=r"^a: only dense tensors"):
        store.register("a", tensor)


def test_what_goes_away_meanwhile_is_fetched() -> None:
    mine, other = (Store(transport=each) for each in ThreadTransport.world(2))
    other.register("a", torch.ones(2))
    mine.local.has = lambda layer_id: True  # type: ignore[method-assign]
    assert torch.equal(mine.retrieve_or_fetch("a", 1), torch.ones(2))
    mine.close()
    other.close()


def test_a_store_that_closes_keeps_no_fetch_waiting() -> None:
    mine, other = (Store(transport=each) for each in ThreadTransport.world(2))
    waits = threading.Thread(target=_sought, args=(mine, "never", 1, 60.0))
    waits.start()
    time.sleep(0.2)
    other.close()
    waits.join(10.0)
    assert not waits.is_alive()
    mine.close()


def strangers() -> bool:
    """Who does not know the token gets nothing, and harms nobody."""
    with Store() as store:
        store.register(store.rank, torch.ones(4))
        address = store._transport._addresses[1 - store.rank]  # type: ignore[attr-defined]
        for said in (b"x" * 32, b"", b"GET / HTTP/1.1\r\n" * 10):
            with socket.create_connection(address, 5) as sock:
                sock.sendall(said)
                with suppress(OSError):  # it may have hung up already: then there is no connection
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
