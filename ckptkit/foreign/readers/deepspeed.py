"""Checkpoints of DeepSpeed: a folder for each tag, with the files of the model and those of its
optimizer, one for each rank.

The optimizer's files have the weights in full precision. Those of the model have copies, of 16 bits
mostly, which are left out; what only they have are buffers and frozen parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import ForeignArray, ForeignStep
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.interpreter import Placeholder
from ckptkit.foreign.readers.safetensors import config_of
from ckptkit.foreign.readers.zero import Zero, pieces_of, read_zero, shapes_of
from ckptkit.foreign.states import StateTensor, states_of
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import Axis, Mesh, Placement, Replicate, Shard, Strategy, document

LATEST = "latest"
_TAG = re.compile(r"(.*[^0-9])?global_step(\d{1,18})")
_MODEL = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt"
)
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*")
# Of a model's file: how its tensors lie, which is told otherwise here.
_LAYOUT = (
    *("module", "optimizer", "buffer_names", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments"),
)


@dataclass(slots=True)
class _Rank:
    """The files of one rank of model parallelism, by rank of data parallelism."""

    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """What one rank of model parallelism has."""

    tree: Mapping[str, Any]
    """Of the model's file of the first rank."""
    module: dict[str, Any]
    zero: Zero | None
    world: int
    """Of data parallelism."""
    stage: int
    copies: dict[str, str]
    """The types of the weights that are left out for those in full precision."""
    differing: list[str]


def read_deepspeed(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder; of one of tags the one that `latest` names, or the newest."""
    tag = _tag(folder)
    ranks = _ranks(folder, tag)
    if len(ranks) > 1:
        raise FormatError(
            "several ranks of model parallelism, which are not put together here",
            where=folder.where(tag),
            value=sorted(ranks),
        )
    part = _part(folder, ranks[0])
    files = [
        key for rank in ranks.values() for key in (*rank.models.values(), *rank.optimizers.values())
    ]
    return _step(folder, tag, part, files)


def _tag(folder: Folder) -> str:
    """The folder of the tag that counts, with a slash behind it; empty where it is this one."""
    if any(_MODEL.fullmatch(key) or _OPTIMIZER.fullmatch(key) for key in folder.files):
        return ""
    tags = {key.partition("/")[0] for key in folder.files if "/" in key}
    if LATEST in folder.files:
        text = folder.read(LATEST, 0, min(folder.size(LATEST), 4096)).decode("utf-8", "replace")
        if text.strip() not in tags:
            raise FormatError(
                "the folder that it names is missing",
                where=folder.where(LATEST),
                value=text.strip()[:200],
                hint="copy it along, or name the folder of another tag",
            )
        return f"{text.strip()}/"
    numbered = {int(match[2]): tag for tag in tags if (match := _TAG.fullmatch(tag))}
    if not numbered:
        raise FormatError(
            "no file of a model's or an optimizer's states is in the folder",
            where=str(folder.store.location),
            hint="name the folder that has the files zero_pp_rank_0_mp_rank_00_optim_states.pt",
        )
    return f"{numbered[max(numbered)]}/"


def _ranks(folder: Folder, tag: str) -> dict[int, _Rank]:
    """The files of the checkpoint, none of which is missing."""
    found: dict[int, _Rank] = {}
    for key in folder.files:
        name = key.removeprefix(tag) if key.startswith(tag) else "/"
        if _EXPERTS.fullmatch(name):
            raise FormatError(
                "experts, which ranks have shared out among them, are not read here",
                where=folder.where(key),
                hint="convert the checkpoint with DeepSpeed's ds_to_universal.py first",
            )
        for pattern in (_MODEL, _OPTIMIZER):
            if match := pattern.fullmatch(name):
                rank = found.setdefault(int(match["mp"]), _Rank())
                files = rank.models if pattern is _MODEL else rank.optimizers
                dp = int(match["dp"] or 0)
                if dp in files:
                    raise FormatError(
                        "two files of one rank",
                        where=folder.where(tag),
                        value=[files[dp], key],
                        hint="they are of different saves: remove the files of one of them",
                    )
                files[dp] = key
    for number, rank in found.items():
        if not rank.models:
            raise FormatError(
                "the file of the model is missing: it says which weights are where",
                where=folder.where(f"{tag}mp_rank_{number:02d}_model_states.pt"),
                hint="it was not copied along; copy the folder again",
            )
        _check_all(folder, rank.models, len(rank.models))
        _check_all(folder, rank.optimizers, len(rank.optimizers))
    _check_all(folder, {number: rank.models[0] for number, rank in found.items()}, len(found), "mp")
    return found


def _check_all(folder: Folder, there: Mapping[int, str], count: int, what: str = "pp") -> None:
    """Refuse files of ranks of which one is missing, or that are of more ranks than they say."""
    world = max([count, *(rank + 1 for rank in there)])
    some = next(iter(there.values()), "")
    # A name may say any number of ranks.
    missing = islice((rank for rank in range(world) if rank not in there), 8)
    number = re.compile(rf"(?<={what}_rank_)\d+")
    width = len((number.search(some) or [""])[0])
    named = [number.sub(f"{rank:0{width}}", some) for rank in missing]
    if named:
        raise FormatError(
            f"the files of {world} ranks belong together, {world - len(there)} are missing",
            where=str(folder.store.location),
            value=named,
            hint="copy the files of all ranks into one folder",
        )
    if len(there) > count:
        raise FormatError(
            f"the checkpoint is of {count} ranks, and there are files of {len(there)}",
            where=folder.where(there[count]),
            hint="they are of different saves: remove those that are too many",
        )


def _part(folder: Folder, rank: _Rank) -> _Part:
    models = [_tree(folder, rank.models[dp]) for dp in range(len(rank.models))]
    tree, where = models[0], folder.where(rank.models[0])
    config = tree.get("ds_config")
    config = config if isinstance(config, dict) else {}
    said = config.get("zero_optimization")
    said = said if isinstance(said, dict) else {}
    world = document.integer(tree.get("dp_world_size", 1), f"{where}: dp_world_size", least=1)
    optimizers: dict[int, tuple[str, Any]] = {
        dp: (folder.where(key), _tree(folder, key).get("optimizer_state_dict"))
        for dp, key in rank.optimizers.items()
    }
    shapes = tree.get("param_shapes")
    if shapes is not None and not optimizers:
        raise FormatError(
            "the files of the optimizer are missing, in which the weights are",
            where=where,
            hint="copy them along; the copies of the weights that the model's file may have are "
            "what you get where you name that file itself",
        )
    stage = 0
    if optimizers:
        own = optimizers[0][1].get("zero_stage") if isinstance(optimizers[0][1], dict) else None
        own = own.args[0] if isinstance(own, Placeholder) and own.args else own
        # The optimizer for bfloat16 does not say it: it is of stage 1.
        stage = document.integer(1 if own is None else own, f"{optimizers[0][0]}: stage", most=3)
    if optimizers:
        _check_all(folder, rank.optimizers, world)
    _check_all(folder, rank.models, world if stage == 3 else 1)
    for other, key in zip(models[1:], range(1, len(models)), strict=True):
        for name in ("global_steps", "dp_world_size", "param_shapes", "frozen_param_shapes"):
            if other.get(name) != tree.get(name):
                raise FormatError(
                    f"{name} is not that of rank 0",
                    where=folder.where(rank.models[key]),
                    hint="the files are of different saves; copy the folder of one of them again",
                )
    zero = None
    if optimizers:
        files = [optimizers[dp] for dp in range(world)]
        reordered = world > 1 and bool(said.get("round_robin_gradients"))
        zero = read_zero(shapes_of(shapes, where), files, stage, reordered=reordered)
        _check_step(folder, zero, tree, where)
    part = _Part(tree, {}, zero, world, stage, {}, [])
    _module(part, models, where)
    return part


def _tree(folder: Folder, key: str) -> dict[str, Any]:
    found = read_file(folder, key).tree
    if not isinstance(found, dict):
        raise FormatError("not a file of DeepSpeed", where=folder.where(key))
    return found


def _check_step(folder: Folder, zero: Zero, tree: Mapping[str, Any], where: str) -> None:
    """Refuse a model's file that is older than those of the optimizer."""
    steps = tree.get("global_steps")
    step: Any = next((states.get("step") for states in zero.states.values()), None)
    if isinstance(step, StateTensor) and step.extents and step.dtype.name in ("float32", "int64"):
        extent = step.extents[0]
        data = folder.read(extent.file, extent.offset, step.dtype.itemsize)
        step = np.frombuffer(data, step.dtype.name)[0].item()
    if type(steps) is int and type(step) in (int, float) and step > steps:
        raise FormatError(
            f"the model is of step {steps}, the optimizer has made {step:g}",
            where=where,
            hint="the files are of different saves; copy the folder of one of them again",
        )


def _module(part: _Part, models: Sequence[Mapping[str, Any]], where: str) -> None:
    """What of the model is where: the weights of the optimizer, in place of their copies, and what
    only the model's file has.
    """
    module = part.tree.get("module")
    if not isinstance(module, dict):
        raise FormatError("the file has no model", where=where)
    weights = dict(part.zero.weights) if part.zero else {}
    tied = part.tree.get("shared_params")
    tied = tied if isinstance(tied, dict) else {}
    frozen = part.tree.get("frozen_param_shapes") if part.stage == 3 else None
    frozen = shapes_of([frozen or {}], where)[0]
    buffers = part.tree.get("buffer_names")
    buffers = set(buffers) if isinstance(buffers, list) else set()
    for name, shape in frozen.items():
        fragments = [
            each["frozen_param_fragments"].get(name)
            if isinstance(each.get("frozen_param_fragments"), dict)
            else None
            for each in models
        ]
        parts = [each for each in fragments if isinstance(each, StateTensor)]
        if len(parts) < len(models) or name in weights:
            raise FormatError(f"not a part of {name} for each rank", where=where)
        weights[name] = pieces_of(name, shape, parts, where)
    for name in part.zero.weights if part.zero else ():
        copy = module.get(name)
        if not isinstance(copy, StateTensor) or (
            part.stage < 3 and copy.shape != weights[name].shape
        ):
            raise FormatError(
                f"the model has no {name} of {weights[name].shape}, as param_shapes say",
                where=where,
                value=getattr(copy, "shape", None),
                hint="the file was changed; copy the folder again",
            )
        if part.stage < 3:
            part.copies[name] = copy.dtype.name
    for name, value in module.items():
        of = tied.get(name)
        if name in weights:
            part.module[name] = weights[name]
        elif of in weights:
            part.module[name] = weights[of]
        elif not isinstance(value, StateTensor):
            part.module[name] = value
        elif part.stage == 3 and name not in buffers and value.shape == (0,):
            raise FormatError(f"no file has the values of {name}", where=where)
        else:
            part.module[name] = value
            others = [m["module"].get(name) for m in models[1:] if isinstance(m["module"], dict)]
            if any(getattr(other, "content", None) != value.content for other in others):
                part.differing.append(name)


def _step(folder: Folder, tag: str, part: _Part, files: Iterable[str]) -> ForeignStep:
    where = folder.where(tag)
    tree: dict[str, Any] = {"model": part.module}
    rest = {k: v for k, v in part.tree.items() if k not in _LAYOUT and v is not None}
    if part.zero is not None:
        tree["optimizer"] = {"state": part.zero.states, "param_groups": part.zero.groups}
        rest |= {"loss_scaler": dict(part.zero.scaler)} if part.zero.scaler else {}
    elif isinstance(own := part.tree.get("optimizer"), dict):
        inner = own.get("optimizer_state_dict")
        tree["optimizer"] = inner if isinstance(inner, dict) else own
        rest |= {k: v for k, v in own.items() if isinstance(inner, dict) and v is not inner}
    # What is saved along may have any name.
    tree |= {f"client.{key}" if key in tree else key: value for key, value in rest.items()}
    buffers = part.tree.get("buffer_names")
    found = states_of(tree, where, buffers if isinstance(buffers, list) else ())
    found.left_out |= folder.unread(files)
    details = dict(found.details)
    if part.zero:
        details["left_out"] = {**part.zero.left_out, **found.left_out}
    details = {key: value for key, value in details.items() if value}
    if part.copies:
        kinds = ", ".join(sorted(set(part.copies.values())))
        details["copies"] = f"{len(part.copies)} in {kinds}, left out for the master weights"
    if part.differing:
        details["of_rank_0"] = sorted(part.differing)
    strategy, arrays = _strategy(part, found.arrays)
    return ForeignStep(
        format="DeepSpeed",
        files={key: folder.size(key) for key in files},
        arrays=arrays,
        aliases=found.aliases,
        objects=found.objects,
        strategy=strategy,
        step=part.tree.get("global_steps") or 0,
        theirs={name: name.partition("/")[2].replace("/", ".") for name in found.theirs},
        details=details,
        sizes=config_of(folder),
    )


def _strategy(
    part: _Part, arrays: Sequence[ForeignArray]
) -> tuple[Strategy | None, list[ForeignArray]]:
    """What wrote the arrays, in our words, and how that cuts them. DeepSpeed's own cuts go by
    elements, which no placement can say: what is stored is where the extents are.
    """
    kind = f"zero{part.stage}" if part.stage else "ddp"
    axes = (Axis(kind, kind, part.world),) if part.world > 1 else ()
    whole: tuple[Placement, ...] = tuple(Replicate() for _ in axes)
    cut = tuple(Shard(0) for _ in axes) if part.stage > 1 else whole
    return Strategy(Mesh(axes)), [
        replace(array, placements=cut if array.shape and array.role != "buffer" else whole)
        for array in arrays
    ]
