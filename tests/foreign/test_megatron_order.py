"""Where parameters of Megatron have the same elements, the order of its modules tells them apart,
or nothing does.
"""

from __future__ import annotations

import pytest

from ckptkit.foreign.extents import Stretches
from ckptkit.foreign.readers.megatron_buckets import (
    _Bucket,
    _decide,
    _LocalParameter,
    _Slot,
)
from ckptkit.model import DType

BEFORE = ("self_attention.linear_qkv.layer_norm_weight",)
ATTENTION = ("self_attention.linear_proj.weight", "self_attention.linear_qkv.weight")
HEADS = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
DENSE = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
OF_MEGATRON = (*BEFORE, *ATTENTION, *HEADS, *DENSE)
OF_TRANSFORMER_ENGINE = (ATTENTION[0], *BEFORE, ATTENTION[1], *HEADS, *DENSE)


def model(layer: tuple[str, ...], count: int = 3) -> list[str]:
    """The parameters of a model in the order of its modules."""
    layers = [f"decoder.layers.{n}.{name}" for n in range(count) for name in layer]
    outside = ["decoder.final_layernorm.weight", "output_layer.weight"]
    return ["embedding.word_embeddings.weight", *layers, *outside]


def decided(
    order: list[str], others: tuple[str, ...] = (), like: str = "norm", *, is_tied: bool = False
) -> list[str]:
    """What is found in one buffer with these parameters, where those `like` this are all alike;
    `others` are in no buffer of this group of ranks. Nothing stands for what cannot be told.
    """
    row = Stretches.of(DType.of("float32"), ())
    parts = {name: _LocalParameter(name, 0, row) for name in (*order, *others)}
    alike = [part for name, part in parts.items() if like in name]
    bucket = _Bucket("", ("", 0), (0, ""), 0)
    slots = [
        _Slot(bucket, 0, 0, list(alike), is_told=False)
        if like in name
        else _Slot(bucket, 0, 0, [parts[name]])
        for name in reversed(order)
    ]
    _decide(slots, is_tied=is_tied)
    return [slot.fitting[0].name if slot.fitting else "" for slot in slots][::-1]


@pytest.mark.parametrize("layer", [OF_MEGATRON, OF_TRANSFORMER_ENGINE])
def test_norms_that_are_all_ones_are_told_by_their_neighbours(layer: tuple[str, ...]) -> None:
    order = model(layer)
    assert decided(order) == order
    # A stage of a pipeline: the norms of other stages are as they are.
    for number in range(3):
        stage = [name for name in order if f".layers.{number}." in name]
        assert decided(stage, tuple(set(order) - set(stage))) == stage


def test_biases_of_a_stage_that_are_all_zeros_are_told_by_their_neighbours() -> None:
    kinds = ("weight", "bias")
    order = [name.replace("weight", kind) for name in model(OF_MEGATRON) for kind in kinds]
    assert decided(order, like="bias") == order
    stage = [name for name in order if ".layers.1." in name]
    assert decided(stage, tuple(set(order) - set(stage)), like="bias") == stage


def test_layers_in_part_settle_nothing() -> None:
    """As if the matrices of one were of another type, and in a buffer of their own."""
    order = model(OF_MEGATRON)
    some = [name for name in order if ".layers.1." not in name or "norm" in name]
    found = decided(some, tuple(set(order) - set(some)))
    assert not any("norm" in name for name in found)


def test_experts_are_in_one_module_or_in_one_each() -> None:
    names = [
        f"decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc{linear}.{kind}"
        for layer in range(2)
        for expert in range(3)
        for linear in (1, 2)
        for kind in ("weight", "bias")
    ]
    assert decided(names, like="bias") == names
    grouped = sorted(names, key=lambda n: (n.split(".")[2], n.split(".")[7], n.endswith("bias")))
    assert decided(grouped, like="bias") == grouped
    # As they are after one was copied to all: each could be of any rank.
    lost = decided(names[:4], tuple(names[4:]), like="experts")
    assert lost == [""] * 4


def test_an_order_that_megatron_does_not_have_settles_nothing() -> None:
    order = model(OF_MEGATRON)
    order[1], order[2] = order[2], order[1]
    order[6], order[7] = order[7], order[6]
    found = decided(order)
    assert all(name == "" for name, had in zip(found, order, strict=True) if "norm" in had)
    assert all(name == had for name, had in zip(found, order, strict=True) if "norm" not in had)


def test_modules_that_are_not_known_are_not_guessed() -> None:
    order = [name.replace("fc1.layer_norm", "fc1.norm_of_mine") for name in model(OF_MEGATRON)]
    found = decided(order)
    assert not any("norm" in name for name in found)


def test_one_parameter_at_two_places_is_at_none() -> None:
    order = model(OF_MEGATRON, 1)
    order.insert(1, "decoder.layers.0.mlp.linear_fc2.weight")
    found = decided(order)
    assert "decoder.layers.0.mlp.linear_fc2.weight" not in found


def test_an_embedding_that_is_tied_may_be_the_last_module() -> None:
    order = [*model(OF_MEGATRON, 1)[1:-1], "embedding.word_embeddings.weight"]
    assert decided(order, is_tied=True) == order
    assert "" in decided(order)
