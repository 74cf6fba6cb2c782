"""The digest of a target is known before it exists, and is that of what comes to be."""

from __future__ import annotations

import numpy as np
import pytest

import ckptkit
from ckptkit import Selection, Writer
from ckptkit.errors import UsageError
from ckptkit.storage import MemoryStore
from tests.checkpoint.reshard.toy import reshard, saved
from tests.checkpoint.saving import save_by

CHANGES = {
    "nothing": Selection(),
    "a choice": Selection(exclude=("layers.1.*",), optimizer=False),
    "new names": Selection(rename=((r"^layers\.(\d+)", r"model.layers.\1"),)),
}


def recorded(store: MemoryStore) -> str:
    with ckptkit.open(store) as checkpoint:
        found = checkpoint.details["digest"]
        assert found["algorithm"] == "xxh3-128"
        return str(found["step"])


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("source", "to"), [("fsdp:8", "tp:2"), ("tp:2,fsdp:2", "pp:2,tp:2")])
def test_a_recorded_digest_is_that_of_the_step(source: str, to: str, change: str) -> None:
    store = MemoryStore()
    reshard(saved(source), store, to, digest=True, selection=CHANGES[change])
    found = ckptkit.digest(store)
    assert recorded(store) == found.step
    with ckptkit.open(store) as checkpoint:
        assert not found.findings(checkpoint)


def test_an_alias_that_stands_in_for_its_array_has_its_digest() -> None:
    store = MemoryStore()
    reshard(
        saved("fsdp:3"), store, "fsdp:2", digest=True, selection=Selection(exclude=("model/embed",))
    )
    found = ckptkit.digest(store)
    assert recorded(store) == found.step
    assert found.arrays["model/head"] == ckptkit.digest(saved("fsdp:3")).arrays["model/embed"]


def test_there_and_back_is_the_same_state() -> None:
    there, back = MemoryStore(), MemoryStore()
    reshard(saved("fsdp:8"), there, "tp:4", digest=True)
    reshard(there, back, "fsdp:8", digest=True)
    expected = ckptkit.digest(saved("fsdp:8"))
    assert ckptkit.digest(back) == ckptkit.digest(there) == expected
    assert recorded(back) == recorded(there) == expected.step
    assert ckptkit.diff(saved("fsdp:8"), back).same


def small() -> MemoryStore:
    store, rng = MemoryStore(), np.random.default_rng(0)

    def fill(writer: Writer) -> None:
        writer.add("model/w", rng.random((700, 300)), role="param")
        writer.add("model/b", rng.random(3).astype("float32"), role="param")
        writer.add("model/n", np.array(3, "int64"), role="buffer")
        writer.add("optimizer/w/exp_avg", rng.random((7, 3)), role="optimizer", of="model/w")

    save_by(store, fill)
    return store


def test_values_are_digested_as_they_are_cast() -> None:
    store = MemoryStore()
    selection = Selection(cast=(("", "bf16"), ("optimizer/*", "fp16")))
    ckptkit.reshard(small(), store, to="fsdp:2", selection=selection, digest=True)
    found = ckptkit.digest(store)
    assert recorded(store) == found.step
    kept = ckptkit.digest(small())
    same = [name for name in found.arrays if found.arrays[name] == kept.arrays[name]]
    assert same == ["model/n"]


def test_a_cast_that_loses_numbers_is_refused_before_anything_is_written() -> None:
    source, store = MemoryStore(), MemoryStore()
    save_by(source, lambda writer: writer.add("model/w", np.full(9, 1e300), role="param"))
    with pytest.raises(UsageError, match="beyond float32"):
        ckptkit.reshard(
            source, store, to="fsdp:2", selection=Selection(cast=(("", "fp32"),)), digest=True
        )
    assert not store.list()
