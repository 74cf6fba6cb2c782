"""The store of one rank."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.activation import ActivationStore, MemoryStats
from ckptkit.errors import NotFoundError, UnsupportedTypeError, UsageError

MAKERS: dict[str, Callable[..., ActivationStore]] = {
    "on the device": ActivationStore,
    "on the host": lambda **given: ActivationStore(offload=True, **given),
}
each_store = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_store
def test_what_is_registered_is_retrieved(make: Callable[..., ActivationStore]) -> None:
    store = make()
    tensors: dict[str | int, torch.Tensor] = {
        "a": torch.randn(3, 4),
        7: torch.arange(5),
        "half": torch.randn(2, 3).bfloat16(),
        "turned": torch.randn(4, 6).t(),
        "none": torch.empty(0, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "one": torch.tensor(2.0),
        "flags": torch.tensor([True, False]),
    }
    for layer, tensor in tensors.items():
        store.register(layer, tensor)
    assert store.keys() == list(tensors)
    for layer, tensor in tensors.items():
        assert store.has(layer)
        found = store.retrieve_or_recompute(layer, lambda: pytest.fail("it is there"))
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    store.clear("a")
    assert not store.has("a")
    assert len(store) == len(tensors) - 1
    store.clear()
    assert store.keys() == []
    assert store.memory_stats().current == store.memory_stats().on_host == 0


@each_store
def test_what_names_no_layer_or_is_no_tensor_is_refused(
    make: Callable[..., ActivationStore],
) -> None:
    store = make()
    bad: Any
    for bad in (None, True, ("a", 1), ["a"], 1.5):
        for call in (
            store.retrieve,
            lambda layer: store.register(layer, torch.ones(2)),
            lambda layer: store.retrieve_or_recompute(layer, lambda: torch.ones(2)),
        ):
            with pytest.raises(UnsupportedTypeError, match="a layer is a name or a number"):
                call(bad)
    bad = 3
    with pytest.raises(UnsupportedTypeError, match="a: an activation is a tensor"):
        store.retrieve_or_recompute("a", lambda: bad)
    assert store.keys() == []


def test_only_what_has_plain_memory_is_moved() -> None:
    store = ActivationStore(offload=True)
    for tensor in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        store.register("a", torch.ones(2))
        with pytest.raises(UsageError, match="only plain tensors"):
            store.register("a", tensor)
        assert torch.equal(store.retrieve("a"), torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_counted() -> None:
    store = ActivationStore()
    for tensor in (torch.eye(300).to_sparse(), torch.eye(300).to_sparse_csr()):
        store.register("a", tensor)
        assert 300 * (4 + 8) <= store.memory_stats().current <= 301 * (4 + 3 * 8)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_pinned_memory_without_cuda_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="no CUDA here"):
        ActivationStore(offload=True, pin_memory=True)


@each_store
def test_an_empty_store_and_unknown_layers(make: Callable[..., ActivationStore]) -> None:
    store = make()
    assert store.keys() == []
    assert not store.has("a")
    assert "a" not in store
    store.clear()
    store.clear("a")
    store.prefetch("a")
    assert store.memory_stats() == MemoryStats()
    with pytest.raises(NotFoundError, match="no activation"):
        store.retrieve("a")


@each_store
def test_what_is_not_kept_is_recomputed_once(make: Callable[..., ActivationStore]) -> None:
    store, calls = make(), []

    def recompute() -> torch.Tensor:
        calls.append(1)
        return torch.ones(3)

    for _ in range(2):
        assert torch.equal(store.retrieve_or_recompute("a", recompute), torch.ones(3))
    assert len(calls) == 1


def test_views_of_one_memory_are_counted_once() -> None:
    store = ActivationStore()
    whole = torch.zeros(1000)
    store.register("whole", whole)
    store.register("view", whole[:10])
    store.register("turned", whole.view(10, 100).t())
    assert store.memory_stats() == MemoryStats(current=4000, peak=4000, count=3)
    store.clear("whole")
    assert store.memory_stats().current == 4000  # the views hold it
    store.clear("view")
    store.clear("turned")
    assert store.memory_stats() == MemoryStats(current=0, peak=4000, count=0)


@each_store
def test_a_layer_that_registers_again_replaces_its_activation(
    make: Callable[..., ActivationStore],
) -> None:
    store = make()
    store.register("a", torch.zeros(1000))
    store.register("a", torch.ones(10))
    assert store.memory_stats().current == 40
    assert torch.equal(store.retrieve("a"), torch.ones(10))


@each_store
def test_what_is_kept_holds_no_graph_but_can_begin_one(
    make: Callable[..., ActivationStore],
) -> None:
    store = make()
    x = torch.randn(4, requires_grad=True)
    store.register("a", x * 2)
    found = store.retrieve("a")
    assert found.grad_fn is None
    assert found.requires_grad
    (found * 3).sum().backward()
    assert torch.equal(found.grad if found.grad is not None else x, torch.full((4,), 3.0))
    assert x.grad is None


@each_store
def test_the_oldest_are_dropped_when_the_budget_is_full(
    make: Callable[..., ActivationStore],
) -> None:
    store = make(budget="4kB")
    for layer in range(6):
        store.register(layer, torch.full((250,), float(layer)))
    assert store.keys() == [2, 3, 4, 5]
    assert store.memory_stats().current == store.memory_stats().peak == 4000
    assert store.memory_stats().evicted == 2
    # What is recomputed does not drive out what backward still needs.
    assert store.retrieve_or_recompute(0, lambda: torch.zeros(250)).sum() == 0
    assert store.keys() == [2, 3, 4, 5]
    store.register("large", torch.zeros(2000))
    assert not store.has("large")
    assert store.keys() == [2, 3, 4, 5]


def test_host_memory_stays_within_the_budget() -> None:
    store = ActivationStore(offload=True, budget=1 << 16)
    buffers = store._host
    assert buffers is not None
    taken = []
    for layer in range(12):
        store.register(layer, torch.zeros(1 << 12))
        taken.append(buffers.in_use + buffers.unused)
        store.retrieve_or_recompute(-1, lambda: torch.zeros(1 << 12))
    assert max(taken) == buffers.in_use == 1 << 16
    store.register("large", torch.zeros(1 << 15))
    assert buffers.in_use + buffers.unused == 1 << 16


@each_store
def test_an_exception_leaves_it_clean(make: Callable[..., ActivationStore]) -> None:
    store = make()

    def forward() -> None:
        with store:
            store.register("a", torch.zeros(1000))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forward()
    assert store.memory_stats() == MemoryStats(0, 4000, 0)


def test_what_cannot_be_kept_is_refused() -> None:
    store = ActivationStore()
    bad: Any = [1, 2]
    with pytest.raises(UnsupportedTypeError):
        store.register("a", bad)
    with pytest.raises(UnsupportedTypeError):
        store.register(bad, torch.zeros(1))
    with pytest.raises(UsageError):
        ActivationStore(budget="much")
    assert store.keys() == []


def test_host_memory_is_used_again() -> None:
    store = ActivationStore(offload=True)
    for _ in range(20):
        for layer in range(3):
            store.register(layer, torch.zeros(5000))
        store.clear()
    gc.collect()
    assert store._host is not None
    assert store._host.in_use == 0
    assert sum(map(len, store._host._free.values())) <= 4


def test_threads_may_use_it_at_once() -> None:
    store = ActivationStore(budget=40_000)

    def work(number: int) -> None:
        for turn in range(200):
            store.register(f"{number}.{turn % 5}", torch.full((100,), float(number)))
            found = store.retrieve_or_recompute(
                f"{number}.{turn % 7}", lambda: torch.full((100,), float(number))
            )
            assert torch.equal(found, torch.full((100,), float(number)))
            if turn % 11 == 0:
                store.clear(f"{number}.{turn % 5}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.memory_stats().current == 400 * len(store)


@given(
    st.lists(
        st.tuples(st.sampled_from("rcd"), st.integers(0, 5), st.integers(0, 3), st.integers(1, 9))
    ),
    st.none() | st.integers(40, 400),
)
def test_the_count_is_that_of_the_memory_that_is_held(
    actions: list[tuple[str, int, int, int]], budget: int | None
) -> None:
    store = ActivationStore(budget=budget)
    bases = [torch.zeros(10 * (n + 1)) for n in range(4)]
    for action, layer, base, length in actions:
        if action == "r":
            store.register(layer, bases[base][:length])
        elif action == "d":
            store.clear(layer)
        else:
            store.retrieve_or_recompute(layer, bases[base].clone)
        layers = store.keys()
        held = {store.retrieve(key).untyped_storage()._cdata: key for key in layers}
        sizes = [store.retrieve(key).untyped_storage().nbytes() for key in held.values()]
        assert store.memory_stats().current == sum(sizes)
        assert budget is None or sum(sizes) <= budget
