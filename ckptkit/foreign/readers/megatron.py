"""Checkpoints of Megatron-Core in its format `torch_dist`: files of DCP, with names and shapes of
Megatron's own, and `common.pt` with what is no tensor.

Layers that are alike are one tensor with an axis for them in front, and so are experts: here each
is an array. The two halves of a gated layer may have a name each: here they are one array, as the
parameter is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import Extent, ForeignStep, c_order
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.globals import Global
from ckptkit.foreign.pickles.interpreter import Placeholder
from ckptkit.foreign.readers.dcp import Contents, contents_of
from ckptkit.foreign.readers.megatron_buckets import BUCKETS, placed_in
from ckptkit.foreign.readers.torch_save import counted
from ckptkit.foreign.states import StateTensor, states_of
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import Box

CONFIG, COMMON = "metadata.json", "common.pt"
_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OF_RANKS = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
# What has an axis of layers, or of experts: there is no number behind the word.
_STACKED = (
    re.compile(r"((?:.+\.)?layers\.)([^\d.][^.]*\..+)"),
    re.compile(r"((?:.+\.)?experts\.)((?!experts\.)[^\d.][^.]*\..+)"),
)
_MOST_LAYERS = 1 << 14
_HALF = re.compile(r"(.+\.(?:weight|bias)\d*)_([wv])")


def read_megatron(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder."""
    where = str(folder.store.location)
    _check(folder)
    has = contents_of(folder)
    unread = dict(has.unread)
    common = _common(folder, has, unread)
    model: dict[str, StateTensor] = {}
    states: dict[str, dict[str, Any]] = {}
    theirs: dict[str, str] = {}
    for stored, tensor in has.tensors.items():
        if _OF_RANKS.fullmatch(stored):
            continue
        match = _OF_OPTIMIZER.fullmatch(stored)
        state, key = match.groups() if match else (None, stored)
        for name, suffix, one in _apart(key, tensor):
            into = model if state is None else states.setdefault(name, {})
            into[state or name] = one
            theirs[f"optimizer/{name}/{state}" if state else f"model/{name}"] = stored + suffix
    _join_halves(model, theirs)
    for state in {state for has in states.values() for state in has}:
        of_all = {name: has.pop(state) for name, has in states.items() if state in has}
        _join_halves(of_all, theirs, state)
        for name, one in of_all.items():
            states.setdefault(name, {})[state] = one
    of_ranks, objects = _objects(has.objects)
    options = _options({**common.pop("optimizer", {}), **of_ranks})
    if any(BUCKETS.fullmatch(name) for name in has.tensors):
        placed = placed_in(folder, has.tensors, model)
        for name, of_one in placed.states.items():
            states.setdefault(name, {}).update(of_one)
        for (name, state), key in placed.theirs.items():
            theirs[f"optimizer/{name}/{state}"] = key
        if placed.lost:
            unread["optimizer.distributed"] = _lost(placed.lost, len(model))
    optimizer = _optimizer({name: has for name, has in states.items() if has}, options)
    found = states_of({"model": model, **optimizer, **objects, **common}, where)
    found.keep("extra/optimizer", options)
    found.theirs |= {name: key for name, key in theirs.items() if name in found.theirs}
    found.left_out |= unread
    used = sorted({*has.files, *(key for key in (CONFIG, COMMON) if key in folder.files)})
    found.left_out |= folder.unread(used)
    return ForeignStep(
        format="megatron",
        files={key: folder.size(key) for key in used},
        arrays=found.arrays,
        aliases=found.aliases,
        objects=found.objects,
        theirs=found.theirs,
        details={**found.details, **_vocabulary(common.get("args"))},
        step=counted(common),
    )


def _lost(names: Sequence[str], count: int) -> str:
    some = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
    return (
        f"of {len(names)} of {count} parameters no state was found in the buckets of the "
        f"distributed optimizer, or nothing tells whose it is: {some}; where they are not frozen, "
        "load it with Megatron, and save it with --dist-ckpt-optim-fully-reshardable"
    )


def _check(folder: Folder) -> None:
    """Refuse what is no whole checkpoint of the one format that is read."""
    where = folder.where(CONFIG)
    if CONFIG not in folder.files:
        raise FormatError(
            "the save was not finished, or not all of it copied: Megatron writes this file last",
            where=where,
            hint="use the checkpoint before it, or copy the folder again",
        )
    try:
        said = json.loads(folder.read(CONFIG))
    except (ValueError, RecursionError) as error:
        raise FormatError("not valid JSON", where=where, hint="copy the file again") from error
    backend = said.get("sharded_backend") if isinstance(said, dict) else None
    if backend != "torch_dist" or said.get("sharded_backend_version") != 1:
        raise FormatError(
            "a format of Megatron that is not read here, only version 1 of torch_dist is",
            where=where,
            value=backend if backend != "torch_dist" else said.get("sharded_backend_version"),
            hint="load it with Megatron, and save it with --ckpt-format torch_dist",
        )


def _common(folder: Folder, has: Contents, unread: dict[str, str]) -> dict[str, Any]:
    """What all ranks have: plain values, by Megatron's names."""
    if COMMON not in folder.files:
        # Of later versions it is among the objects.
        said = [v for name, v in has.objects.items() if name.startswith("common_state/shard_")]
        if not said:
            folder.size(COMMON)
        value: Any = said[0][0] if said and isinstance(said[0], list) and said[0] else {}
    else:
        try:
            value = read_file(folder, COMMON).tree
        except FormatError as error:
            if "global that is not read" not in error.what:
                raise
            # Of a training script of somebody: without its values a model is one, too.
            unread[COMMON] = error.what + (f" (got {error.value})" if error.has_value else "")
            value = {}
    value = _plain(value)
    if not isinstance(value, dict):
        raise FormatError("not what Megatron saves for all ranks", where=folder.where(COMMON))
    return value


def _plain(value: Any) -> Any:
    """A value whose namespaces are dictionaries, and whose members of enumerations are texts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=str)
    if isinstance(value, Global):
        return value.name
    if not isinstance(value, Placeholder):
        return value
    if value.kind == "BytesIO":
        return value.state[0] if isinstance(value.state, tuple) and value.state else b""
    if len(value.args) == 1 and value.state is None and type(value.args[0]) in (int, str):
        return f"{value.kind}({value.args[0]})"
    return _plain(value.fields()) if type(value.state) is dict else value


def _objects(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the optimizers of the first ranks say besides tensors; and what each rank, layer or
    expert has, by its name: all of them where there are several.
    """
    optimizer: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, value in objects.items():
        match = _OBJECT.fullmatch(name)
        key, place, of = match.groups() if match else (name, "", "")
        said = _plain(value)
        if isinstance(said, list) and len(said) == 1:
            (said,) = said
        if match := _OF_RANKS.fullmatch(key):
            if match[2] == "0" and not match[3].startswith("per_bucket_numel"):
                optimizer[match[1] + match[3]] = said
        elif key == "common_state" or said is None:
            continue  # a layer has nothing to say besides its tensors
        elif set(of.split(".")) <= {"1", ""}:
            found[key] = said
        else:
            found.setdefault(key, {})[place] = said
    return optimizer, found


def _options(said: dict[Any, Any]) -> list[dict[str, Any]]:
    """The options of all groups of parameters, of one optimizer or of several."""
    found: list[dict[str, Any]] = []
    for key, value in said.items():
        if key == "param_groups" and isinstance(value, list):
            found += [group for group in value if isinstance(group, dict)]
        elif isinstance(value, dict):
            found += _options(value)
    return found


def _optimizer(
    states: Mapping[str, dict[str, Any]], options: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """An optimizer as torch has it. Which parameter is in which of several groups nothing says."""
    if not states:
        return {}
    steps = {step for each in options if type(step := each.get("step")) in (int, float)}
    if len(steps) == 1:
        states = {name: {**has, "step": step} for name, has in states.items() for step in steps}
    groups = [{**options[0], "params": list(states)}] if len(options) == 1 else []
    return {"optimizer": {"state": states, "param_groups": groups}}


def _vocabulary(args: Any) -> dict[str, int]:
    """How many rows of the embedding are of the vocabulary; Megatron fills it up to some size."""
    said = args if isinstance(args, dict) else {}
    keys = ("vocab_size", "padded_vocab_size")
    return {key: said[key] for key in keys if type(said.get(key)) is int}


def _apart(key: str, tensor: StateTensor) -> Iterator[tuple[str, str, StateTensor]]:
    """The tensors that one is of several layers or experts: their names, and what is behind the
    name of the one for each.
    """
    parts = [(key, "", tensor)]
    for pattern in _STACKED:
        parts = [
            (f"{match[1]}{number}.{match[2]}", f"{suffix}[{number}]", one)
            if match
            else (name, suffix, whole)
            for name, suffix, whole in parts
            for match in [
                pattern.fullmatch(name) if whole.shape and math.prod(whole.shape) > 0 else None
            ]
            for number, one in (_rows(whole, name) if match else [(0, whole)])
        ]
    yield from parts


def _rows(tensor: StateTensor, name: str) -> Iterator[tuple[int, StateTensor]]:
    """What is at each place along the first dim of a tensor."""
    # Before any list is made: the shape may be what only the metadata says.
    has = sum(extent.box.size for extent in tensor.extents)
    if tensor.shape[0] > _MOST_LAYERS or has < math.prod(tensor.shape):
        raise FormatError(
            f"of layers or experts, as one tensor of {tensor.shape}, elements are missing",
            where=name,
            value=has,
        )
    rows: list[list[Extent]] = [[] for _ in range(tensor.shape[0])]
    for extent in tensor.extents:
        box, steps = extent.box, extent.strides or c_order(extent.box.shape)
        inner = None if extent.strides is None else extent.strides[1:]
        for place in range(box.shape[0]):
            offset = extent.offset + place * steps[0] * tensor.dtype.itemsize
            part = Extent(Box(box.offset[1:], box.shape[1:]), extent.file, offset, inner)
            rows[box.offset[0] + place].append(part)
    for number, extents in enumerate(rows):
        yield number, StateTensor(tensor.shape[1:], tensor.dtype, tuple(extents))


def _join_halves(
    tensors: dict[str, StateTensor], theirs: dict[str, str], state: str | None = None
) -> None:
    """Make one tensor of those that are called `weight_w` and `weight_v`."""

    def ours(name: str) -> str:
        return f"optimizer/{name}/{state}" if state else f"model/{name}"

    for name in list(tensors):
        match = _HALF.fullmatch(name)
        other = f"{match[1]}_v" if match and match[2] == "w" else ""
        if not match or other not in tensors or match[1] in tensors:
            continue
        first, second = tensors[name], tensors[other]
        if first.shape != second.shape or first.dtype != second.dtype or not first.shape:
            continue
        below = [
            replace(e, box=Box((e.box.offset[0] + first.shape[0], *e.box.offset[1:]), e.box.shape))
            for e in second.extents
        ]
        del tensors[name], tensors[other]
        tensors[match[1]] = StateTensor(
            (2 * first.shape[0], *first.shape[1:]), first.dtype, (*first.extents, *below)
        )
        theirs[ours(match[1])] = f"{theirs.pop(ours(name))}, {theirs.pop(ours(other))}"
