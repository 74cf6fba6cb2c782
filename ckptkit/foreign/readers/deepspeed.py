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

from ckptkit.errors import FormatError
from ckptkit.foreign.extents import ForeignArray, ForeignStep
from ckptkit.foreign.folder import Folder
from ckptkit.foreign.pickles.interpreter import Placeholder
from ckptkit.foreign.readers.model_parallel import (
    ParallelModel,
    degrees,
    joined,
    named,
    same_on_all,
)
from ckptkit.foreign.readers.safetensors import config_of
from ckptkit.foreign.readers.samples import check_copies, check_step
from ckptkit.foreign.readers.universal import FOLDER, read_universal
from ckptkit.foreign.readers.zero import (
    MIXED,
    Zero,
    groups_of,
    pieces_of,
    read_zero,
    shapes_by_fragments,
    shapes_of,
)
from ckptkit.foreign.states import StateTensor, states_of
from ckptkit.foreign.torch_file import read_file
from ckptkit.model import (
    Axis,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    document,
)

_LATEST = ("latest", "latest_universal")
_TAG = re.compile(r"(?:.*[^0-9])?global_step(\d{1,18})(_universal)?")
_MODEL = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_)?mp_rank_(?P<mp>\d{1,9})_model_states\.pt"
)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d{1,9})_mp_rank_(?P<mp>\d{1,9})_optim_states\.pt"
)
_LAYER = re.compile(r"layer_(?P<layer>\d{1,9})(?:-model_(?P<tp>\d{1,9}))?-model_states\.pt")
_EXPERTS = re.compile(r"(?:layer_\d+_)?expert_\d+_.*|expp_rank_\d+_.*")
# Of a model's file: how its tensors lie, which is told otherwise here.
_LAYOUT = (
    *("module", "optimizer", "buffer_names", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "universal_checkpoint_info"),
)

_OTHERWISE = "load it with DeepSpeed in the job that wrote it, and save it with `ckptkit.live.save`"


@dataclass(slots=True)
class _Files:
    """The files of one rank of model parallelism, by rank of data parallelism."""

    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Part:
    """What the files of one rank of model parallelism say: a stage of a pipeline, or some of each
    tensor; mostly all there is.
    """

    where: str
    models: list[dict[str, Any]]
    """Of one file; of stage 3 of those of all ranks of data parallelism."""
    optimizers: list[tuple[str, Any]]
    world: int
    """How many ranks of data parallelism there are."""
    stage: int
    reordered: bool

    @property
    def tree(self) -> dict[str, Any]:
        return self.models[0]

    def names(self, key: str) -> list[str]:
        said = self.tree.get(key)
        return [name for name in said if type(name) is str] if isinstance(said, list) else []


def read_deepspeed(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder; of one of tags the one that `latest` names, or the newest."""
    # Which files there are, and what those of each rank of model parallelism say.
    tag = _tag_folder(folder)
    where = folder.where(tag).rstrip("/")
    files_by_rank, layers = _files_by_rank(folder, tag)
    universal = [key for key in folder.files if key.startswith(f"{tag}{FOLDER}")]
    is_universal = bool(universal)
    parts = [
        _read_part(folder, files_by_rank[rank], is_universal=is_universal)
        for rank in range(len(files_by_rank))
    ]
    for part in parts[1:]:
        for key in ("global_steps", "dp_world_size"):
            if len({(repr(each.tree.get(key)), each.stage) for each in (part, parts[0])}) > 1:
                raise FormatError(f"{key} is not that of rank 0", where=part.where, hint=MIXED)

    # The stages of a pipeline make a model, of which ranks of tensor parallelism have columns.
    stages, columns = degrees(parts[0].tree, len(parts), layers, where)
    whole = None
    if is_universal:
        whole = read_universal(folder, tag, [_shapes(part, {}) for part in parts])
    zeros = [whole] if whole else []
    models: list[ParallelModel] = []
    for column in range(columns):
        of_stages = [parts[stage * columns + column] for stage in range(stages)]
        trees = {n: _read_tree(folder, key) for n, key in layers.get(column, {}).items()}
        models.append(_read_stages(folder, of_stages, trees, whole, zeros))
    steps = [next((it.get("step") for it in zero.states.values()), None) for zero in zeros]
    if steps:
        same_on_all("step", steps, where)
    model = models[0]
    if columns > 1:
        info = parts[0].tree.get("universal_checkpoint_info")
        uncut = whole.weights if whole else ()
        model = joined(models, info, uncut, [part.where for part in parts[:columns]], where)

    # All of it as a step, and which files were read.
    read = [k for r in files_by_rank.values() for k in (*r.models.values(), *r.optimizers.values())]
    read += [key for by_layer in layers.values() for key in by_layer.values()]
    # Universal Checkpoints are for any strategy: nothing is cut.
    sizes = {} if is_universal else {"pp": stages, "tp": columns}
    return _as_step(folder, tag, parts, model, zeros, [*read, *universal], sizes)


def _tag_folder(folder: Folder) -> str:
    """The folder of the tag that counts, with a slash behind it; empty where it is this one."""
    if any(_MODEL.fullmatch(key) or _OPTIMIZER.fullmatch(key) for key in folder.files):
        return ""
    tags = {key.partition("/")[0] for key in folder.files if "/" in key}
    for latest in _LATEST:
        if latest not in folder.files:
            continue
        text = folder.read(latest, 0, min(folder.size(latest), 4096)).decode("utf-8", "replace")
        if text.strip() not in tags:
            raise FormatError(
                "the folder that it names is missing",
                where=folder.where(latest),
                value=text.strip()[:200],
                hint="copy it along, or name the folder of another tag",
            )
        return f"{text.strip()}/"
    numbered = {
        (int(match[1]), not match[2]): tag for tag in tags if (match := _TAG.fullmatch(tag))
    }
    if not numbered:
        raise FormatError(
            "no file of a model's or an optimizer's states is in the folder",
            where=str(folder.store.location),
            hint="name the folder that has the files zero_pp_rank_0_mp_rank_00_optim_states.pt",
        )
    return f"{numbered[max(numbered)]}/"


def _files_by_rank(folder: Folder, tag: str) -> tuple[dict[int, _Files], dict[int, dict[int, str]]]:
    """The files of the checkpoint by rank of model parallelism, and those of the layers of a
    pipeline by rank of tensor parallelism; none of them is missing.
    """
    found: dict[int, _Files] = {}
    layers: dict[int, dict[int, str]] = {}
    for key in folder.files:
        name = key.removeprefix(tag) if key.startswith(tag) else "/"
        if _EXPERTS.fullmatch(name):
            raise FormatError(
                "experts (MoE), which ranks have shared out among them, are not read here",
                where=folder.where(key),
                hint=_OTHERWISE,
            )
        if match := _LAYER.fullmatch(name):
            layers.setdefault(int(match["tp"] or 0), {})[int(match["layer"])] = key
        for pattern in (_MODEL, _OPTIMIZER):
            if match := pattern.fullmatch(name):
                rank = found.setdefault(int(match["mp"]), _Files())
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
    if not found:
        raise FormatError("no file of a model is in the folder", where=folder.where(tag))
    _check_all(folder, {number: rank.models[0] for number, rank in found.items()}, len(found), "mp")
    for others in layers.values():
        if others.keys() != next(iter(layers.values())).keys():
            raise FormatError(
                "not all ranks have files of the same layers", where=folder.where(tag), hint=MIXED
            )
    return found, layers


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


def _read_part(folder: Folder, rank: _Files, *, is_universal: bool) -> _Part:
    models = [_read_tree(folder, rank.models[dp]) for dp in range(len(rank.models))]
    tree, where = models[0], folder.where(rank.models[0])
    config = tree.get("ds_config")
    said = config.get("zero_optimization") if isinstance(config, dict) else {}
    said = said if isinstance(said, dict) else {}
    groups = said.get("mics_shard_size")
    if type(groups) is int and groups > 0:
        raise FormatError(
            "shards in groups of ranks (MiCS) are not read here",
            where=where,
            value=f"mics_shard_size {groups}",
            hint=_OTHERWISE,
        )
    world = document.integer(tree.get("dp_world_size", 1), f"{where}: dp_world_size", least=1)
    optimizers = {
        dp: (folder.where(key), _read_tree(folder, key).get("optimizer_state_dict"))
        for dp, key in rank.optimizers.items()
    }
    own = said.get("stage", 0) if is_universal else 0
    if optimizers:
        first = optimizers[0][1]
        own = first.get("zero_stage") if isinstance(first, dict) else None
        own = own.args[0] if isinstance(own, Placeholder) and own.args else own
        # The optimizer for bfloat16 does not say it: it is of stage 1.
        own = 1 if own is None else own
        _check_all(folder, rank.optimizers, world)
    elif tree.get("param_shapes") is not None and not is_universal:
        raise FormatError(
            "the files of the optimizer are missing, in which the weights are",
            where=where,
            hint="copy them along; the copies of the weights that the model's file may have are "
            "what you get where you name that file itself",
        )
    stage = document.integer(own, f"{where}: stage", most=3)
    _check_all(folder, rank.models, world if stage == 3 else 1)
    for dp, other in enumerate(models):
        for name in ("global_steps", "dp_world_size", "param_shapes", "frozen_param_shapes"):
            # As text: the order of shapes counts, and an array is equal to nothing.
            if repr(other.get(name)) != repr(tree.get(name)):
                raise FormatError(
                    f"{name} is not that of rank 0",
                    where=folder.where(rank.models[dp]),
                    hint=MIXED,
                )
        if dp and other.get("shared_params") and not tree.get("shared_params"):
            raise FormatError(
                "it says which parameters are tied, as only the file of rank 0 does",
                where=folder.where(rank.models[dp]),
                hint="the files have each other's names: copy the folder again",
            )
    reordered = world > 1 and bool(said.get("round_robin_gradients"))
    found = [optimizers[dp] for dp in range(len(optimizers))]
    return _Part(where, models, found, world, stage, reordered)


def _read_tree(folder: Folder, key: str) -> dict[str, Any]:
    found = read_file(folder, key).tree
    if not isinstance(found, dict):
        raise FormatError("not a file of DeepSpeed", where=folder.where(key))
    return found


def _shapes(part: _Part, module: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """The names and shapes of the parameters of the optimizer, group by group."""
    said = part.tree.get("param_shapes")
    if said is None and part.optimizers and not part.reordered:
        return shapes_by_fragments(part.optimizers, module)
    return shapes_of([] if said is None and not part.optimizers else said, part.where)


def _read_stages(
    folder: Folder,
    mine: Sequence[_Part],
    layers: Mapping[int, Mapping[str, Any]],
    whole: Zero | None,
    zeros: list[Zero],
) -> ParallelModel:
    """What the stages of a pipeline, or a single part, have: the weights of the optimizer, in place
    of their copies, and what only the model's files have. What was read is added to `zeros`.
    """
    first, where = mine[0], mine[0].where
    module: Any = first.tree.get("module")
    known = {name for part in mine for row in _shapes(part, {}) for name in row}
    model = ParallelModel(buffers={name for part in mine for name in part.names("buffer_names")})
    if layers:
        module = named(layers, known | model.buffers, where)
    elif module is None and whole:  # of a pipeline, whose layers' files are not copied along
        module = {name: whole.weights[name] for name in known}
    if not isinstance(module, dict):
        raise FormatError("the file has no model", where=where)
    weights: dict[str, StateTensor] = {}
    several: set[str] = set()
    for stage, part in enumerate(mine):
        shapes, zero = _shapes(part, module), whole
        if part.optimizers and not zero:
            zero = read_zero(folder, shapes, part.optimizers, part.stage, reordered=part.reordered)
            zeros.append(zero)
            check_step(folder, zero.states, part.tree.get("global_steps"), part.where)
        told, states = (zero.weights, zero.states) if zero else ({}, {})
        told = {name: told[name] for row in shapes for name in row if name in told}
        for name, weight in told.items():
            copy = module.get(name)
            if not isinstance(copy, StateTensor) or (
                part.stage < 3 and not whole and copy.shape != weight.shape
            ):
                raise FormatError(
                    f"the model has no {name} of {weight.shape}, as param_shapes say",
                    where=part.where,
                    value=getattr(copy, "shape", None),
                    hint="the file was changed; copy the folder again",
                )
            if name in weights:  # stages of a pipeline share it
                several.add(name)
                continue
            weights[name] = weight
            model.stages[name] = stage
            model.states[name] = states.get(name, {})
            if part.stage < 3:
                model.copies[name] = copy.dtype.name
        copied = {
            n: w for n, w in told.items() if module[n] is not w and module[n].shape == w.shape
        }
        check_copies(folder, copied, module)
    model.stages = {n: stage for n, stage in model.stages.items() if n not in several}
    _add_the_rest(model, module, weights | _frozen(first), first)
    return model


def _add_the_rest(
    model: ParallelModel,
    module: Mapping[str, Any],
    weights: Mapping[str, StateTensor],
    part: _Part,
) -> None:
    """Add the tensors of the model, its weights in place of their copies."""
    tied = part.tree.get("shared_params")
    tied = tied if isinstance(tied, dict) else {}
    # Only the very first rank says which parameters are tied; their copies are one tensor.
    copies = {getattr(module.get(n), "identity", None): n for n in model.copies}
    for name, value in module.items():
        of = str(tied.get(name) or copies.get(getattr(value, "identity", None)))
        if name in weights or of in weights:
            shapes = {getattr(each, "shape", None) for each in (value, module.get(of, value))}
            if name not in weights and len(shapes) > 1:  # in stage 3 the copies are empty
                raise FormatError(f"{name} is not of the shape of {of}", where=part.where)
            model.tensors[name] = weights[name if name in weights else of]
            continue
        if not isinstance(value, StateTensor):
            raise FormatError(f"{name} is no tensor", where=part.where)
        if part.stage == 3 and name not in model.buffers and value.shape == (0,):
            raise FormatError(f"no file has the values of {name}", where=part.where)
        model.tensors[name] = value
        others = [each.get("module") for each in part.models[1:]]
        same = [other[name] for other in others if isinstance(other, dict) and name in other]
        if any(getattr(other, "content", None) != value.content for other in same):
            model.of_rank_0.add(name)


def _frozen(part: _Part) -> dict[str, StateTensor]:
    """The parameters that the optimizer has not, where ranks have cut them."""
    said = part.tree.get("frozen_param_shapes") if part.stage == 3 else None
    found: dict[str, StateTensor] = {}
    for name, shape in shapes_of([said or {}], part.where)[0].items():
        by_rank = [each.get("frozen_param_fragments") for each in part.models]
        pieces = [each.get(name) if isinstance(each, dict) else None for each in by_rank]
        parts = [each for each in pieces if isinstance(each, StateTensor)]
        if len(parts) < len(pieces):
            raise FormatError(f"not a part of {name} for each rank", where=part.where)
        found[name] = pieces_of(name, shape, parts, part.where)
    return found


def _as_step(
    folder: Folder,
    tag: str,
    parts: Sequence[_Part],
    model: ParallelModel,
    zeros: Sequence[Zero],
    files: Iterable[str],
    sizes: Mapping[str, int],
) -> ForeignStep:
    first = parts[0]
    tree: dict[str, Any] = {"model": model.tensors}
    rest = {k: v for k, v in first.tree.items() if k not in _LAYOUT and v is not None}
    left_out: dict[str, str] = {}
    if zeros:
        states = {name: state for name, state in model.states.items() if state}
        tree["optimizer"] = {"state": states, "param_groups": groups_of(zeros)}
        for zero in zeros:
            left_out |= zero.left_out
            rest |= {"loss_scaler": dict(zero.scaler)} if zero.scaler else {}
    elif owns := [own for part in parts if isinstance(own := part.tree.get("optimizer"), dict)]:
        inner = [own.get("optimizer_state_dict", own) for own in owns]
        tree["optimizer"] = inner[0] if len(inner) == 1 else inner
        for own in owns if inner[0] is not owns[0] else ():
            rest |= {k: v for k, v in own.items() if k != "optimizer_state_dict"}
    # What is saved along may have any name.
    tree |= {f"client.{key}" if key in tree else key: value for key, value in rest.items()}
    found = states_of(tree, folder.where(tag).rstrip("/"), model.buffers)
    if not sizes and first.tree.get("module") is None:
        left_out["layer_…-model_states.pt"] = "buffers and frozen parameters, in no file here"
    found.left_out |= left_out | folder.unread(files)
    details = dict(found.details)
    if model.copies:
        kinds = ", ".join(sorted(set(model.copies.values())))
        details["copies"] = f"{len(model.copies)} in {kinds}, left out for the master weights"
    if first.stage == 3 and first.world > 1 and zeros and sizes:
        details["not_checked"] = "of which rank a file is, but by its name"
    if model.of_rank_0:
        details["of_rank_0"] = sorted(model.of_rank_0)
    arrays: Sequence[ForeignArray] = found.arrays
    strategy = None
    if sizes:
        strategy, arrays = _strategy_of(first, model, arrays, sizes)
    return ForeignStep(
        format="DeepSpeed",
        files={key: folder.size(key) for key in files},
        arrays=arrays,
        aliases=found.aliases,
        objects=found.objects,
        strategy=strategy,
        step=document.integer(first.tree.get("global_steps", 0), f"{first.where}: global_steps"),
        theirs={name: name.partition("/")[2].replace("/", ".") for name in found.theirs},
        details=details,
        sizes=config_of(folder),
    )


def _strategy_of(
    part: _Part, model: ParallelModel, arrays: Sequence[ForeignArray], sizes: Mapping[str, int]
) -> tuple[Strategy, list[ForeignArray]]:
    """What wrote the arrays, in our words, and how that cuts them. DeepSpeed's own cuts go by
    elements, which no placement can say: what is stored is where the extents are.
    """
    kind = f"zero{part.stage}" if part.stage else "ddp"
    wanted = (("pp", sizes["pp"]), (kind, part.world), ("tp", sizes["tp"]))
    axes = tuple(Axis(kind, kind, size) for kind, size in wanted if size > 1)
    found = []
    for array in arrays:
        name = (array.of or array.name).partition("/")[2]
        tp = model.cuts.get(name, Replicate()) if array.shape else Replicate()
        data: Placement = Replicate()
        if part.stage > 1 and array.shape and array.role in ("param", "optimizer"):
            data = Strided(0) if isinstance(tp, Shard) and tp.dim == 0 else Shard(0)
        stage = model.stages.get(name)
        pp = Replicate() if stage is None else Stage(stage)
        by_kind = {"pp": pp, kind: data, "tp": tp}
        found.append(replace(array, placements=tuple(by_kind[axis.kind] for axis in axes)))
    return Strategy(Mesh(axes)), found
