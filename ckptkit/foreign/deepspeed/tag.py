"""Checkpoints of DeepSpeed: a folder for each tag, with the files of the model and those of its
optimizer, one for each rank.

The optimizer's files have the weights in full precision. Those of the model have copies, of 16 bits
mostly, which are left out; what only they have are buffers and frozen parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ckptkit.errors import FormatError
from ckptkit.foreign.deepspeed.experts import SharedExperts, by_order, read_experts, read_optimizers
from ckptkit.foreign.deepspeed.files import (
    MIXED,
    OTHERWISE,
    ModelPart,
    TagFiles,
    as_dict,
    degrees,
    find_files,
    read_part,
    read_tree,
    same_on_all,
)
from ckptkit.foreign.deepspeed.model_parallel import (
    ParallelModel,
    joined,
    named,
    read_universal,
)
from ckptkit.foreign.deepspeed.zero import (
    Zero,
    frozen_of,
    groups_of,
    read_zero,
    shapes_by_fragments,
    shapes_of,
)
from ckptkit.foreign.extents import ForeignArray, ForeignStep, Stretches, samples
from ckptkit.foreign.folder import Folder, config_of
from ckptkit.foreign.states import StateTensor, states_of
from ckptkit.format.names import BY_ORDER
from ckptkit.model import (
    Axis,
    Box,
    Mesh,
    Placement,
    Replicate,
    Shard,
    Stage,
    Strategy,
    Strided,
    document,
)

# So many files are named in a message.
_NAMED = 8
# Of a model's file: how its tensors lie, which is told otherwise here.
_LAYOUT = (
    *("module", "optimizer", "buffer_names", "param_shapes", "shared_params"),
    *("frozen_param_shapes", "frozen_param_fragments", "universal_checkpoint_info"),
)


def read_deepspeed(folder: Folder) -> ForeignStep:
    """The checkpoint in a folder; of one of tags the one that `latest` names, or the newest."""
    # Which files there are, and what those of each rank of model parallelism say.
    files = find_files(folder)
    where = folder.where(files.tag).rstrip("/")
    is_universal = bool(files.universal)
    ranks = range(len(files.ranks))
    parts = [read_part(folder, files.ranks[rank], is_universal=is_universal) for rank in ranks]
    for part in parts[1:]:
        for key in ("global_steps", "dp_world_size"):
            if len({(repr(each.tree.get(key)), each.stage) for each in (part, parts[0])}) > 1:
                raise FormatError(f"{key} is not that of rank 0", where=part.where, hint=MIXED)

    # The stages of a pipeline make a model, of which ranks of tensor parallelism have columns.
    stages, columns = degrees(parts[0].tree, len(parts), files.layers, where)
    has_experts = any(part.tree.get("num_experts") or part.files.experts for part in parts)
    if has_experts and (columns > 1 or (is_universal and stages > 1)):
        raise FormatError(
            "experts (MoE) beside tensor parallelism are not read here, nor the Universal "
            "Checkpoint of a pipeline with experts",
            where=where,
            hint=OTHERWISE,
        )
    experts = read_experts(folder, parts, is_universal=is_universal)
    whole = None
    if files.universal:
        shapes = [_shapes(part, {}, experts) for part in parts]
        whole = read_universal(folder, files, shapes)
    zeros = [whole] if whole else []
    models: list[ParallelModel] = []
    for column in range(columns):
        of_stages = [parts[stage * columns + column] for stage in range(stages)]
        trees = {n: read_tree(folder, key) for n, key in files.layers.get(column, {}).items()}
        models.append(_read_stages(folder, of_stages, trees, experts, whole, zeros))
    steps = [next((it.get("step") for it in zero.states.values()), None) for zero in zeros]
    if steps:
        same_on_all("step", steps, where)
    model = models[0]
    if columns > 1:
        info = parts[0].tree.get("universal_checkpoint_info")
        uncut = whole.weights if whole else ()
        model = joined(models, info, uncut, [part.where for part in parts[:columns]], where)

    # Universal Checkpoints are for any strategy: nothing is cut.
    sizes = {} if whole else {"pp": stages, "tp": columns}
    return _as_step(folder, files, parts, model, zeros, experts, sizes)


def _shapes(
    part: ModelPart, module: Mapping[str, Any], experts: SharedExperts
) -> list[dict[str, tuple[int, ...]]]:
    """The names and shapes of the parameters of the optimizer, group by group."""
    said = part.tree.get("param_shapes")
    if said is None and part.optimizers and not part.reordered:
        return shapes_by_fragments(part, module, experts)
    return shapes_of([] if said is None and not part.optimizers else said, part.where)


def _read_stages(
    folder: Folder,
    mine: Sequence[ModelPart],
    layers: Mapping[int, Mapping[str, Any]],
    experts: SharedExperts,
    whole: Zero | None,
    zeros: list[Zero],
) -> ParallelModel:
    """What the stages of a pipeline, or a single part, have: the weights of the optimizer, in place
    of their copies, and what only the model's files have. What was read is added to `zeros`.
    """
    first, where = mine[0], mine[0].where
    module: dict[str, Any] = {}
    rows = [row for part in mine for row in _shapes(part, {}, experts)]
    known = {name: math.prod(shape) for row in rows for name, shape in row.items()}
    model = ParallelModel(buffers={name for part in mine for name in part.buffers})
    if layers:
        module = named(layers, dict.fromkeys(model.buffers) | known, where)
    elif whole and first.tree.get("module") is None:
        # Of a pipeline, whose layers' files are not copied along.
        module = {name: whole.weights[name] for name in known}
    for part in mine:  # with experts a stage has no files of layers
        module |= {name: value for name, value in part.module.items() if name not in module}
    if not module:
        raise FormatError("the file has no model", where=where)
    weights: dict[str, StateTensor] = {}
    several: set[str] = set()
    for stage, part in enumerate(mine):
        shapes, zero = _shapes(part, module, experts), whole or Zero()
        if part.optimizers and not whole:
            zero = read_zero(folder, shapes, part, experts)
            zeros.append(zero)
            _check_step(folder, zero.states, part.tree.get("global_steps"), part.where)
        told = zero.weights
        if whole:
            told = {name: told[name] for row in shapes for name in row if name in told}
        for name, weight in told.items():
            if part.stage == 3 and name in experts.counts:  # there are no copies of these
                module.setdefault(name, weight)
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
            model.states[name] = zero.states.get(name, {})
            if part.stage < 3:
                model.copies[name] = copy.dtype.name
        copied = {
            n: w for n, w in told.items() if module[n] is not w and module[n].shape == w.shape
        }
        _check_copies(folder, copied, module)
    model.stages = {n: stage for n, stage in model.stages.items() if n not in several}
    model.buffers = {each for name in model.buffers for each in experts.alike(name)}
    _add_the_rest(model, module, weights | frozen_of(first), experts, first)
    return model


def _add_the_rest(
    model: ParallelModel,
    module: Mapping[str, Any],
    weights: Mapping[str, StateTensor],
    experts: SharedExperts,
    part: ModelPart,
) -> None:
    """Add the tensors of the model, its weights in place of their copies."""
    routers = experts.routers({n: t for n, t in module.items() if isinstance(t, StateTensor)})
    module = {**module, **{name: module[of] for name, of in routers.items()}}
    tied = dict(routers)
    for name, of in as_dict(part.tree.get("shared_params")).items():
        tied.update(zip(experts.alike(str(name)), experts.alike(str(of)), strict=False))
    others = [as_dict(each.get("module")) for each in part.models[1:]]
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
        same = [other[name] for other in others if name in other]
        if any(getattr(other, "content", None) != value.content for other in same):
            model.of_rank_0.add(name)


def _as_step(
    folder: Folder,
    files: TagFiles,
    parts: Sequence[ModelPart],
    model: ParallelModel,
    zeros: Sequence[Zero],
    experts: SharedExperts,
    sizes: Mapping[str, int],
) -> ForeignStep:
    first = parts[0]
    tree: dict[str, Any] = {"model": model.tensors}
    rest = {k: v for k, v in first.tree.items() if k not in _LAYOUT and v is not None}
    left_out: dict[str, str] = {}
    noted: dict[str, Any] = {}
    by_part = [read_optimizers(folder, rank, part) for rank, part in enumerate(parts)]
    of_experts = [own for owns in by_part for own in owns]
    if zeros:
        states = {name: state for name, state in model.states.items() if state}
        groups = groups_of([zero.groups for zero in zeros])
        tree["optimizer"] = {"state": states, "param_groups": groups}
        for zero in zeros:
            left_out |= zero.left_out
            rest |= {"loss_scaler": dict(zero.scaler)} if zero.scaler else {}
    elif owns := of_experts or [
        own for part in parts if isinstance(own := part.tree.get("optimizer"), dict)
    ]:
        inner = [own.get("optimizer_state_dict", own) for own in owns]
        tree["optimizer"] = inner[0] if len(inner) == 1 else inner
        if of_experts:
            one = _optimizer_of_experts(model, parts, by_part, experts)
            noted = {} if one is None else {"optimizer": BY_ORDER}
            tree["optimizer"] = inner if one is None else one
            experts.degrees |= {len(each) for each in by_part}
        more = [{k: v for k, v in own.items() if k != "optimizer_state_dict"} for own in owns]
        for number, own in enumerate(more if inner[0] is not owns[0] else ()):
            rest |= {f"rank.{number}": own} if of_experts else own
    # What is saved along may have any name.
    tree |= {f"client.{key}" if key in tree else key: value for key, value in rest.items()}
    found = states_of(tree, folder.where(files.tag).rstrip("/"), model.buffers)
    if not sizes and first.tree.get("module") is None:
        left_out["layer_…-model_states.pt"] = "buffers and frozen parameters, in no file here"
    found.noted |= noted
    found.left_out |= left_out
    details: dict[str, Any] = {}
    if model.copies:
        kinds = ", ".join(sorted(set(model.copies.values())))
        details["copies"] = f"{len(model.copies)} in {kinds}, left out for the master weights"
    # Names of files alone tell them apart where ranks have as much each, and nothing twice.
    is_unsure = first.stage == 3 and first.world > 1 and zeros and sizes
    if is_unsure or len(of_experts) > 1:
        details["not_checked"] = "of which rank a file is, but by its name"
    if model.of_rank_0:
        details["of_rank_0"] = sorted(model.of_rank_0)
    arrays: Sequence[ForeignArray] = found.arrays
    strategy = None
    if sizes:
        strategy, arrays = _strategy_of(first, model, arrays, experts, sizes)
    return found.step(
        "DeepSpeed",
        folder,
        files.all,
        arrays=arrays,
        strategy=strategy,
        step=document.integer(first.tree.get("global_steps", 0), f"{first.where}: global_steps"),
        theirs={name: name.partition("/")[2].replace("/", ".") for name in found.theirs},
        details=details,
        sizes=config_of(folder),
    )


def _optimizer_of_experts(
    model: ParallelModel,
    parts: Sequence[ModelPart],
    by_part: Sequence[Sequence[Mapping[str, Any]]],
    experts: SharedExperts,
) -> dict[str, Any] | None:
    """One optimizer of those that the ranks of each stage have of a part of the experts."""
    firsts = {t.identity: n for n, t in reversed(model.tensors.items())}
    names = {n for n in firsts.values() if n not in model.buffers}
    states: dict[str, dict[str, Any]] = {}
    groups: list[Any] = []
    for part, owns in zip(parts, by_part, strict=True):
        mine = {n: model.tensors[n] for n in part.module if n in names}
        inner = [own.get("optimizer_state_dict", own) for own in owns]
        if not inner or (one := by_order(inner, mine, experts, part.where)) is None:
            return None
        for name, state in one["state"].items():
            # Stages share what is tied.
            for key, value in states.setdefault(name, state).items():
                same_on_all(f"{name}/{key}", [value, state.get(key)], part.where)
        groups.append(one["param_groups"])
    return {"state": states, "param_groups": groups_of(groups)}


def _strategy_of(
    part: ModelPart,
    model: ParallelModel,
    arrays: Sequence[ForeignArray],
    experts: SharedExperts,
    sizes: Mapping[str, int],
) -> tuple[Strategy | None, Sequence[ForeignArray]]:
    """What wrote the arrays, in our words, and how that cuts them. DeepSpeed's own cuts go by
    elements, which no placement can say: what is stored is where the extents are.
    """
    kind = f"zero{part.stage}" if part.stage else "ddp"
    if len(experts.degrees) > 1 or any(part.world % each for each in experts.degrees):
        return None, arrays  # no mesh has layers with experts on more and on fewer ranks
    ep = max(experts.degrees, default=1)
    ranks = [(kind, part.world // ep), ("ep", ep)]
    ranks = ranks[::-1] if experts.is_data_first else ranks
    wanted = [("pp", sizes["pp"]), *ranks, ("tp", sizes["tp"])]
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
        own = experts.placement(name, ep) if array.shape else None
        by_kind = {"pp": pp, kind: data, "ep": data if own is None else own, "tp": tp}
        found.append(replace(array, placements=tuple(by_kind[axis.kind] for axis in axes)))
    return Strategy(Mesh(axes)), found


def _check_copies(
    folder: Folder, masters: Mapping[str, StateTensor], copies: Mapping[str, StateTensor]
) -> None:
    """Refuse master weights that are not, rounded, the copies that the model has of them. In each
    run of elements that a file has of a weight, the first and the last ones are compared, and some
    between.
    """
    runs: list[tuple[Stretches, Stretches, int, int]] = []
    for name, master in masters.items():
        mine, copy = _row(master), _row(copies[name])
        if mine is None or copy is None or not copy.dtype.name.startswith(("float", "bfloat")):
            continue
        runs += [(mine, copy, begin, end - begin) for begin, end in pairwise(mine.starts)]
    of_masters = samples(folder, [(mine, begin, size) for mine, _, begin, size in runs])
    of_copies = samples(folder, [(copy, begin, size) for _, copy, begin, size in runs])
    compared: dict[tuple[str, str], bool] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for run, exact, rounded in zip(runs, of_masters, of_copies, strict=True):
            mine, copy, begin, size = run
            expected = exact.astype(rounded.dtype)
            is_alike = (expected == rounded) | (np.isnan(expected) & np.isnan(rounded))
            extent = next(extent for extent, *_ in mine.between(begin, begin + size))
            files = (extent.file, copy.stretches[0].file)
            compared[files] = compared.get(files, True) and bool(is_alike.all())
    wrong = [files for files, is_alike in compared.items() if not is_alike]
    if wrong:
        file, model = wrong[0]
        raise FormatError(
            f"its weights, rounded, are not the copies in {model.rpartition('/')[2]}",
            where=folder.where(file),
            value=[file.rpartition("/")[2] for file, _ in wrong][:_NAMED],
            hint="the files are of different saves, or have each other's names: copy the folder "
            f"again. Named by itself, {model.rpartition('/')[2]} is read with the copies that it "
            "has",
        )


def _check_step(
    folder: Folder, states: Mapping[str, Mapping[str, Any]], steps: Any, where: str
) -> None:
    """Refuse a model's file, which says how many steps there were, that is older than those of the
    optimizer.
    """
    step: Any = next((state.get("step") for state in states.values()), None)
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


def _row(tensor: StateTensor) -> Stretches | None:
    """A tensor as one row of its elements; None where it does not lie so."""
    parts = sorted(tensor.extents, key=lambda extent: extent.box.offset)
    is_row = tensor.is_flat or [part.box for part in parts] == [Box.whole(tensor.shape)]
    if not is_row or any(part.strides for part in parts):
        return None
    return Stretches.of(tensor.dtype, parts)
