"""Which parameter lies where in the buckets of Megatron's distributed optimizer (`dp_reshardable`).

A bucket is one row of elements: parameters of one group of ranks, the last of the model first, each
from a multiple of 64 elements on, with nothing of worth in between. Which ones they are no file
says. What is known is where each begins and ends, for each is a part of its own in the files; and
the parameters themselves, as the optimizer has them: rounded, they are those of the model. So each
is looked for by its size and by some of its elements. Where several fit, such as norms that are
still ones, the order of Megatron's modules decides. Where that does not either, nothing is said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

import numpy as np

from ckptkit.foreign.extents import Extent, Stretches, samples
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.states import StateTensor
from ckptkit.model import Box
from ckptkit.model.box import flat_boxes

BUCKETS = re.compile(
    r"(?P<chain>(?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(?P<ranks>\d+)"
    r"\.gbuf_idx_(?P<buffer>\d+)\.dtype_(?P<dtype>.+)\.bucket_idx_(?P<number>\d+)\.(?P<state>\w+)"
)
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

_ALIGNED = 64
# So many different numbers are no accident; norms and biases may all be ones or zeros.
_TELLING = 16


@dataclass(frozen=True, slots=True, eq=False)
class _LocalParameter:
    """What one rank of tensor parallelism has of a parameter."""

    name: str
    place: int
    row: Stretches


@dataclass(slots=True, eq=False)
class _Slot:
    """A place in a bucket where one parameter is, and those that fit there."""

    bucket: _Bucket
    begin: int
    size: int
    fitting: list[_LocalParameter] = field(default_factory=list)
    is_told: bool = True
    """Whether its elements are so many different ones that nothing else has the same."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """One bucket: its elements as each state has them."""

    key: str
    ranks: tuple[str, int]
    """The optimizer, and the group of ranks."""
    buffer: tuple[int, str]
    number: int
    states: dict[str, Stretches] = field(default_factory=dict)


def placed_in(
    folder: Folder, tensors: Mapping[str, StateTensor], model: Mapping[str, StateTensor]
) -> tuple[dict[str, dict[str, tuple[StateTensor, str]]], list[str]]:
    """The states of the parameters of a model in the buckets that are among some tensors, each with
    where it is; and the names of those that were not found, or that could be several.
    """
    parts = {name: _parts_of(name, tensor, model) for name, tensor in model.items()}
    groups: dict[tuple[str, int], list[_Bucket]] = {}
    for bucket in _buckets(tensors):
        groups.setdefault(bucket.ranks, []).append(bucket)
    is_tied = not any(name.endswith("output_layer.weight") for name in model)
    places: dict[tuple[str, int], _Slot] = {}
    for (_, number), buckets in groups.items():
        # Ranks of tensor parallelism are next to each other in every order that Megatron has.
        slots = _slots(folder, buckets, [of[number % len(of)] for of in parts.values() if of])
        _decide(slots, is_tied=is_tied)
        for slot in slots:
            for part in slot.fitting:
                # Where several groups have the same part, each would do.
                places.setdefault((part.name, part.place), slot)
    found: dict[str, dict[str, tuple[StateTensor, str]]] = {}
    for name, of in parts.items():
        there = [(part, at) for part in of if (at := places.get((name, part.place)))]
        if there and len(there) == len(of):
            found[name] = _states(model[name], there)
    return found, [name for name in parts if name not in found]


def differing(
    folder: Folder, model: Mapping[str, StateTensor], masters: Mapping[str, StateTensor]
) -> list[str]:
    """The parameters that, as the optimizer has them, are not those of the model when rounded."""
    pairs = [
        (name, mine.row, its.row)
        for name, master in masters.items()
        if name in model and master.dtype.name.startswith(("float", "bfloat"))
        for mine, its in zip(
            _parts_of(name, model[name], model), _parts_of(name, master, masters), strict=False
        )
        if mine.row.size == its.row.size
    ]
    rounded = samples(folder, [(row, 0, row.size) for _, row, _ in pairs])
    exact = samples(folder, [(row, 0, row.size) for _, _, row in pairs])
    with np.errstate(over="ignore"):
        return sorted(
            {
                name
                for (name, *_), one, other in zip(pairs, rounded, exact, strict=True)
                if one.tobytes() != other.astype(one.dtype).tobytes()
            }
        )


def _buckets(tensors: Mapping[str, StateTensor]) -> list[_Bucket]:
    """The buckets, those of each buffer in order."""
    found: dict[str, _Bucket] = {}
    for name, tensor in tensors.items():
        match = BUCKETS.fullmatch(name)
        if not match:
            continue
        key = name.removesuffix(match["state"])
        ranks, buffer = (
            (match["chain"], int(match["ranks"])),
            (int(match["buffer"]), match["dtype"]),
        )
        bucket = found.setdefault(key, _Bucket(key, ranks, buffer, int(match["number"])))
        parts = sorted(tensor.extents, key=lambda extent: extent.box.offset)
        row = Stretches.of(tensor.dtype, parts)
        is_row = len(tensor.shape) == 1 and row.size == tensor.shape[0]
        is_row &= not any(part.strides for part in parts)
        if is_row and all(p.box.offset[0] == at for p, at in zip(parts, row.starts, strict=False)):
            bucket.states[match["state"]] = row
    return sorted(found.values(), key=lambda bucket: (*bucket.ranks, *bucket.buffer, bucket.number))


def _parts_of(
    name: str, tensor: StateTensor, model: Mapping[str, StateTensor]
) -> list[_LocalParameter]:
    """What each rank of tensor parallelism has of a parameter, in order; nothing where the parts in
    the files do not tell.
    """
    by_box = {extent.box: extent for extent in tensor.extents}
    boxes = sorted(by_box, key=lambda box: box.offset)
    if not boxes or tensor.is_flat or any(box.shape != boxes[0].shape for box in boxes):
        return []
    cut = [dim for dim, n in enumerate(tensor.shape) if boxes[0].shape[dim] != n]
    if len(cut) > 1 or any(extent.strides for extent in by_box.values()):
        return []
    if sum(box.size for box in boxes) != Box.whole(tensor.shape).size:
        return []
    step = len(boxes)
    below = name.replace("linear_fc1.bias", "linear_fc1.weight").replace("linear_fc1", "linear_fc2")
    if "linear_fc1." in name and below in model and cut == [0]:
        # Each rank has a part of both halves of a gated layer; what follows it tells how many.
        ranks = len({extent.box for extent in model[below].extents})
        step = ranks if len(boxes) == 2 * ranks else step
    return [
        _LocalParameter(
            name, at, Stretches.of(tensor.dtype, [by_box[box] for box in boxes[at::step]])
        )
        for at in range(step)
    ]


def _slots(
    folder: Folder, buckets: Sequence[_Bucket], parts: Sequence[_LocalParameter]
) -> list[_Slot]:
    """The places in the buckets of a group of ranks, in order, with the parts that fit by their
    size and their elements; none where a bucket is not made of such.
    """
    of_sizes: dict[int, list[_LocalParameter]] = {}
    for part in parts:
        of_sizes.setdefault(part.row.size, []).append(part)
    spans: list[tuple[_Bucket, int, int]] = []
    for bucket in buckets:
        row = bucket.states.get("param")
        if row is None or not row.dtype.name.startswith(("float", "bfloat")):
            return []
        ends = set(row.starts[1:])
        for begin in row.starts[:-1]:
            if begin % _ALIGNED == 0:
                spans += [(bucket, begin, n) for n in of_sizes if begin + n in ends]
    known: dict[tuple[int, str, bytes], list[_LocalParameter]] = {}
    wanted = [(part.row, 0, part.row.size) for part in parts]
    for part, sample in zip(parts, samples(folder, wanted), strict=True):
        known.setdefault((part.row.size, part.row.dtype.name, sample.tobytes()), []).append(part)
    edges: dict[_Bucket, dict[int, dict[int, _Slot]]] = {bucket: {} for bucket in buckets}
    wanted = [(bucket.states["param"], begin, size) for bucket, begin, size in spans]
    for (bucket, begin, size), sample in zip(spans, samples(folder, wanted), strict=True):
        slot = _Slot(bucket, begin, size)
        for dtype in {part.row.dtype for part in of_sizes[size]}:
            with np.errstate(over="ignore"):
                rounded = sample.astype(dtype.numpy)
            if fitting := known.get((size, dtype.name, rounded.tobytes())):
                slot.fitting += fitting
                slot.is_told &= len(np.unique(rounded)) >= min(_TELLING, max(2, size // 2))
        if slot.fitting:
            edges[bucket].setdefault(begin, {})[size] = slot
    found: list[_Slot] = []
    for bucket in buckets:
        way = _way(edges[bucket], bucket.states["param"].size)
        if way is None:
            return []
        found += way
    return found


def _way(edges: Mapping[int, Mapping[int, _Slot]], total: int) -> list[_Slot] | None:
    """The places that a bucket is made of, if there is one way. `edges` are by begin and size."""

    def after(at: int, size: int) -> int:
        return total if at + size == total else -(-(at + size) // _ALIGNED) * _ALIGNED

    is_end = {total}
    for at in sorted(edges, reverse=True):
        if any(after(at, size) in is_end for size in edges[at]):
            is_end.add(at)
    way: list[_Slot] = []
    at = 0
    while at < total:
        fitting = [slot for size, slot in edges.get(at, {}).items() if after(at, size) in is_end]
        if len(fitting) != 1:
            return None
        way += fitting
        at = after(at, fitting[0].size)
    return way


def _decide(slots: Sequence[_Slot], *, is_tied: bool) -> None:
    """Leave what is there of the parts that fit in each place of a group of ranks, as far as it can
    be told: nothing where it cannot.
    """
    buffers: dict[tuple[int, str], list[_Slot]] = {}
    for slot in slots:
        buffers.setdefault(slot.bucket.buffer, []).append(slot)
    _take_out(slots)
    for each in buffers.values():
        told = [slot.is_told and len(slot.fitting) == 1 for slot in each]
        if not all(told):
            choices = [[part.name for part in slot.fitting] for slot in each]
            found = told_by_order(choices, told, is_tied=is_tied)
            for slot, name in zip(each, found, strict=True):
                if name:
                    slot.fitting = [part for part in slot.fitting if part.name == name]
                    slot.is_told = True
    _take_out(slots)
    names = Counter(slot.fitting[0].name for slot in slots if len(slot.fitting) == 1)
    # Where two places want one part, any of them may be wrong.
    is_sound = all(slot.fitting for slot in slots)
    for slot in slots:
        is_one = len(slot.fitting) == 1 and names[slot.fitting[0].name] == 1
        if not (is_sound and slot.is_told and is_one):
            slot.fitting = []


def _take_out(slots: Sequence[_Slot]) -> None:
    """Where one part fits it is there, and nowhere else."""
    taken: set[str] = set()
    while more := {
        slot.fitting[0].name
        for slot in slots
        if len(slot.fitting) == 1 and slot.fitting[0].name not in taken
    }:
        taken |= more
        for slot in slots:
            if len(slot.fitting) > 1:
                slot.fitting = [part for part in slot.fitting if part.name not in taken]


def _states(
    tensor: StateTensor, there: Sequence[tuple[_LocalParameter, _Slot]]
) -> dict[str, tuple[StateTensor, str]]:
    """The states of one parameter, whose parts are at some places."""
    # Where ranks cut rows only, a part is one run of elements, and any cut in it is one in a row.
    is_flat = all(
        extent.box.shape[1:] == tensor.shape[1:]
        for part, _ in there
        for extent in part.row.stretches
    )
    found: dict[str, tuple[StateTensor, str]] = {}
    first_slot = there[0][1]
    for state in sorted(set.intersection(*(set(slot.bucket.states) for _, slot in there))):
        extents: list[Extent] = []
        for part, slot in there:
            row = slot.bucket.states[state]
            for own, first in zip(part.row.stretches, part.row.starts, strict=False):
                begin, end = slot.begin + first, slot.begin + first + own.box.size
                within = 0
                for extent, low, high in row.between(begin, end):
                    offset = extent.offset + low * row.dtype.itemsize
                    of = tensor.shape if is_flat else None
                    for box in boxes_in(own.box, within, within + high - low, of):
                        extents.append(Extent(box, extent.file, offset))
                        offset += box.size * row.dtype.itemsize
                    within += high - low
        dtype = first_slot.bucket.states[state].dtype
        made = StateTensor(tensor.shape, dtype, tuple(extents), is_flat=is_flat)
        begin, end = first_slot.begin, first_slot.begin + first_slot.size
        found[state] = made, f"{first_slot.bucket.key}{state}[{begin}:{end}]"
    return found


def boxes_in(box: Box, begin: int, end: int, shape: tuple[int, ...] | None) -> Iterator[Box]:
    """Some elements of a box in its order, as boxes of the array; of the row of all its elements
    where its shape is told.
    """
    if shape is not None:
        first = box.offset[0] * Box.whole(shape[1:]).size if shape else 0
        yield Box((first + begin,), (end - begin,))
        return
    for inner in flat_boxes(box.shape, begin, end):
        offset = tuple(a + b for a, b in zip(box.offset, inner.offset, strict=True))
        yield replace(inner, offset=offset)


# The order of the modules of Megatron's models, by the names of their parameters: it tells apart
# those that have the same elements, such as norms that are still ones.


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
