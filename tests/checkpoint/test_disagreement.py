"""Ranks that tell different stories: all of them are told so, and there is no step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import Run, ThreadBarrier, Writer
from ckptkit.checkpoint.ranks import Ranks
from ckptkit.errors import CkptkitError, LayoutError, PeerError
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import Fill, Tensor, add, outcomes, random_values, save_by

W = Tensor(random_values((8, 4), "float32"), {"fsdp": "shard(0)"})
REPLICATED = Tensor(random_values((8, 4), "float32"))


def assert_refused(
    store: MemoryStore, errors: list[BaseException | None], *words: str
) -> CkptkitError:
    """Every rank raised a PeerError, one of them with the words, and nothing is left."""
    assert all(isinstance(error, PeerError) for error in errors), errors
    assert Run(store).steps() == []
    assert store.list() == []
    told = str(errors[0])
    assert all(word in told for word in words), told
    return errors[0]  # type: ignore[return-value]


def different(*parts: dict[str, Any]) -> Fill:
    """Each rank adds the same array with other options."""

    def fill(writer: Writer) -> None:
        usual: dict[str, Any] = {
            "data": np.zeros((4, 4), "f4"),
            "shape": (8, 4),
            "placements": {"fsdp": "shard(0)"},
        }
        writer.add("model/w", **(usual | parts[writer.rank]))

    return fill


LONG = {"data": np.zeros((4, 1 << 17), "f4"), "shape": (8, 1 << 17)}
DISAGREEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shape": ({}, {"data": np.zeros((3, 4), "f4"), "shape": (7, 4)}),
    "dtype": ({}, {"data": np.zeros((4, 4), "i4")}),
    "role": ({"role": "param"}, {"role": "buffer"}),
    "of": ({"of": "model/a"}, {"of": "model/b"}),
    "placements": (
        {},
        {"data": np.zeros((8, 2), "f4"), "placements": {"fsdp": "shard(1)"}},
    ),
    "grid": (LONG, LONG | {"sliced": (0,)}),
}


@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_about_an_array_are_told_what_about(what: str) -> None:
    store = MemoryStore()
    errors = outcomes(store, different(*DISAGREEMENTS[what]), strategy="fsdp:2")
    told = assert_refused(store, errors, "model/w", what, "rank 0", "rank 1")
    assert told.hint


def test_ranks_that_disagree_about_a_value_are_told_how_to_store_it() -> None:
    store = MemoryStore()
    errors = outcomes(
        store, lambda writer: writer.add_object("seed", writer.rank), strategy="fsdp:2"
    )
    told = assert_refused(store, errors, "seed", "0", "1")
    assert "PerRank" in told.hint


def test_the_order_of_keys_is_no_disagreement() -> None:
    values: list[Any] = [{"a": 1, "b": ({2: 3, "c": 4},)}, {"b": ({"c": 4, 2: 3},), "a": 1}]

    def fill(writer: Writer) -> None:
        writer.add_object("x", values[writer.rank])

    store = MemoryStore()
    assert outcomes(store, fill, strategy="fsdp:2") == [None, None]
    with ckptkit.open(store) as step:
        assert repr(step.objects["x"]) == repr(values[0])  # the bytes are those of rank 0
    assert ckptkit.verify(store) == []


def test_values_that_differ_in_type_only_differ() -> None:
    store = MemoryStore()
    errors = outcomes(
        store, lambda writer: writer.add_object("x", [1, True][writer.rank]), strategy="fsdp:2"
    )
    assert_refused(store, errors, "x")


def _together(*makers: Callable[[ThreadBarrier], Writer], fill: Fill) -> list[Any]:
    """Ranks whose writers are made differently."""
    errors: list[Any] = [None] * len(makers)

    def run(rank: int, barrier: ThreadBarrier) -> None:
        try:
            with makers[rank](barrier) as writer:
                fill(writer)
        except CkptkitError as error:
            errors[rank] = error

    barriers = ThreadBarrier.group(len(makers), 20)
    threads = [
        threading.Thread(target=run, args=(rank, barriers[rank])) for rank in range(len(makers))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("strategy", ({"strategy": "fsdp:2"}, {"strategy": "tp:2"})),
        ("details", ({"details": {"zero": 1}}, {"details": {"zero": 2}})),
        ("details", ({"details": {"zero": 1}}, {"details": {"zero": True}})),
    ],
)
def test_ranks_that_disagree_about_the_save_are_told_what_about(
    what: str, options: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    store = MemoryStore()

    def maker(rank: int) -> Callable[[ThreadBarrier], Writer]:
        given = {"strategy": "fsdp:2"} | options[rank]
        return lambda barrier: Writer(store, step=1, rank=rank, barrier=barrier, **given)

    errors = _together(maker(0), maker(1), fill=lambda writer: writer.add("w", np.zeros(64)))
    assert_refused(store, errors, what, "rank 0", "rank 1")


def test_ranks_that_save_different_steps_save_none() -> None:
    store = MemoryStore()

    def maker(rank: int) -> Callable[[ThreadBarrier], Writer]:
        return lambda barrier: Writer(
            store, step=rank, strategy="fsdp:2", rank=rank, barrier=barrier
        )

    errors = _together(maker(0), maker(1), fill=lambda writer: add(writer, "w", W))
    assert all(isinstance(error, CkptkitError) for error in errors)
    assert Run(store).steps() == []


def test_ranks_that_cut_chunks_differently_are_told() -> None:
    store = MemoryStore()

    def maker(rank: int) -> Callable[[ThreadBarrier], Writer]:
        size = [16, 1 << 20][rank]
        return lambda barrier: Writer(
            store, step=1, strategy="fsdp:2", rank=rank, barrier=barrier, chunk_bytes=size
        )

    errors = _together(maker(0), maker(1), fill=lambda writer: add(writer, "w", W))
    assert_refused(store, errors, "w", "grid")


@pytest.mark.parametrize("silent", [0, 1, 2])
@pytest.mark.parametrize("tensor", [W, REPLICATED], ids=["cut", "replicated"])
def test_a_rank_that_does_not_add_what_it_holds_leaves_a_hole(tensor: Tensor, silent: int) -> None:
    def fill(writer: Writer) -> None:
        if writer.rank != silent:
            add(writer, "model/w", tensor)

    store = MemoryStore()
    errors = outcomes(store, fill, strategy="fsdp:3", chunk_bytes=16)
    told = assert_refused(store, errors, "model/w")
    assert told.hint


def test_ranks_that_add_different_sets_of_replicated_arrays_are_told() -> None:
    def fill(writer: Writer) -> None:
        for name in ["abc", "bcd"][writer.rank]:
            add(writer, name, REPLICATED)

    store = MemoryStore()
    errors = outcomes(store, fill, strategy="ddp:2", chunk_bytes=16)
    assert_refused(store, errors)


def test_the_order_in_which_ranks_add_does_not_matter() -> None:
    tensors = {name: Tensor(random_values((8, 4), seed=ord(name))) for name in "abcde"}

    def fill(writer: Writer) -> None:
        for name in ["abcde", "edcba", "cabed"][writer.rank]:
            add(writer, name, tensors[name])

    store = MemoryStore()
    save_by(store, fill, strategy="ddp:3", chunk_bytes=32)
    with ckptkit.open(store) as checkpoint:
        for name, tensor in tensors.items():
            assert np.array_equal(checkpoint[name][...], tensor.whole, equal_nan=True)


@pytest.mark.parametrize("dims", [(2,), (-1,), (True,), ("0",)])
def test_sliced_names_dims_of_the_array(dims: Any) -> None:
    with (
        Writer(MemoryStore(), step=1) as writer,
        pytest.raises(LayoutError, match="has 2") as caught,
    ):
        writer.add("model/w", np.zeros((4, 4)), sliced=dims)
    assert "model/w" in str(caught.value)


def test_a_writer_that_one_rank_cannot_make_is_told_to_all() -> None:
    """Before it has a block to leave."""
    errors: dict[int, CkptkitError] = {}

    def run(barrier: Ranks) -> None:
        how: dict[str, Any] = {"rank": barrier.rank, "barrier": barrier}
        if barrier.rank:
            how["details"] = {"x": object()}
        with (
            pytest.raises(CkptkitError) as caught,
            Writer(MemoryStore(), step=1, strategy="ddp:2", **how) as writer,
        ):
            writer.add("w", np.zeros(3))
        errors[barrier.rank] = caught.value

    threads = [threading.Thread(target=run, args=(each,)) for each in ThreadBarrier.group(2, 60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "cannot be stored" in str(errors[0])


@pytest.mark.parametrize(
    ("data", "options", "problem"),
    [
        (np.ma.masked_array([1.0, 2.0], [True, False]), {}, "a masked array"),
        (np.zeros((1,) * 33), {}, "more than 32 dims"),
    ],
)
def test_what_is_no_array_of_the_step_is_refused_as_it_is_added(
    data: Any, options: dict[str, Any], problem: str
) -> None:
    with Writer(MemoryStore(), step=1) as writer:
        with pytest.raises(CkptkitError, match=problem) as caught:
            writer.add("model/w", data, **options)
        assert "model/w" in str(caught.value)


def test_numbers_of_numpy_are_a_shape_and_a_rank() -> None:
    store, rank, sizes = MemoryStore(), np.int64(0), np.array([6])
    with Writer(store, step=1, rank=rank) as writer:  # type: ignore[arg-type]  # as libraries count
        writer.add("a", np.zeros(6), shape=tuple(sizes))
        writer.add("b", np.zeros(6), shape=(6,))
    with ckptkit.open(store) as checkpoint:
        assert [checkpoint[name].shape for name in checkpoint] == [(6,), (6,)]
