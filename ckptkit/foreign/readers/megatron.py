"""Checkpoints of Megatron-Core in its format `torch_dist`: files of DCP, with names and shapes of
Megatron's own, and `common.pt` with what is no tensor.

Layers that are alike are one tensor with an axis for them in front, and so are experts: here each
is an array. The two halves of a gated layer may have a name each: here they are one array, as the
parameter is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import Extent, ForeignArray, ForeignStep, c_order
from ckptkit.foreign.folder import Folder, parsed
from ckptkit.foreign.pickles import MOST_DEPTH
from ckptkit.foreign.pickles.globals import Global, Placeholder
from ckptkit.foreign.readers.dcp import Contents, contents_of
from ckptkit.foreign.readers.megatron_buckets import BUCKETS, boxes_in, differing, placed_in
from ckptkit.foreign.spread import placed_by_writers
from ckptkit.foreign.states import StateTensor, is_plain, reason, states_of, step_counted
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import MAX_WORLD_SIZE, Axis, Box, Mesh, Shard, Stage, Strategy

CONFIG, COMMON = "metadata.json", "common.pt"
_OF_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
OF_RANKS = re.compile(r"((?:chained_\d+\.)?)optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_OBJECT = re.compile(r"(.+)/shard_([\d.]+)_([\d.]+)")
# What has an axis of layers, or of experts: there is no number behind the word.
_STACKED = (
    re.compile(r"((?:.+\.)?layers\.)([^\d.][^.]*\..+)"),
    re.compile(r"((?:.+\.)?experts\.)((?!experts\.)[^\d.][^.]*\..+)"),
)
# Of groups of parameters, what Adam of torch has as well.
_OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable"),
    *("differentiable", "fused", "decoupled_weight_decay"),
)
_WRITTEN = re.compile(r"__([0-9]{1,8})_[0-9]+\.distcp", re.ASCII)
_MOST_VALUES = 1 << 20
_RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"
HALF = re.compile(r"(.+\.(?:weight|bias)\d*)_([wv])")


def read_megatron(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder."""
    where = str(folder.store.location)
    _check(folder)
    has = contents_of(folder)
    unread = dict(has.unread)
    common = _common(folder, has, unread)
    model, states, theirs = _named(has.tensors)
    for name, of_one in states.items():
        for state, tensor in list(of_one.items()) if name in model else ():
            shape = model[name].shape
            if tensor.shape in (shape, (), (1,)):
                continue
            if whole := _of_grid(tensor, shape):
                of_one[state] = whole
            else:
                unread[_ours(name, state)] = f"its shape is {tensor.shape}, the parameter's {shape}"
                del of_one[state]
    args = common["args"] if isinstance(common.get("args"), dict) else {}
    sizes = _sizes(args)
    of_ranks, objects = _objects(has.objects)
    said = [common.pop("optimizer", None), of_ranks]
    if _states_taken(said):
        unread["optimizer.param_state"] = (
            "what it has is of parameters that nothing tells; where states are missing, load it "
            f"with Megatron, and save it with {_RESHARDABLE}"
        )
    noted: dict[str, Any] = {key: n for key, n in sizes.items() if key.endswith("vocab_size")}
    # Versions and options call it one or the other.
    masters = {
        name: master
        for name, has in states.items()
        if (master := has.get("param", has.get("fp32_param")))
    }
    if others := differing(folder, model, masters):
        noted["not_rounded"] = (
            f"of {_some(others, model)} the optimizer's own copy is not what was rounded to the "
            "model's: the optimizer is of other weights, or was saved wrong"
        )
    if any(BUCKETS.fullmatch(name) for name in has.tensors):
        placed, lost = placed_in(folder, has.tensors, model)
        for name, of_one in placed.items():
            for state, (tensor, key) in of_one.items():
                states.setdefault(name, {})[state] = tensor
                theirs[_ours(name, state)] = key
        if lost:
            unread["optimizer.distributed"] = (
                f"of {_some(lost, model)} no state was found in the buckets of the "
                "distributed optimizer, or nothing tells whose it is; where they are not frozen, "
                f"load it with Megatron, and save it with {_RESHARDABLE}"
            )
    optimizer = optimizer_of(states, said)
    # What of the model was the same on all ranks, and no tensor of Megatron.
    beside = common.pop("model", None)
    found = states_of({**objects, **common, "model": model, **optimizer}, where)
    for key, value in (("model", beside), ("optimizer", [each for each in said if each])):
        if value:
            # What else an optimizer says is there already where its states are nobody's.
            name = f"extra/{key}"
            found.keep(f"{name}.said" if name in found.objects else name, value)
    found.theirs |= {name: key for name, key in theirs.items() if name in found.theirs}
    found.left_out |= unread
    strategy, arrays = _spread(args, found.arrays)
    used = sorted({*has.files, *(key for key in (CONFIG, COMMON) if key in folder.files)})
    return found.step(
        "megatron",
        folder,
        used,
        arrays=arrays,
        strategy=strategy,
        details=noted,
        sizes=sizes,
        step=step_counted(common),
    )


def _named(
    tensors: Mapping[str, StateTensor],
) -> tuple[dict[str, StateTensor], dict[str, dict[str, Any]], dict[str, str]]:
    """The parameters of the model and the states of each, by the names of the parameters, but for
    what is in buckets; and what Megatron calls each of our names.
    """
    model: dict[str, StateTensor] = {}
    states: dict[str, dict[str, Any]] = {}
    theirs: dict[str, str] = {}
    for stored, tensor in tensors.items():
        whole = Box.whole(tensor.shape)
        if OF_RANKS.fullmatch(stored):
            continue
        # The metadata may say any number of layers; it is refused where they are not in the files.
        is_whole = 0 < whole.size <= sum(extent.box.size for extent in tensor.extents)
        for state, name, suffix, one in parameters_of(stored, tensor, is_apart=is_whole):
            into = model if state is None else states.setdefault(name, {})
            if (state or name) in into:
                raise FormatError("two tensors have this name", where=stored, value=name)
            into[state or name] = one
            theirs[_ours(name, state)] = stored + suffix
    _join_halves(model, theirs)
    for state in {state for has in states.values() for state in has}:
        of_all = {name: has.pop(state) for name, has in states.items() if state in has}
        _join_halves(of_all, theirs, state)
        for name, one in of_all.items():
            states.setdefault(name, {})[state] = one
    return model, {name: has for name, has in states.items() if has}, theirs


def _of_grid(tensor: StateTensor, shape: tuple[int, ...]) -> StateTensor | None:
    """A state that has the shape of the grid of ranks of tensor parallelism, and behind it how many
    elements of a parameter of some shape each has, in a row; None where it is not such.

    So Megatron up to 0.14 saves those of `fully_sharded_model_space`.
    """
    *grid, length = tensor.shape
    local = tuple(n // max(1, count) for n, count in zip(shape, grid, strict=False))
    whole = tuple(n * count for n, count in zip(local, grid, strict=False))
    if len(grid) != len(shape) or whole != shape or math.prod(local) != length:
        return None
    is_flat = math.prod(grid[1:]) == 1
    extents: list[Extent] = []
    for extent in tensor.extents:
        *place, begin = extent.box.offset
        if extent.strides or math.prod(extent.box.shape[:-1]) != 1:
            return None
        part = Box(tuple(n * at for n, at in zip(local, place, strict=True)), local)
        offset = extent.offset
        for box in boxes_in(part, begin, extent.box.stop[-1], shape if is_flat else None):
            extents.append(Extent(box, extent.file, offset))
            offset += box.size * tensor.dtype.itemsize
    return StateTensor(shape, tensor.dtype, tuple(extents), is_flat=is_flat)


def _ours(name: str, state: str | None) -> str:
    """What the array of a parameter is called here, or that of one of its states."""
    return f"optimizer/{name}/{state}" if state else f"model/{name}"


def _some(names: Sequence[str], of: Mapping[str, Any]) -> str:
    some = ", ".join(sorted(names)[:8]) + (", …" if len(names) > 8 else "")
    return f"{len(names)} of {len(of)} parameters ({some})"


def _check(folder: Folder) -> None:
    """Refuse what is no whole checkpoint of the one format that is read."""
    where = folder.where(CONFIG)
    if CONFIG not in folder.files:
        raise FormatError(
            "the save was not finished, or not all of it copied: Megatron writes this file last",
            where=where,
            hint="use the checkpoint before it, or copy the folder again",
        )
    said = parsed(folder.read(CONFIG), where)
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
    # Of later versions it is among the objects.
    said = [v for name, v in has.objects.items() if name.startswith("common_state/shard_")]
    if said and COMMON in folder.files:
        raise FormatError(
            "what all ranks have is in this file, and in the parts as well: the file is of an "
            "older save into the same folder",
            where=folder.where(COMMON),
            value="common_state",
            hint="move the file away: what .metadata lists is the last save",
        )
    if not said:
        return read_common(folder, unread)
    return _common_values(said[0][0] if isinstance(said[0], list) and said[0] else {}, folder)


def read_common(folder: Folder, unread: dict[str, str]) -> dict[str, Any]:
    """What is in `common.pt`, as plain values."""
    try:
        value = read_file(folder, COMMON).tree
    except FormatError as error:
        if "global that is not read" not in error.what:
            raise
        # Of a training script of somebody: without its values a model is one, too.
        unread[COMMON] = reason(error)
        value = {}
    return _common_values(value, folder)


def _common_values(value: Any, folder: Folder) -> dict[str, Any]:
    value = _plain(value, folder.where(COMMON))
    if not isinstance(value, dict):
        raise FormatError("not what Megatron saves for all ranks", where=folder.where(COMMON))
    return value


def _plain(tree: Any, where: str) -> Any:
    """A value whose namespaces are dictionaries, and whose members of enumerations are texts."""
    count = 0

    def plain(value: Any, depth: int) -> Any:
        # A namespace may be in itself, or twice in each of others: nobody has counted these.
        nonlocal count
        count += 1
        if depth > MOST_DEPTH or count > _MOST_VALUES:
            raise FormatError(
                "values in too many levels, or too many",
                where=where,
                hint="nothing of it was run; save plain values without what refers to itself",
            )
        if isinstance(value, dict):
            return {key: plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)([plain(item, depth + 1) for item in value])
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
        return plain(value.state, depth + 1) if type(value.state) is dict else value

    return plain(tree, 0)


def _objects(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the optimizers of the first ranks say besides tensors; and what each rank, layer or
    expert has, by its name: all of them where there are several.
    """
    optimizer: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for name, value in objects.items():
        match = _OBJECT.fullmatch(name)
        key, place, of = match.groups() if match else (name, "", "")
        said = _plain(value, name)
        if isinstance(said, list) and len(said) == 1:
            (said,) = said
        if match := OF_RANKS.fullmatch(key):
            if match[2] == "0" and not match[3].startswith("per_bucket_numel"):
                optimizer[match[1] + match[3]] = said
        elif key == "common_state" or said is None:
            continue  # a layer has nothing to say besides its tensors
        elif set(of.split(".")) <= {"1", ""}:
            found[key] = said
        else:
            found.setdefault(key, {})[place] = said
    return optimizer, found


def _options(said: Any) -> list[dict[str, Any]]:
    """The options of all groups of parameters, of one optimizer or of several."""
    if isinstance(said, dict) and isinstance(said.get("param_groups"), list):
        return [group for group in said["param_groups"] if isinstance(group, dict)]
    inner = said.values() if isinstance(said, dict) else said if isinstance(said, list) else ()
    return [group for each in inner for group in _options(each)]


def _states_taken(said: Any) -> bool:
    """Take states that are no plain values out of what optimizers say; whether there were some."""
    lost: list[Any] = []
    if isinstance(said, dict):
        states = [key for key in said if str(key).endswith("param_state")]
        lost = [key for key in states if not is_plain(said[key])]
    for key in lost:
        del said[key]
    inner = said.values() if isinstance(said, dict) else said if isinstance(said, list) else ()
    below = [_states_taken(each) for each in inner]
    return bool(lost) or any(below)


def optimizer_of(states: Mapping[str, dict[str, Any]], said: Any) -> dict[str, Any]:
    """An optimizer as torch has it, of the states of parameters, and what Megatron's say besides.
    Which parameter is in which of several groups nothing says: so all are in one, with the options
    that all groups have alike.
    """
    if not states:
        return {}
    options = _options(said)
    steps = {step for each in options if type(step := each.get("step")) in (int, float)}
    if len(steps) == 1:
        states = {name: {**has, "step": step} for name, has in states.items() for step in steps}
    first = options[0] if options else {}
    alike = {
        key: first[key]
        for key in _OPTIONS
        if key in first and all(key in each and each[key] == first[key] for each in options)
    }
    group = {**alike, "params": list(states)}
    return {"optimizer": {"state": states, "param_groups": [group]}}


# What `config.json` of transformers calls the arguments of a training script.
_SIZES = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "padded_vocab_size": "padded_vocab_size",
    "num_experts": "num_local_experts",
}


def _spread(
    args: Mapping[Any, Any], arrays: list[ForeignArray]
) -> tuple[Strategy | None, list[ForeignArray]]:
    """The strategy that the arguments of a training script tell, where the files bear it out: ranks
    that each wrote what they have by it. Without arguments nothing tells how many ranks there were.
    """

    def size(name: str, otherwise: int = 0) -> int:
        found = args.get(name, otherwise)
        return found if type(found) is int and 0 < found <= MAX_WORLD_SIZE else 0

    world, pipeline = size("world_size"), size("pipeline_model_parallel_size")
    tensor, context = size("tensor_model_parallel_size"), size("context_parallel_size", 1)
    expert = size("expert_model_parallel_size", 1)
    # Experts that are cut in another number of parts are on a mesh of their own.
    of_experts = args.get("expert_tensor_parallel_size")
    inner = pipeline * tensor * (context if expert == 1 else expert)
    if not inner or not world or world % inner or (expert > 1 and of_experts not in (None, tensor)):
        return None, arrays
    data = Axis("ddp", "ddp", world // inner)
    beside = Axis("cp", "ddp", context) if expert == 1 else Axis("ep", "ep", expert)
    axes = [Axis("pp", "pp", pipeline), data, beside, Axis("tp", "tp", tensor)]
    if args.get("use_tp_pp_dp_mapping"):
        axes[:2] = axes[1::-1]
    strategy = Strategy(Mesh(tuple(axis for axis in axes if axis.size > 1)))
    writers = {extent.file for array in arrays for extent in array.extents}
    ranks = {file: int(m[1]) if (m := _WRITTEN.fullmatch(file)) else None for file in writers}
    if any(rank is None or rank >= world for rank in ranks.values()):
        return None, arrays
    placed = placed_by_writers(arrays, strategy, lambda file: ranks[file] or 0)
    return (strategy, placed) if _bear_out(placed, strategy) else (None, arrays)


def _bear_out(arrays: Sequence[ForeignArray], strategy: Strategy) -> bool:
    """Whether each array is of one stage, and whole, or cut as tensor parallelism does."""
    kinds = [axis.kind for axis in strategy.mesh.axes]
    cut = False
    for array in arrays:
        row = dict(zip(kinds, array.placements, strict=True))
        if "pp" in row and not isinstance(row["pp"], Stage):
            return False
        # Of a gated layer the halves are written one by one.
        rows, beside = array.shape[:1], array.shape[1:]
        is_whole = array.is_flat or all(
            e.box.shape[1:] == beside and e.box.shape[:1] in (rows, tuple(n // 2 for n in rows))
            for e in array.extents
        )
        if not is_whole and not isinstance(row.get("tp"), Shard):
            return False
        cut |= isinstance(row.get("tp"), Shard)
    return cut or "tp" not in kinds


def _sizes(args: Mapping[Any, Any]) -> dict[str, int]:
    """The sizes of the model. Its embedding has more rows than the vocabulary: Megatron pads it."""
    found = {name: args[key] for key, name in _SIZES.items() if type(args.get(key)) is int}
    if args.get("group_query_attention") is False:
        # The number of groups means nothing then.
        found.pop("num_key_value_heads", None)
    return found


def parameters_of(
    stored: str, tensor: StateTensor, *, is_apart: bool = True
) -> Iterator[tuple[str | None, str, str, StateTensor]]:
    """What a tensor by one of Megatron's names is of the parameters of a model, of layers and
    experts one by one: which state of the optimizer, or None where it is the parameter itself; the
    name of the parameter; and what is behind Megatron's name for each.
    """
    match = _OF_OPTIMIZER.fullmatch(stored)
    state, key = match.groups() if match else (None, stored)
    parts = [(key, "", tensor)]
    for pattern in _STACKED if is_apart else ():
        parts = [
            (f"{match[1]}{number}.{match[2]}", f"{suffix}[{number}]", one)
            if match
            else (name, suffix, whole)
            for name, suffix, whole in parts
            for match in [pattern.fullmatch(name) if whole.shape else None]
            for number, one in (_rows(whole) if match else [(0, whole)])
        ]
    for name, suffix, one in parts:
        yield state, name, suffix, one


def _rows(tensor: StateTensor) -> Iterator[tuple[int, StateTensor]]:
    """What is at each place along the first dim of a tensor."""
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
    for name in list(tensors):
        match = HALF.fullmatch(name)
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
        halves = [theirs.pop(_ours(half, state)) for half in (name, other)]
        theirs[_ours(match[1], state)] = ", ".join(halves)
