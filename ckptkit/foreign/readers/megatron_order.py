"""The order of the modules of Megatron's models, by the names of their parameters: it tells apart
those that have the same elements, such as norms that are still ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import product

_EMBEDDING, _LAYERS, _NORM, _OUTPUT = range(4)
_LAYER = re.compile(r"(?:model\.|module\.)*decoder\.layers\.(\d+)\.(.+)")
_OTHERS = (
    (r"embedding\.word_embeddings\.", _EMBEDDING, 0),
    (r"embedding\.position_embeddings\.", _EMBEDDING, 1),
    (r"decoder\.final_layernorm\.", _NORM, 0),
    (r"output_layer\.", _OUTPUT, 0),
)
# What a layer is made of, in order. A norm that is a module of its own comes first in Megatron's
# own layers; in those of Transformer Engine it is a part of what follows it.
_BEFORE = "self_attention.linear_qkv.layer_norm_"
_MODULES = (
    *("input_layernorm.", "self_attention.linear_proj.", "self_attention.linear_qkv."),
    *("self_attention.q_layernorm.", "self_attention.k_layernorm."),
    *("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_", "mlp.router."),
    *("mlp.experts.", "mlp.shared_experts.", "mlp.linear_fc1.", "mlp.linear_fc2."),
)
_EXPERT = re.compile(r"mlp\.experts\.(?:experts\.)?(\d+)\.linear_fc([12])\.(.+)")
_KINDS = ("layer_norm_weight", "layer_norm_bias", "weight", "bias")


def told_by_order(
    choices: Sequence[Sequence[str]], told: Sequence[bool], *, is_tied: bool
) -> list[str]:
    """Which of the names that may be at each of some places in a buffer is there, where the order
    tells: the last module is first. Nothing stands for what it does not tell.

    Of each name that is `told` nothing else may be there. With `is_tied` the embedding is the last
    module as well.
    """
    ways: list[dict[int, str]] = []
    fitting = _of_layers_here(choices, told)
    for is_apart, is_grouped in product((False, True), repeat=2):
        ranked: list[tuple[int, dict[tuple[int, ...], str]]] = []
        for number, names in enumerate(fitting):
            of = {
                _rank(name, is_apart=is_apart, is_grouped=is_grouped, is_tied=is_tied): name
                for name in names
            }
            if None not in of:
                ranked.append((number, {rank: name for rank, name in of.items() if rank}))
        # The way that takes the last module that it can, and that which takes the first.
        lasts = _descending([list(of) for _, of in ranked])
        firsts = _descending([[_negative(rank) for rank in of] for _, of in reversed(ranked)])
        if lasts is None or firsts is None:
            continue
        ways.append(
            {
                number: of[last]
                for (number, of), last, first in zip(ranked, lasts, firsts[::-1], strict=True)
                if last == _negative(first)
            }
        )
    found = [{way.get(number, "") for way in ways} for number in range(len(choices))]
    return [names.pop() if len(names) == 1 else "" for names in found]


def _of_layers_here(choices: Sequence[Sequence[str]], told: Sequence[bool]) -> list[Sequence[str]]:
    """The names at each place, without those of layers of other stages of a pipeline: a stage has
    whole layers, and what is outside of them is with the first or the last of all.

    Where that is not so, fewer names are left than there are places, and no order fits them.
    """
    layers = [n for names in choices for name in names if (n := _layer(name)) is not None]
    ends = {_EMBEDDING: min(layers, default=0)}
    ends[_NORM] = ends[_OUTPUT] = max(layers, default=0)
    here = {_layer(names[0]) for names, is_told in zip(choices, told, strict=True) if is_told}
    here.discard(None)

    def is_here(name: str) -> bool:
        blocks = [ends[block] for pattern, block, _ in _OTHERS if re.search(pattern, name)]
        layer = next(iter(blocks), _layer(name))
        return layer is None or layer in here

    return [
        names if is_told or not here else list(filter(is_here, names))
        for names, is_told in zip(choices, told, strict=True)
    ]


def _layer(name: str) -> int | None:
    match = _LAYER.fullmatch(name)
    return int(match[1]) if match else None


def _descending(choices: Sequence[Iterable[tuple[int, ...]]]) -> list[tuple[int, ...]] | None:
    """One of each of some choices, each below the one before, and as high as can be."""
    found: list[tuple[int, ...]] = []
    for some in choices:
        below = [rank for rank in some if not found or rank < found[-1]]
        if not below:
            return None
        found.append(max(below))
    return found


def _negative(rank: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-number for number in rank)


@lru_cache(maxsize=1 << 16)
def _rank(name: str, *, is_apart: bool, is_grouped: bool, is_tied: bool) -> tuple[int, ...] | None:
    """Where a parameter is in the order of the modules of a model; None where it is not known.

    With `is_apart` the norm before the attention is a module of its own; with `is_grouped` all
    experts are one module.
    """
    kind = next((number for number, end in enumerate(_KINDS) if name.endswith("." + end)), -1)
    match = _LAYER.fullmatch(name)
    if kind < 0:
        return None
    if not match:
        for pattern, block, number in _OTHERS:
            if re.fullmatch(rf"(?:model\.|module\.)*{pattern}[^.]+", name):
                # The last stage has a tied embedding as well, as its last module.
                is_known = block != _EMBEDDING or not is_tied
                return (block, number, kind, 0, 0, 0) if is_known else None
        return None
    layer, rest = int(match[1]), match[2]
    if is_apart and rest.startswith(_BEFORE):
        return (_LAYERS, layer, -1, kind, 0, 0)
    at = next((number for number, module in enumerate(_MODULES) if rest.startswith(module)), -1)
    if at < 0:
        return None
    if expert := _EXPERT.fullmatch(rest):
        which, linear = int(expert[1]), int(expert[2])
        within = (linear, kind, which) if is_grouped else (which, linear, kind)
        return (_LAYERS, layer, at, *within)
    if rest.startswith("mlp.experts."):
        return None
    return (_LAYERS, layer, at, kind, int("linear_fc2." in rest), 0)
