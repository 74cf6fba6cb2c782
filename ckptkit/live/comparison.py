"""How a step and the objects it is loaded into differ, and what is too much: all ranks have one
answer before anything changes. And then, what is to be filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.ranks import Ranks
from ckptkit.checkpoint.read.checkpoint import Array, Checkpoint
from ckptkit.checkpoint.workers import Progress
from ckptkit.errors import FormatError, UsageError
from ckptkit.format.names import (
    BY_ORDER,
    DATA_RANK,
    MODEL,
    OPTIMIZER,
    WRAPPED,
    in_group,
    join,
    split,
)
from ckptkit.format.objects import ObjectInfo, PerDataRank, PerRank, Replicated
from ckptkit.live.resume import (
    Resumed,
    check_order,
    differing,
    resume,
    saved_arrays,
    saved_documents,
    torn_options,
    trained_by,
    twins_of,
    untied,
    without_state,
)
from ckptkit.live.snapshot import Snapshot
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.live.state.extra import DataRanks, WorldSizeError, is_marked, said_share
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.ranks import listed, put_together
from ckptkit.live.state.tensors import dtype_of, torch_dtype
from ckptkit.live.state.trees import (
    arrays_in,
    differences,
    no_tensor,
    put_tensors,
    replace_leaves,
    with_own,
)
from ckptkit.live.wrappers import Training

_SHOWN = 8

Filling: TypeAlias = tuple[LiveTensor, Array]
"""A tensor to fill, and the array of the step that it is filled from."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load, and how much may differ."""

    partial: bool = False
    cast: bool = False
    verify: bool = True
    read_once: bool = False
    threads: int | None = None
    progress: Progress | None = None
    mesh: DeviceMesh | None = None
    rules: HandCuts = field(default_factory=HandCuts)


@dataclass(slots=True)
class Report:
    """What a load found to differ, on any rank: all ranks have the same report."""

    missing: list[str] = field(default_factory=list)
    """In the objects but not in the step: left as they were."""
    unexpected: list[str] = field(default_factory=list)
    """In the step but not in the objects of any rank."""
    reshaped: list[str] = field(default_factory=list)
    """Tensors of another shape in the step, with both shapes: left as they were."""
    cast: list[str] = field(default_factory=list)
    """Tensors of another dtype in the step, with both dtypes."""
    skipped: list[str] = field(default_factory=list)
    """Values of each rank of a job of another size."""
    untied: list[str] = field(default_factory=list)
    """One tensor here, under two names that have different values in the step."""
    ranks: dict[str, list[int]] = field(default_factory=dict)
    """The ranks that found a difference, where not all did."""

    @property
    def is_exact(self) -> bool:
        """Whether the step and the objects were the same."""
        return not any(self.found().values())

    def found(self) -> dict[str, list[str]]:
        """What differs, by the way in which it does."""
        return {kind: getattr(self, kind) for kind in _KINDS}

    def __str__(self) -> str:
        lines = []
        for kind, names in self.found().items():
            shown = []
            for name in names[:_SHOWN]:
                ranks = self.ranks.get(name, [])
                shown.append(f"{name} (rank {listed(ranks)})" if ranks else name)
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            if names:
                lines.append(f"{kind}: {', '.join(shown)}{more}")
        return "\n".join(lines) or "nothing differs"


_KINDS = ("missing", "unexpected", "reshaped", "cast", "skipped", "untied")


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What of a step goes into the objects of this rank."""

    report: Report
    training: Training
    """The objects, without optimizers of kinds that the step knows nothing of."""
    arrays: Mapping[str, str]
    """The name that the step has each tensor besides those of optimizers under."""
    objects: Mapping[str, ObjectInfo]
    """The objects of the step as they are for this rank."""
    values: Mapping[str, Any]
    """What the modules of the model had besides tensors, by name."""
    optimizers: Resumed
    positions: Mapping[str, Position]
    """For what reads data, where it goes on."""
    data: DataRanks

    def to_fill(
        self, checkpoint: Checkpoint, snapshot: Snapshot
    ) -> tuple[list[Filling], dict[str, torch.Tensor]]:
        """What to fill: what the objects have, and new tensors for what only the step has."""
        found: list[Filling] = []
        for held in snapshot.tensors:
            is_kept = held.role == "optimizer"
            if name := (self.optimizers.arrays if is_kept else self.arrays).get(held.name):
                array = checkpoint[name]
                if is_kept and array.info.shape != held.shape:
                    raise StateMismatchError(
                        f"the optimizer keeps {held.shape} here, not what is in the step",
                        where=held.name,
                        hint="the optimizer's own code or options differ from those that saved",
                    )
                found.append((held, array))
        fresh: dict[str, torch.Tensor] = {}
        groups = [group for group in self.training.stateful if group in self.objects]
        for group in groups:
            for name in arrays_in(self.objects[group].value, group):
                if name in snapshot.trees:
                    continue
                if f"{WRAPPED}/{name}" in self.objects:
                    raise StateMismatchError(
                        "made of several tensors: only one of its kind can take them over",
                        where=name,
                        hint="have one there, or take load_state(location, nested=True)",
                    )
                array = checkpoint[name]
                fresh[name] = torch.empty(array.shape, dtype=torch_dtype(array.dtype), device="cpu")
                found.append((LiveTensor(name, array.shape, {}, fresh[name]), array))
        return found, fresh


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the data an object goes on: its state, or those of all shares of another size."""

    tree: Any
    is_resized: bool = False


def compare(
    checkpoint: Checkpoint,
    training: Training,
    snapshot: Snapshot,
    ranks: Ranks,
    options: LoadOptions,
) -> Match:
    """Compare names, shapes and dtypes before anything changes; raise on all ranks where they
    differ more than they may. The snapshot is one without the optimizers: what they are to keep is
    known from the step only.
    """
    # What this rank has, and what of the step is for it.
    report, rank, size = Report(), ranks.rank, ranks.world_size
    names = training.names(snapshot.entries)
    documents = [
        {"kind": each.kind, "groups": each.options(names), "values": {}}
        for each in training.optimizers
    ]
    known = [*(held.name for held in snapshot.tensors), *snapshot.tied]
    known += [join(MODEL, name) for name in snapshot.values]
    agreement = put_together(ranks, snapshot.topology, known, documents)
    under = {held.name: array_for(held, checkpoint, snapshot, report) for held in snapshot.tensors}
    fitting = [held for held in snapshot.tensors if under[held.name]]
    # Optimizers name what they keep after the parameter, not after what that is made of.
    fits = {held.name for held in fitting}
    fitting += [whole for whole, parts in snapshot.made.values() if fits.issuperset(parts)]
    objects = {item.name: item for item in checkpoint.manifest.objects}
    objects = with_own(objects, snapshot.open_trees, rank, size)
    check_wrappers(snapshot, objects)
    twins = twins_of(checkpoint, snapshot.tied)
    # For a step that was resharded since, nobody knows who read which share of the data.
    saved_by = None if "resharded" in checkpoint.details else checkpoint.strategy
    data = DataRanks(rank, size, snapshot.spread, saved_by)
    values = objects[MODEL].value if MODEL in objects else {}
    if not isinstance(values, dict):
        raise FormatError("not what a save writes", where="objects.model", value=values)
    values = put_tensors(values, no_tensor, MODEL)
    groups = [*training.stateful, *([OPTIMIZER] if training.optimizers else [])]
    report.missing += [group for group in groups if group not in objects]
    report.missing += [join(MODEL, name) for name in snapshot.values if name not in values]
    positions: dict[str, Position] = {}
    for group, target in training.stateful.items():
        if group in objects:
            here = snapshot.objects[group]
            _compare_object(objects[group], target, here, data, report, positions)
    saved = saved_documents(objects) if training.optimizers else []
    if len(saved) == len(training.optimizers) == 1 and not saved[0]["kind"]:
        # Another program wrote it, which did not say the class.
        saved = [{**saved[0], "kind": training.optimizers[0].kind}]
    report.missing += torn_options(documents, saved)
    kept = saved_arrays(checkpoint)
    parameters = [
        (split(held.name)[1], held.shape, held.local.dtype)
        for held in fitting
        if held.role == "param"
    ]
    # Those in whose place the model shows others fit as those do.
    shown = {entry.name for entry in snapshot.entries}
    parameters += [
        (name, tuple(each.shape), each.dtype) for each, name in names.items() if name not in shown
    ]
    frozen = {name for each, name in names.items() if not each.requires_grad}
    stepped = {name for name, _, _ in parameters} - frozen
    begun = without_state(documents, saved, kept, twins)
    report.missing += [join(OPTIMIZER, name) for name in begun if name in stepped]
    unexpected: list[str] = []
    if training.model is not None:
        trained = trained_by(agreement.optimizers)
        extra = [join(MODEL, name) for name in values]
        unexpected = [name for name in extra if name not in agreement.names]
        strange = set(checkpoint.names) - agreement.names
        unexpected += sorted(name for name in strange if name.startswith(f"{MODEL}/"))
        for parameter, by_key in kept.items() if training.optimizers else ():
            if parameter not in trained and trained.keys().isdisjoint(twins.get(parameter, ())):
                unexpected += by_key.values()

    # What differs anywhere, and whether it may.
    pairs = untied(checkpoint, snapshot.tied, saved, kept)
    report = _of_all_ranks(report, unexpected, pairs, checkpoint, ranks, options)
    _refuse(report, checkpoint, options)

    # What optimizers are to keep.
    if training.optimizers and OPTIMIZER in objects:
        theirs = [document["kind"] for document in saved]
        training = _of_saved_kinds(training, theirs, report, checkpoint, options)
    if training.optimizers and checkpoint.details.get(OPTIMIZER) == BY_ORDER:
        check_order(checkpoint, saved, documents, ranks)
    optimizers = resume(checkpoint, saved, parameters, twins, kept)
    return Match(report, training, under, objects, values, optimizers, positions, data)


def _of_all_ranks(
    report: Report,
    unexpected: Sequence[str],
    pairs: Sequence[Sequence[str]],
    checkpoint: Checkpoint,
    ranks: Ranks,
    options: LoadOptions,
) -> Report:
    """One report of those of all ranks, so that they all go on alike, or all stop. What is
    `unexpected` only rank 0 knows, which heard of the names of all. Of each of the `pairs`, which
    are one tensor here, one rank compares the values.
    """

    def conclude(heard: list[Any]) -> list[Any]:
        found = {k: list(dict.fromkeys(n for own, *_ in heard for n in own[k])) for k in _KINDS}
        who: dict[str, list[int]] = {}
        for rank, (own, *_) in enumerate(heard):
            for name in dict.fromkeys(name for names in own.values() for name in names):
                who.setdefault(name, []).append(rank)
        some = {name: those for name, those in who.items() if len(those) < len(heard)}
        all_pairs = list(dict.fromkeys(tuple(pair) for _, own, _ in heard for pair in own))
        once = len({once for *_, once in heard})
        return [{**found, "ranks": some, "unexpected": unexpected}, all_pairs, once]

    found, all_pairs, ways = ranks.agree([report.found(), pairs, options.read_once], conclude)
    if ways > 1:  # those that read once would wait for the others
        hint = "pass it on all ranks, or on none"
        raise UsageError(
            "read_once is not the same on all ranks", value=options.read_once, hint=hint
        )
    if all_pairs:
        found["untied"] = ranks.agree(
            differing(
                checkpoint, all_pairs[ranks.rank :: ranks.world_size], threads=options.threads
            ),
            lambda heard: [line for lines in heard for line in lines],
        )
    return Report(**found)


def _of_saved_kinds(
    training: Training,
    kinds: Sequence[str],
    report: Report,
    checkpoint: Checkpoint,
    options: LoadOptions,
) -> Training:
    """The objects without optimizers of other kinds than those that saved, which the report notes;
    refused where these are to be the same.
    """
    ours = [each.kind for each in training.optimizers]
    if kinds != ours and not options.partial:
        raise StateMismatchError(
            f"the step was saved with the optimizers {', '.join(kinds)}, "
            f"here they are {', '.join(ours)}",
            where=checkpoint.location,
            hint="pass the same optimizers, or partial=True to leave others as they are",
        )
    report.skipped += [f"optimizer: no {kind} has saved" for kind in ours if kind not in kinds]
    return replace(training, optimizers=[o for o in training.optimizers if o.kind in kinds])


def array_for(held: LiveTensor, checkpoint: Checkpoint, snapshot: Snapshot, report: Report) -> str:
    """The name that the step has a tensor under, empty where it has none that fits; what differs is
    noted. Tied ones may have been saved under another of their names.
    """
    name = held.name
    if name not in checkpoint:
        others = (other for other, of in snapshot.tied.items() if of == name)
        name = next((each for each in others if each in checkpoint), "")
    if not name:
        report.missing.append(held.name)
        return ""
    array = checkpoint.info(name)
    if array.shape != held.shape:
        report.reshaped.append(f"{held.name}: {array.shape} in the step, {held.shape} here")
        return ""
    dtype = dtype_of(held.name, held.local)
    if array.dtype != dtype:
        report.cast.append(f"{held.name}: {array.dtype} in the step, {dtype} here")
    return name


def check_wrappers(snapshot: Snapshot, objects: Mapping[str, ObjectInfo]) -> None:
    """Refuse a tensor made of others where the step has one that was made otherwise."""
    saved = in_group(WRAPPED, objects)
    for name, record in in_group(WRAPPED, snapshot.objects).items():
        if name in saved and saved[name].value != record:
            raise StateMismatchError(
                f"made otherwise: {saved[name].value} in the step, {record} here",
                where=name,
                hint="make the model and the optimizer as those that saved",
            )


def _compare_object(
    item: ObjectInfo,
    target: object,
    here: Any,
    data: DataRanks,
    report: Report,
    positions: dict[str, Position],
) -> None:
    """Compare what no array of the step has, and find where in the data what reads it goes on.
    `here` is what the target would save.
    """
    of_ranks = item.semantics == "per_rank"
    is_like = of_ranks == isinstance(target, (PerRank, PerDataRank))
    if not is_like or (is_marked(item) and not isinstance(target, PerDataRank)):
        raise StateMismatchError(
            "saved once for all ranks, for each rank, or for each share of the data: "
            "this is another one",
            where=item.name,
            hint="wrap it in PerRank(…) or PerDataRank(…) as it was when it was saved, or do not",
        )
    values = here.value if of_ranks else here
    if not isinstance(target, PerDataRank):
        if of_ranks and len(item.value) != data.world_size:
            report.skipped.append(
                f"{item.name}: of {len(item.value)} ranks, this job has {data.world_size}"
            )
            return
        tree = item.value[data.rank] if of_ranks else item.value
        _compare_values(item.name, target, values, tree, report)
        return
    # What reads data takes over nothing that belongs to other data.
    values = values[DATA_RANK][-1]
    data = replace(data, own=said_share(target.value))
    try:
        position = Position(data.find(item))
    except WorldSizeError as error:
        states = data.all_shares(item)
        readers = target.value if isinstance(target.value, list) else [target.value]
        if not (states and all(hasattr(each, "load_state_dicts") for each in readers)):
            raise StateMismatchError(
                error.what,
                where=item.name,
                hint=f'skip=["{item.name}"] leaves it as it is; an object with load_state_dicts '
                f"is given the states of all; {error.hint}".removesuffix("; "),
            ) from error
        position = Position(states, is_resized=True)
    for tree in position.tree if position.is_resized else [position.tree]:
        _compare_values(item.name, target, values, tree, report)
    positions[item.name] = position


def _compare_values(name: str, target: object, mine: Any, theirs: Any, report: Report) -> None:
    """Compare what is not for a `load_state_dict` to judge."""
    if isinstance(target, (Replicated, PerRank, PerDataRank)):
        target = target.value
    objects = target if isinstance(target, list) else [target]
    has_own = any(hasattr(each, "load_state_dict") for each in objects)
    forms = [f"a list of {len(it)}" if isinstance(it, list) else "one" for it in (theirs, mine)]
    if forms[0] != forms[1] and (has_own or "one" in forms):
        raise StateMismatchError(
            f"{forms[0]} in the step, {forms[1]} here",
            where=name,
            hint=f'pass as many as were saved; skip=["{name}"] leaves them as they are',
        )
    if not has_own:
        for kind, line in differences(mine, theirs, join(name)):
            getattr(report, kind).append(line)


def _refuse(report: Report, checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raise unless all that differs may differ."""
    bad = replace(report, cast=[] if options.cast else report.cast)
    if options.partial:
        bad = Report(cast=bad.cast, ranks=report.ranks)
    if bad.is_exact:
        return
    hints = []
    if OPTIMIZER in bad.missing and any(name.startswith("other/opt") for name in checkpoint.arrays):
        unknown = (
            "the optimizer's parameters are only numbered there, in several groups or not as the "
            "model's, so nobody knows whose state is which: save it with names (param_names)"
        )
        hints.append(str(checkpoint.details.get("other_shape", unknown)))
    if any(name.startswith(f"{OPTIMIZER}: one ") for name in bad.missing):
        hints.append("give the optimizer the groups of parameters that were saved")
    if not replace(bad, cast=[]).is_exact:
        hints.append("partial=True loads what fits and reports the rest")
    if bad.cast:
        hints.append("cast=True converts")
    raise StateMismatchError(
        f"the step does not fit\n{bad}", where=checkpoint.location, hint="; ".join(hints)
    )


def give_back(match: Match, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Let the objects besides the model and its optimizers take over what was loaded for them."""
    for group, target in match.training.stateful.items():
        item = match.objects.get(group)
        if item is None or any(x.startswith(f"{group}:") for x in match.report.skipped):
            continue
        if not (isinstance(target, PerDataRank) and group in match.positions):
            tree = item.value[rank] if item.semantics == "per_rank" else item.value
            _give(target, put_tensors(tree, tensors.__getitem__, group))
            continue
        # What reads data goes on where it was.
        position, reader = match.positions[group], target.value
        tree = put_tensors(position.tree, no_tensor, group)
        if not position.is_resized:
            _give(reader, tree)
        elif isinstance(reader, list):
            for at, each in enumerate(reader):
                each.load_state_dicts([states[at] for states in tree])
        else:
            reader.load_state_dicts(tree)


def _give(target: object, tree: Any) -> None:
    if isinstance(target, (Replicated, PerRank)):
        _give(target.value, tree)
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(tree)
    elif isinstance(target, list) and any(hasattr(each, "load_state_dict") for each in target):
        for each, inner in zip(target, tree, strict=True):
            _give(each, inner)
    else:
        replace_leaves(target, tree)
