"""Loading a step into live objects of any layout: first everything is compared, then memory is
filled, then the objects take over what is theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial as bound
from typing import Any, Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.places import Place, described, store_at
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks, leaving
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_checkpoint
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.run.run import Run
from ckptkit.format.manifest import Manifest
from ckptkit.format.names import WRAPPED
from ckptkit.format.objects import PerDataRank, PerRank, Replicated
from ckptkit.live.comparison import (
    LoadOptions,
    Match,
    Position,
    Report,
    array_for,
    check_wrappers,
    compare,
    no_array,
)
from ckptkit.live.fill import Filling, fill, fill_once
from ckptkit.live.resume import hand_over
from ckptkit.live.save import readable
from ckptkit.live.snapshot import Snapshot, take_snapshot
from ckptkit.live.state.extra import Extra
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.ranks import (
    World,
    bytes_of_first,
    copying_threads,
    current_world,
    next_name,
    ranks_of,
)
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.live.state.trees import arrays_in, put_tensors, replace_leaves, unmarked
from ckptkit.live.wrappers.entries import StateMismatchError, parameter_names
from ckptkit.live.wrappers.training import TrainingObjects, TrainingState
from ckptkit.storage import Options, Store

log = logging.getLogger("ckptkit.live")

NOT_LOADED = "the step was not loaded"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a load gave back besides what it filled."""

    step: int
    extra: Extra
    report: Report


def load(  # noqa: PLR0913 — how much may differ, and how to read
    location: Place,
    *,
    mesh: DeviceMesh | None = None,
    rules: RulesLike | None = None,
    skip: Iterable[str] = (),
    partial: bool = False,
    cast: bool = False,
    verify: bool = True,
    read_once: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Options | None = None,
    **objects: Unpack[TrainingObjects],
) -> Restored:
    """Load a step, or the newest committed step of a run, into live objects; every rank calls it
    alike, and rank 0 reads the manifest for all.

    `objects` are `model=`, `optimizer=`, `scheduler=`, `dataloader=`, `scaler=` and `state=`.
    `skip` names groups that are left as they are (`skip=["dataloader"]`; * and ? mean several).
    With `read_once`, what several ranks need alike is read by one of them, and reaches the others
    through the job's own network.
    """
    world = current_world()
    ranks = ranks_of(world, next_name(world, "load"), timeout, NOT_LOADED)
    with leaving(ranks):
        training = TrainingState.of(skip, **objects)
        store = store_at(location, storage_options)
        options = LoadOptions(
            partial=partial,
            cast=cast,
            verify=verify,
            read_once=read_once,
            mesh=mesh,
            rules=HandCuts.of(rules),
        )
    return load_into(training, store, None, world, ranks, options)


def load_into(
    training: TrainingState,
    store: Store,
    step: int | None,
    world: World,
    ranks: Ranks,
    options: LoadOptions,
) -> Restored:
    """Load a step of a run, or without one the step or the newest of the run that the store has;
    returns when every rank has, and raises on all when one cannot.
    """
    started = time.perf_counter()
    look = bound(take_snapshot, world, mesh=options.mesh, rules=options.rules, ranks=ranks)
    with leaving(ranks), _open(store, step, ranks) as checkpoint:
        # What optimizers are to keep is known from the step only.
        before = look(replace(training, optimizers=()))
        match = compare(checkpoint, training, before, ranks, options)
        # Nothing has changed on any rank when one has found that the step does not fit.
        ranks.wait()
        training = match.training
        names = parameter_names(training.model.entries()) if training.model else {}
        for optimizer in training.optimizers:
            optimizer.prepare(names, match.optimizers.of_kind(optimizer.kind))
        snapshot = look(training)
        check_wrappers(snapshot, match.objects)
        fillings, fresh = _to_fill(checkpoint, snapshot, match)
        threads = options.threads
        if threads is None and not checkpoint.store.abilities.waits_for_answers:
            # Elsewhere they wait rather than copy: as many as the store likes.
            threads = copying_threads(world)
        read = bound(
            checkpoint.read_many,
            verify=options.verify,
            threads=threads,
            progress=options.progress,
        )
        rest = fillings
        if options.read_once and world.size > 1:
            rest = fill_once(checkpoint, snapshot.topology, fillings, ranks, read)
        fill(snapshot.topology, rest, read)
        # Some wrappers take over in a collective, which one that failed would not come to.
        ranks.wait()
        hand_over(training, snapshot, match.values, match.optimizers.documents)
        _give_back(match, snapshot.trees | fresh, world.rank)
        ranks.wait()
    if world.rank == 0:
        seconds, nbytes = time.perf_counter() - started, sum(h.local.nbytes for h, _ in fillings)
        log.info(
            "loaded step %d of %s: %s on rank 0 in %.2f s, %.2f GB/s",
            checkpoint.step,
            checkpoint.location,
            readable(nbytes),
            seconds,
            nbytes / seconds / 1e9,
        )
    extra = {
        name.removeprefix("extra/"): replace(item, value=unmarked(item.value, name))
        for name, item in match.objects.items()
        if name.startswith("extra/")
    }
    return Restored(checkpoint.step, Extra(extra, match.data), match.report)


def _open(store: Store, step: int | None, ranks: Ranks) -> Checkpoint:
    """Open what rank 0 finds in the store: a collective call, in the thread that trains. All ranks
    open the same step, even while others are being saved, as rank 0 reads the manifest for all.
    """
    found, data = None, b""
    if ranks.rank == 0:
        # An error here reaches the others before anyone begins to wait for bytes.
        found = open_checkpoint(store) if step is None else Run(store).open(step)
        if ranks.world_size == 1:
            return found
        data = found.manifest.to_bytes()
    size, prefix = ranks.share(lambda: (len(data), found.prefix if found else ""))
    # A rank that has left would be missing in the collective: nobody begins it without all.
    ranks.wait()
    heard = bytes_of_first(data if found else None, size)
    return found or Checkpoint(store, prefix, Manifest.from_bytes(heard, described(store, prefix)))


def _to_fill(
    checkpoint: Checkpoint, snapshot: Snapshot, match: Match
) -> tuple[list[Filling], dict[str, torch.Tensor]]:
    """What to fill: what the objects have, and new tensors for what only the step has."""
    found: list[Filling] = []
    arrays = match.optimizers.arrays
    for held in snapshot.tensors:
        if held.role != "optimizer":
            if name := array_for(held, checkpoint, snapshot, Report()):
                found.append((held, checkpoint[name]))
        elif held.name in arrays:
            array = checkpoint[arrays[held.name]]
            if array.shape != held.shape:
                raise StateMismatchError(
                    f"the optimizer keeps {held.shape} here, not what is in the step",
                    where=held.name,
                    hint="the optimizer's own code or options differ from those that saved",
                )
            found.append((held, array))
    fresh: dict[str, torch.Tensor] = {}
    groups = [group for group in match.training.stateful if group in match.objects]
    for group in groups:
        for name in arrays_in(match.objects[group].value, group):
            if name in snapshot.trees:
                continue
            if f"{WRAPPED}/{name}" in match.objects:
                raise StateMismatchError(
                    "made of several tensors: only one of its kind can take them over",
                    where=name,
                    hint="have one there, or take load_state(location, nested=True)",
                )
            array = checkpoint[name]
            fresh[name] = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
            found.append((LiveTensor(name, array.shape, {}, fresh[name]), array))
    return found, fresh


def _give_back(match: Match, tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Let the objects besides the model and its optimizers take over what was loaded for them."""
    for group, target in match.training.stateful.items():
        item = match.objects.get(group)
        if item is None or any(x.startswith(f"{group}:") for x in match.report.skipped):
            continue
        if isinstance(target, PerDataRank) and group in match.positions:
            _go_on(target.value, match.positions[group], group)
        else:
            tree = item.value[rank] if item.semantics == "per_rank" else item.value
            _give(target, put_tensors(tree, tensors.__getitem__, group))


def _go_on(target: Any, position: Position, group: str) -> None:
    """Let what reads data go on where it was."""
    tree = put_tensors(position.tree, no_array, group)
    if not position.is_resized:
        _give(target, tree)
    elif isinstance(target, list):
        for at, each in enumerate(target):
            each.load_state_dicts([states[at] for states in tree])
    else:
        target.load_state_dicts(tree)


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
