from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import ckptkit
from ckptkit import ArrayDifference, PerRank, Split, Sum, Writer
from ckptkit.checkpoint.run.diff import ArrayForm, ValueDifference
from ckptkit.errors import CorruptionError, UsageError
from ckptkit.model import DType
from tests.checkpoint.saving import Tensor, Values, flipped, random_values
from tests.checkpoint.sharded import STRATEGIES, awkward_state, saved

MIB = 1 << 20


def changed(values: Values, index: tuple[int, ...]) -> Values:
    """A copy with another element there."""
    found = values.copy()
    at = int(np.ravel_multi_index(index, values.shape)) if index else 0
    found.reshape(-1).view(np.uint8)[at * values.itemsize] ^= 1
    return found


def state_with(values: Values, **cuts: str) -> dict[str, Tensor]:
    return {"model/w": Tensor(values, cuts)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("chunk_bytes", [48, 4 * MIB])
def test_the_same_state_is_the_same_under_every_strategy(strategy: str, chunk_bytes: int) -> None:
    state, tied = awkward_state(), {"model/tied": "model/float32"}
    a = saved(state, "fsdp:2", tied=tied, chunk_bytes=100)
    b = saved(state, strategy, tied=tied, chunk_bytes=chunk_bytes, step=9)
    for atol in (1e-3, 0.0):
        found = ckptkit.diff(a, b, atol=atol)
        assert found.same
        assert (found.array_count, found.object_count) == (len(state) + 1, 0)
        assert found.nbytes == sum(tensor.whole.nbytes for tensor in state.values())
        assert (found.a.strategy, found.b.strategy, found.b.step) == ("fsdp:2", strategy, 9)


def test_one_element_anywhere_is_found_and_named() -> None:
    whole = saved(awkward_state(), "tp:4", chunk_bytes=48)
    rng = np.random.default_rng(1)
    for name, tensor in awkward_state().items():
        if not tensor.whole.size:
            continue
        index = tuple(int(rng.integers(n)) for n in tensor.whole.shape)
        other = Tensor(changed(tensor.whole, index), tensor.placements)
        b = saved({**awkward_state(), name: other}, "fsdp:8", chunk_bytes=100)
        (found,) = ckptkit.diff(whole, b).arrays
        assert (found.name, found.kind) == (name, "values")
        assert found.values is not None
        assert (found.values.count, found.values.first) == (1, index)
        assert found.values.of == tensor.whole.size


def test_differences_are_counted_and_measured_over_all_bands() -> None:
    values = np.zeros((1 << 12, 1 << 11), "float32")
    other = values.copy()
    other[5, 7], other[4000, 0], other[4095, 2047] = 0.5, -3.0, 1.0
    a = saved(state_with(values, fsdp="shard(0)"), "fsdp:8")
    b = saved(state_with(other, tp="shard(1)"), "tp:4")
    form = ArrayForm((1 << 12, 1 << 11), "float32")
    expected = ValueDifference(3, values.size, 3.0, (5, 7))
    for memory in ("16MiB", "1GiB"):
        found = ckptkit.diff(a, b, memory=memory)
        assert found.arrays == (ArrayDifference("model/w", "values", form, form, expected),)
    near = ckptkit.diff(a, b, atol=1.0)
    assert near.arrays[0].values == ValueDifference(1, values.size, 3.0, (4000, 0))
    assert ckptkit.diff(a, b, atol=3.0).same
    assert not ckptkit.diff(a, b, rtol=0.9).same


def test_names_shapes_and_dtypes_are_differences() -> None:
    values = np.ones((4, 6), "float32")
    a = saved({f"model/{name}": Tensor(values) for name in ("old", "same", "shape", "dtype")})
    b = saved(
        {
            "model/new": Tensor(values),
            "model/same": Tensor(values),
            "model/shape": Tensor(values.reshape(6, 4)),
            "model/dtype": Tensor(values.astype(DType.of("bfloat16").numpy)),
        }
    )
    form = ArrayForm((4, 6), "float32")
    found = ckptkit.diff(a, b)
    assert found.arrays == (
        ArrayDifference("model/dtype", "dtype", form, ArrayForm((4, 6), "bfloat16")),
        ArrayDifference("model/new", "only_b", None, form),
        ArrayDifference("model/old", "only_a", form, None),
        ArrayDifference("model/shape", "shape", form, ArrayForm((6, 4), "float32")),
    )
    assert (found.array_count, found.nbytes) == (5, 96)


def test_tied_arrays_are_compared_by_name_with_what_is_there() -> None:
    values, other = random_values((4, 4)), random_values((4, 4), seed=1)
    tied = saved({"model/a": Tensor(values)}, tied={"model/b": "model/a"})
    untied = saved({"model/a": Tensor(values), "model/b": Tensor(values)})
    apart = saved({"model/a": Tensor(values), "model/b": Tensor(other)})
    assert ckptkit.diff(tied, untied).same
    assert [found.name for found in ckptkit.diff(tied, apart).arrays] == ["model/b"]


def test_objects_are_compared_by_what_they_mean() -> None:
    def fill(values: Mapping[str, Any]) -> Any:
        def add(writer: Writer) -> None:
            for name, value in values.items():
                writer.add_object(name, value(writer) if callable(value) else value)

        return add

    def share(of: int) -> Any:
        def items(writer: Writer) -> Split:
            rank, size = writer.rank, writer.strategy.world_size
            return Split(list(range(of * rank // size, of * (rank + 1) // size)))

        return items

    objects = {
        "lr": 0.5,
        "map": {"a": 1, "b": 2},
        "tokens": lambda writer: Sum(8 // writer.strategy.world_size),
        "items": share(12),
        "gone": 1,
        "kind": Sum(0),
    }
    a = saved({}, objects=fill(objects))
    same = saved({}, "fsdp:4", objects=fill({**objects, "map": {"b": 2, "a": 1}}))
    assert ckptkit.diff(a, same).same
    assert ckptkit.diff(a, same).object_count == 6
    other = {**objects, "lr": 0.5000001, "items": share(11), "tokens": Sum(3), "new": 1, "kind": 0}
    del other["gone"]
    found = ckptkit.diff(a, saved({}, "fsdp:4", objects=fill(other)))
    assert [(each.name, each.kind, each.a, each.b) for each in found.objects] == [
        ("gone", "only_a", 1, None),
        ("items", "value", list(range(12)), list(range(11))),
        ("kind", "semantics", "sum", "replicated"),
        ("lr", "value", 0.5, 0.5000001),
        ("new", "only_b", None, 1),
        ("tokens", "value", 8, 12),
    ]
    near = ckptkit.diff(a, saved({}, "fsdp:4", objects=fill(other)), atol=1e-3)
    assert "lr" not in [each.name for each in near.objects]


def test_values_of_ranks_are_compared_as_they_are() -> None:
    def fill(writer: Writer) -> None:
        writer.add_object("rng", PerRank(writer.rank))

    a, b = (saved({}, strategy, objects=fill) for strategy in ("fsdp:2", "fsdp:3"))
    assert ckptkit.diff(a, a).same
    (found,) = ckptkit.diff(a, b).objects
    assert (found.a, found.b) == ([0, 1], [0, 1, 2])


def test_patterns_pick_what_is_compared() -> None:
    def fill(writer: Writer) -> None:
        writer.add("optimizer/b/exp_avg", random_values((3,)), role="optimizer", of="model/b")
        writer.add_object("extra/lr", 1)

    state = {"model/a": Tensor(random_values((3,))), "model/b": Tensor(random_values((4,)))}
    a = saved(state, objects=fill)
    b = saved({**state, "model/b": Tensor(random_values((4,), seed=1))}, objects=fill)

    def counts(include: Sequence[str] = (), exclude: Sequence[str] = ()) -> tuple[bool, int, int]:
        found = ckptkit.diff(a, b, include=include, exclude=exclude)
        return found.same, found.array_count, found.object_count

    assert counts() == (False, 3, 1)
    assert counts(include=["model/a"]) == (True, 1, 0)
    assert counts(include=["b"]) == (False, 2, 0)
    assert counts(exclude=["b"]) == (True, 1, 1)
    assert counts(include=["model/*", "lr"], exclude=["*/b"]) == (True, 1, 1)
    with pytest.raises(UsageError, match="nothing in either step has such a name"):
        ckptkit.diff(a, b, include=["mdoel/*"])
    with pytest.raises(UsageError, match="exclude takes a tuple of patterns, not one text"):
        ckptkit.diff(a, b, exclude="model/*")


def test_a_damaged_chunk_is_an_error_and_no_difference() -> None:
    values = random_values((512, 300))
    a = saved(state_with(values), chunk_bytes=4096)
    damaged = flipped(a, values[100, :8].tobytes())
    with pytest.raises(CorruptionError, match="chunk model/w/c/"):
        ckptkit.diff(a, damaged)


def test_both_sides_count_as_progress() -> None:
    done: list[int] = []
    a = saved(state_with(random_values((64, 64))))
    ckptkit.diff(a, a, progress=done.append)
    assert sum(done) == 2 * 64 * 64 * 4
