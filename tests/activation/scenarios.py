"""What ranks do with a distributed store, on threads and on processes alike."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from ckptkit.activation import DistributedActivationStore as Store
from ckptkit.activation import MemoryStats, PipelineActivations, ThreadTransport
from ckptkit.errors import NotFoundError, PeerError, UsageError

TENSORS = [
    torch.arange(12.0).view(3, 4),
    torch.randn(5, 2, generator=torch.Generator().manual_seed(1)).bfloat16(),
    torch.tensor(3),
    torch.empty(0, 4),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor([True, False, True]),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
]


def fetches(store: Store) -> None:
    """Everybody fetches what everybody has."""
    for number, tensor in enumerate(TENSORS):
        store.register(f"{store.rank}.{number}", tensor)
    for rank in range(store.world_size):
        for number, tensor in enumerate(TENSORS):
            found = store.retrieve_or_fetch(f"{rank}.{number}", rank, wait=20.0)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    assert store.keys() == [f"{store.rank}.{number}" for number in range(len(TENSORS))]


def fetch_is_a_copy(store: Store) -> None:
    """What was fetched shares no memory, and says whether it needs gradients."""
    store.register(store.rank, torch.full((3,), float(store.rank)).requires_grad_())
    other = (store.rank + 1) % store.world_size
    found = store.retrieve_or_fetch(other, other, wait=20.0)
    assert found.requires_grad
    with torch.no_grad():
        found.zero_()
    store.memory_stats()  # all are through
    assert torch.equal(store.retrieve(store.rank), torch.full((3,), float(store.rank)))


def busy_owner(store: Store) -> bool:
    """Rank 0 computes and calls nothing until the others have what they asked for."""
    asked: list[object] = []
    retrieve = store.local.retrieve

    def spy(layer_id: str | int) -> torch.Tensor:
        asked.append(layer_id)
        return retrieve(layer_id)

    store.local.retrieve = spy  # type: ignore[method-assign]
    if store.rank:
        return torch.equal(store.retrieve_or_fetch("a", 0, wait=20.0), torch.ones(1000))
    store.register("a", torch.ones(1000))
    factors, until = torch.rand(200, 200), time.monotonic() + 20.0
    while len(asked) < store.world_size - 1 and time.monotonic() < until:
        factors = (factors @ factors).clamp(-1, 1)
    return len(asked) == store.world_size - 1


def waits(store: Store) -> None:
    """A fetch waits for what is registered later, as long as it says."""
    store.memory_stats()
    if store.rank == 0:
        timer = threading.Timer(0.2, store.register, ("late", torch.ones(2)))
        timer.start()
        timer.join()
        store.retrieve_or_recompute("made", lambda: torch.zeros(2))
    else:
        assert torch.equal(store.retrieve_or_fetch("late", 0, wait=20.0), torch.ones(2))
        started = time.monotonic()
        assert torch.equal(store.retrieve_or_fetch("made", 0, wait=20.0), torch.zeros(2))
        assert time.monotonic() - started < 10.0
        with pytest.raises(NotFoundError, match="rank 0 keeps no activation") as caught:
            store.retrieve_or_fetch("never", 0, wait=0.05)
        assert "late" in caught.value.hint
    store.memory_stats()


def wakes(store: Store) -> None:
    """A fetch that waits is woken by whatever registers in the store of the other rank."""
    kept = PipelineActivations(store)
    store.memory_stats()
    if store.rank == 0:
        time.sleep(0.2)  # the others wait by now
        store.local.register("by hand", torch.ones(2))
        kept.register(0, 3, torch.zeros(2), is_boundary=True)
    else:
        started = time.monotonic()
        assert torch.equal(store.fetch("by hand", 0, wait=60.0), torch.ones(2))
        assert torch.equal(store.fetch("0/3/output", 0, wait=60.0), torch.zeros(2))
        assert time.monotonic() - started < 30.0  # neither waited for its whole minute
    store.memory_stats()


def ended(store: Store) -> None:
    """A store that is closed takes nothing more."""
    store.clear_everywhere()
    store.close()
    with pytest.raises(UsageError, match="is closed"):
        store.register("late", torch.ones(1))
    with pytest.raises(UsageError, match="is closed"):
        store.retrieve_or_recompute("late", lambda: torch.ones(1))
    assert store.local.keys() == []


def unknown(store: Store) -> None:
    """Unknown layers and ranks are refused at once, and harm nothing."""
    for rank in range(store.world_size):
        with pytest.raises(NotFoundError, match=f"rank {rank} keeps no activation"):
            store.retrieve_or_fetch("a", rank)
    bad: Any
    for bad in (-1, store.world_size, "0", True, 1.0):
        with pytest.raises(UsageError, match="no rank"):
            store.retrieve_or_fetch("a", bad)
        with pytest.raises(UsageError, match="no rank"):
            store.register_broadcast("a", torch.ones(1), source_rank=bad)
    assert store.keys() == []
    assert store.synchronize() == {}


def finds(store: Store) -> None:
    """Without a source, whoever keeps it is found."""
    last = store.world_size - 1
    if store.rank == last:
        store.register("a", torch.full((2,), 7.0))
    assert torch.equal(store.fetch("a", wait=20.0), torch.full((2,), 7.0))
    assert torch.equal(store.retrieve_or_fetch("a"), torch.full((2,), 7.0))
    with pytest.raises(NotFoundError, match="no rank keeps"):
        store.fetch("b", wait=0.05)
    store.memory_stats()


def broadcasts(store: Store) -> None:
    """Any rank may be the source; the others have nothing before."""
    for source in range(store.world_size):
        for number, tensor in enumerate(TENSORS):
            mine = tensor if store.rank == source else None
            found = store.register_broadcast(f"{source}.{number}", mine, source_rank=source)
            assert found.dtype == tensor.dtype
            assert torch.equal(found, tensor)
    assert store.synchronize() == {}
    assert len(store.keys()) == store.world_size * len(TENSORS)
    with pytest.raises(UsageError, match="is the source"):
        store.register_broadcast("none", None, source_rank=store.world_size - 1)
    with pytest.raises(UsageError, match="is the source"):
        store.register_broadcast("none", torch.eye(2).to_sparse())
    assert not store.has("none")


def different_calls(store: Store, one: str, other: str) -> str:
    """What is said where rank 0 is in another call; afterwards all goes on."""
    calls: dict[str, Callable[[], object]] = {
        "synchronize": store.synchronize,
        "stats": store.memory_stats,
        "a from 0": lambda: store.register_broadcast("a", torch.ones(3)),
        "b from 0": lambda: store.register_broadcast("b", torch.ones(5)),
        "a from 1": lambda: store.register_broadcast("a", torch.ones(3), source_rank=1),
    }
    with pytest.raises(PeerError) as caught:
        calls[other if store.rank else one]()
    assert store.synchronize() == {}
    return str(caught.value)


def disagreement(store: Store) -> dict[int, set[str | int]]:
    """What `synchronize` says where ranks lack something."""
    store.register("all", torch.ones(1))
    if store.rank == 0:
        store.register("mine", torch.ones(1))
    return store.synchronize()


def clears(store: Store) -> None:
    """After `clear_everywhere` nobody has anything."""
    for turn in range(3):
        store.register(f"{store.rank}.{turn}", torch.ones(10))
        store.clear_everywhere()
        for rank in range(store.world_size):
            with pytest.raises(NotFoundError):
                store.retrieve_or_fetch(f"{rank}.{turn}", rank)
        store.memory_stats()


def counts(store: Store) -> list[MemoryStats]:
    """Rank r keeps r + 1 tensors of 400 bytes."""
    for number in range(store.rank + 1):
        store.register(number, torch.zeros(100))
    return store.memory_stats()


def recomputes(store: Store) -> None:
    """What this rank does not keep, it can make."""
    made = store.retrieve_or_recompute("a", lambda: torch.ones(2))
    assert torch.equal(made, store.retrieve("a"))
    store.clear("a")
    assert not store.has("a")


def interleaved(store: Store, turns: int) -> int:
    """Random registering, fetching and clearing; the number of fetches that found something."""
    chance = random.Random(store.rank)
    found = 0
    for turn in range(turns):
        act, layer = chance.random(), chance.randrange(8)
        if act < 0.35:
            store.register(layer, _of(store.rank, layer))
        elif act < 0.45:
            store.clear(layer if act < 0.43 else None)
        else:
            source = chance.randrange(store.world_size)
            wanted = _of(store.rank if store.has(layer) else source, layer)
            with suppress(NotFoundError):
                assert torch.equal(store.retrieve_or_fetch(layer, source), wanted)
                found += 1
        if turn % 100 == 99:
            store.clear_everywhere()
    store.memory_stats()
    return found


def _of(rank: int, layer: int) -> torch.Tensor:
    return torch.full((100 * layer + 1,), float(10 * rank + layer))


def on_threads(ranks: int, scenario: Any, *args: Any) -> list[Any]:
    """What a scenario gives on each rank, which are threads."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def work(rank: int, transport: ThreadTransport) -> None:
        try:
            with Store(transport=transport) as store:
                results[rank] = scenario(store, *args)
        except BaseException as error:  # noqa: BLE001 — raised by the test
            errors.append(error)

    world = ThreadTransport.world(ranks, timeout=30.0)
    threads = [threading.Thread(target=work, args=each) for each in enumerate(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def on_gloo(scenario: Any, *args: Any) -> Any:
    """A job of the pool."""
    with Store() as store:
        return scenario(store, *args)
