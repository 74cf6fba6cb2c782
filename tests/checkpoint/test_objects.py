"""What is no tensor, and tensors with two names."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptkit
from ckptkit import PerRank, Sum, Writer
from ckptkit.errors import CkptkitError, InvalidNameError, PeerError, UnsupportedTypeError
from ckptkit.format.objects import Replicated
from ckptkit.storage import MemoryStore
from tests.checkpoint.saving import random_values, same, save_by

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.datetimes().map(lambda at: at.replace(fold=0))  # ISO 8601 has no fold
)
leaves = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
        | st.dictionaries(st.integers(0, 99), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(leaves, st.lists(leaves, min_size=3, max_size=3))
def test_any_leaf_comes_back_as_it_was(value: Any, of_rank: list[Any]) -> None:
    def fill(writer: Writer) -> None:
        writer.add_object("plain", value)
        writer.add_object("replicated", Replicated(value))
        writer.add_object("per rank", PerRank(of_rank[writer.rank]))
        writer.add_object("sum", Sum(writer.rank + 1))

    store = MemoryStore()
    save_by(store, fill, strategy="fsdp:3")
    with ckptkit.open(store) as checkpoint:
        found = checkpoint.objects
        assert repr(found["plain"]) == repr(found["replicated"]) == repr(value)
        assert repr(found["per rank"]) == repr(of_rank)
        assert found["sum"] == 6
    assert ckptkit.verify(store) == []


def test_arrays_and_times_are_leaves_too() -> None:
    state = random_values((5,), "uint8")
    now = datetime.datetime.now(datetime.UTC)
    store = MemoryStore()
    with Writer(store, step=1, details={"precision": "bf16", "zero": 3}) as writer:
        writer.add_object("rng", {"state": state, "at": now, "lr": np.float32(0.1)})
    with ckptkit.open(store) as checkpoint:
        found = checkpoint.objects["rng"]
        assert same(found["state"], state)
        assert found["at"] == now
        assert found["lr"] == np.float32(0.1)
        assert type(found["lr"]) is np.float32
        assert checkpoint.details == {"precision": "bf16", "zero": 3}


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, {"a": [object()]}, {1.5: 2}])
def test_what_no_leaf_can_hold_is_refused_where_it_is(value: Any) -> None:
    with Writer(MemoryStore(), step=1) as writer:
        with pytest.raises(UnsupportedTypeError) as caught:
            writer.add_object("extra", value)
        assert "extra" in caught.value.where
    with pytest.raises(UnsupportedTypeError):
        Writer(MemoryStore(), step=1, details={"value": value})


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with Writer(MemoryStore(), step=1) as writer, pytest.raises(UnsupportedTypeError):
        writer.add_object("extra", endless)


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_an_object_needs_a_name_that_can_be_stored(name: str) -> None:
    writer = Writer(MemoryStore(), step=1)
    with pytest.raises(InvalidNameError):
        writer.add_object(name, 1)


def test_an_object_is_added_once() -> None:
    writer = Writer(MemoryStore(), step=1)
    writer.add_object("lr", 1)
    with pytest.raises(InvalidNameError):
        writer.add_object("lr", 1)


@pytest.mark.parametrize("wrap", [PerRank, Sum])
def test_a_value_of_each_rank_is_missed_where_a_rank_did_not_add_it(wrap: Any) -> None:
    def fill(writer: Writer) -> None:
        if writer.rank != 1:
            writer.add_object("seen", wrap(1))

    store = MemoryStore()
    with pytest.raises(PeerError, match="rank 1") as caught:
        save_by(store, fill, strategy="fsdp:3")
    assert "seen" in str(caught.value)
    assert store.list() == []


def test_a_tied_tensor_is_stored_once_and_read_under_both_names() -> None:
    values = random_values((30_000,), "float32")

    def fill(writer: Writer) -> None:
        writer.add("model/embed", values)
        writer.add_alias("model/head", "model/embed")

    store = MemoryStore()
    save_by(store, fill, strategy="ddp:2")
    assert sum(entry.size for entry in store.list()) < 2 * values.nbytes
    with ckptkit.open(store) as checkpoint:
        assert sorted(checkpoint.arrays) == ["model/embed", "model/head"]
        assert checkpoint["model/head"].alias_of == "model/embed"
        assert checkpoint["model/embed"].alias_of is None
        assert same(checkpoint.read("model/head"), values)
        group: Any = checkpoint.zarr["model"]
        assert same(group["head"][...], values)
        assert sorted(group.array_keys()) == ["embed", "head"]
    assert ckptkit.verify(store) == []


@pytest.mark.parametrize("target", ["model/nothing", "model/tied", "model/head"])
def test_a_tied_name_has_to_lead_to_an_array(target: str) -> None:
    store = MemoryStore()

    def fill(writer: Writer) -> None:
        writer.add("model/embed", np.zeros(3))
        writer.add_alias("model/tied", "model/embed")
        writer.add_alias("model/head", target)

    with pytest.raises(CkptkitError):
        save_by(store, fill)
    assert store.list() == []


def test_ranks_have_to_tie_a_name_to_the_same_array() -> None:
    def fill(writer: Writer) -> None:
        writer.add("a", np.zeros(3))
        writer.add("b", np.zeros(3))
        writer.add_alias("c", "ab"[writer.rank])

    store = MemoryStore()
    with pytest.raises(PeerError, match="alias"):
        save_by(store, fill, strategy="ddp:2")
    assert store.list() == []
