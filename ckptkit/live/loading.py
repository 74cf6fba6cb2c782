"""Loading a step into live objects of any layout: first everything is compared, then memory is
filled, then the objects take over what is theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks, leaving
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.threads import Progress
from ckptkit.errors import FormatError
from ckptkit.format.names import WRAPPED, join, split
from ckptkit.format.objects import ObjectInfo
from ckptkit.live.agree import Agreement, Documents, agree
from ckptkit.live.extra import DataRanks, Extra, WorldSizeError, is_marked
from ckptkit.live.filling import Filling, Target
from ckptkit.live.handover import hand_over
from ckptkit.live.ranks import World, copying_threads
from ckptkit.live.reading_once import fill_once
from ckptkit.live.report import Report, compare, of_all, refuse
from ckptkit.live.resuming import Resumed, Twins, differing, resume, trained_by, untied
from ckptkit.live.saying import readable
from ckptkit.live.snapshot import Snapshot, take_snapshot
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.tensors import torch_dtype
from ckptkit.live.state.trees import arrays_in, put_tensors, replace_leaves, unmarked, with_own
from ckptkit.live.wrappers.entries import StateMismatchError, parameter_names
from ckptkit.live.wrappers.training import TrainingState
from ckptkit.model import PerDataRank, PerRank, Replicated

log = logging.getLogger("ckptkit.live")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load, and how much may differ."""

    partial: bool = False
    cast: bool = False
    verify: bool = True
    read_once: bool = False
    threads: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class Restored:
    """What a load gave back besides what it filled."""

    step: int
    extra: Extra
    report: Report


class Loading:
    """One load of one rank."""

    def __init__(
        self,
        opened: Callable[[Ranks], Checkpoint],
        world: World,
        barrier: Ranks,
        sources: TrainingState,
        *,
        mesh: DeviceMesh | None,
        rules: HandCuts,
        options: LoadOptions,
    ) -> None:
        self._opened = opened
        self._world = world
        self._barrier = barrier
        self._sources = sources
        self._mesh = mesh
        self._rules = rules
        self._options = options
        self._report = Report()
        self._positions: dict[str, _Position] = {}

    def run(self) -> Restored:
        """Load; returns when every rank has, and raises on all when one cannot."""
        started = time.perf_counter()
        with leaving(self._barrier), self._opened(self._barrier) as self._checkpoint:
            self._objects = {item.name: item for item in self._checkpoint.manifest.objects}
            nbytes = self._load()
            self._barrier.wait()
        if self._world.rank == 0:
            seconds = time.perf_counter() - started
            log.info(
                "loaded step %d of %s: %s on rank 0 in %.2f s, %.2f GB/s",
                self._checkpoint.step,
                self._checkpoint.location,
                readable(nbytes),
                seconds,
                nbytes / seconds / 1e9,
            )
        return Restored(self._checkpoint.step, self._extra(), self._report)

    def _load(self) -> int:
        resumed = self._compare()
        # Nothing has changed on any rank when one has found that the step does not fit.
        self._barrier.wait()
        names = parameter_names(self._sources.model.entries()) if self._sources.model else {}
        for optimizer in self._sources.optimizers:
            optimizer.prepare(names, resumed.of_kind(optimizer.kind))
        snapshot, options = self._look(self._sources), self._options
        self._check_wrappers(snapshot)
        targets, fresh = self._targets(snapshot, resumed)
        threads = options.threads
        if threads is None and not self._checkpoint.store.abilities.waits_for_answers:
            # Elsewhere they wait rather than copy: as many as the store likes.
            threads = copying_threads(self._world)
        filling = Filling(
            self._checkpoint,
            snapshot.topology,
            verify=options.verify,
            threads=threads,
            progress=options.progress,
        )
        rest: Sequence[Target] = targets
        if options.read_once and self._world.size > 1:
            rest = fill_once(filling, targets, self._barrier)
        filling.fill(rest)
        nbytes = sum(target.held.local.nbytes for target in targets)
        # Some wrappers take over in a collective, which one that failed would not come to.
        self._barrier.wait()
        self._hand_over(snapshot, resumed, fresh)
        return nbytes

    def _look(self, sources: TrainingState) -> Snapshot:
        mesh, rules = self._mesh, self._rules
        return take_snapshot(self._world, sources, mesh=mesh, rules=rules, barrier=self._barrier)

    def _compare(self) -> Resumed:
        """Compare names, shapes and dtypes before anything changes; raise where they differ more
        than they may. Returns what there is for the optimizers.
        """
        sources, report = self._sources, self._report
        # Without the optimizers: what they are to keep is known from the step only.
        snapshot = self._look(replace(sources, optimizers=()))
        is_resharded = "resharded" in self._checkpoint.details
        saved_by = None if is_resharded else self._checkpoint.strategy
        world = self._world
        self._data = DataRanks(world.rank, world.size, snapshot.spread, saved_by)
        names = parameter_names(snapshot.entries)
        documents = [
            {"kind": each.kind, "groups": each.options(names), "values": {}}
            for each in sources.optimizers
        ]
        known = [held.name for held in snapshot.tensors] + [tied.name for tied in snapshot.tied]
        known += map(_in_model, snapshot.values)
        agreement = agree(self._barrier, snapshot.topology, known, documents)
        fitting = [
            held
            for held in snapshot.tensors
            if compare(self._checkpoint, held, _known_as(held, snapshot), report)
        ]
        # Optimizers name what they keep after the parameter, not after what that is made of.
        fits = {held.name for held in fitting}
        fitting += [whole for whole, parts in snapshot.made.values() if fits.issuperset(parts)]
        size, rank = self._world.size, self._world.rank
        self._objects = with_own(self._objects, snapshot.open_trees, rank, size)
        self._check_wrappers(snapshot)
        twins = Twins(self._checkpoint, snapshot.tied)
        self._compare_objects(snapshot)
        saved = self._optimizer_documents() if sources.optimizers else []
        self._join_reports(agreement, twins, untied(self._checkpoint, snapshot.tied, saved))
        report = self._report
        refuse(report, self._checkpoint, partial=self._options.partial, cast=self._options.cast)
        self._check_kinds(documents)
        return resume(self._checkpoint, saved, fitting, twins)

    def _join_reports(self, agreement: Agreement, twins: Twins, pairs: list[list[str]]) -> None:
        """Make one report of those of all ranks, so that they all go on alike, or all stop."""

        def conclude(heard: list[Any]) -> list[Any]:
            found = of_all([each for each, _ in heard])
            found["unexpected"] = self._unexpected(agreement, twins)
            return [found, list(dict.fromkeys(tuple(pair) for _, own in heard for pair in own))]

        found, pairs = self._barrier.agree([self._report.found(), pairs], conclude)
        if pairs:
            mine = pairs[self._world.rank :: self._world.size]
            found["untied"] = self._barrier.agree(
                differing(self._checkpoint, mine, threads=self._options.threads),
                lambda heard: [line for lines in heard for line in lines],
            )
        self._report = Report(**found)

    def _compare_objects(self, snapshot: Snapshot) -> None:
        groups = [*self._sources.stateful, *(["optimizer"] if self._sources.optimizers else [])]
        self._report.missing += [group for group in groups if group not in self._objects]
        values = self._extra_state()
        missing = [name for name in snapshot.values if name not in values]
        self._report.missing += map(_in_model, missing)
        for group, value in self._sources.stateful.items():
            item = self._objects.get(group)
            if item is None:
                continue
            of_data = isinstance(value, PerDataRank)
            of_ranks = item.semantics == "per_rank"
            if of_ranks != isinstance(value, (PerRank, PerDataRank)) or (
                is_marked(item) and not of_data
            ):
                raise StateMismatchError(
                    "saved once for all ranks, for each rank, or for each share of the data: "
                    "this is another one",
                    where=group,
                    hint="wrap it in PerRank(…) or PerDataRank(…) as it was when it was saved, "
                    "or do not",
                )
            if isinstance(value, PerDataRank):
                self._positions[group] = self._position(item, value.value)
            elif of_ranks and len(item.value) != self._world.size:
                self._report.skipped.append(
                    f"{group}: of {len(item.value)} ranks, this job has {self._world.size}"
                )

    def _position(self, item: ObjectInfo, target: object) -> _Position:
        """What an object that reads data is to take over; never what belongs to other data."""
        try:
            return _Position(self._data.find(item))
        except WorldSizeError as error:
            states = self._data.all_shares(item)
            if states and _can_resize(target):
                return _Position(states, is_resized=True)
            raise StateMismatchError(
                error.what,
                where=item.name,
                hint=f'skip=["{item.name}"] leaves it as it is; an object with load_state_dicts '
                f"is given the states of all; {error.hint}".removesuffix("; "),
            ) from error

    def _check_wrappers(self, snapshot: Snapshot) -> None:
        """Parts make what they made only in a tensor of the same kind."""
        for name, record in snapshot.objects.items():
            item = self._objects.get(name)
            if name.startswith(f"{WRAPPED}/") and item is not None and item.value != record:
                raise StateMismatchError(
                    f"made otherwise: {item.value} in the step, {record} here",
                    where=name.removeprefix(f"{WRAPPED}/"),
                    hint="make the model and the optimizer as those that saved",
                )

    def _unexpected(self, agreement: Agreement, twins: Twins) -> list[str]:
        """The arrays of the step that no rank asked for."""
        if self._sources.model is None:
            return []
        trained = trained_by(agreement.optimizers)
        found = [n for n in map(_in_model, self._extra_state()) if n not in agreement.names]
        for name in self._checkpoint.arrays:
            if name.startswith("model/") and name not in agreement.names:
                found.append(name)
            elif self._sources.optimizers and name.startswith("optimizer/"):
                found += [] if trained.intersection(twins.of(split(name)[1])) else [name]
        return found

    def _check_kinds(self, documents: Documents) -> None:
        """Keep to the optimizers of the kinds that saved."""
        if "optimizer" not in self._objects:
            return
        saved = [document["kind"] for document in self._optimizer_documents()]
        mine = [document["kind"] for document in documents]
        if mine and saved != mine and not self._options.partial:
            raise StateMismatchError(
                f"the step was saved with the optimizers {', '.join(saved)}, "
                f"here they are {', '.join(mine)}",
                where=self._checkpoint.location,
                hint="pass the same optimizers, or partial=True to leave others as they are",
            )
        self._report.skipped += [f"optimizer: no {k} has saved" for k in mine if k not in saved]
        known = [each for each in self._sources.optimizers if each.kind in saved]
        self._sources = replace(self._sources, optimizers=known)

    def _targets(
        self, snapshot: Snapshot, resumed: Resumed
    ) -> tuple[list[Target], dict[str, torch.Tensor]]:
        """What to fill: what the objects have, and new tensors for what only the step has."""
        targets, ignored = [], Report()
        for held in snapshot.tensors:
            known_as = _known_as(held, snapshot)
            if held.role == "optimizer":
                known_as = [resumed.arrays.get(held.name, "")]
            name = compare(self._checkpoint, held, known_as, ignored)
            if name:
                targets.append(Target(held, name))
            elif any(known_as) and held.role == "optimizer":
                raise StateMismatchError(
                    f"the optimizer keeps {held.shape} here, not what is in the step",
                    where=held.name,
                    hint="the optimizer's own code or options differ from those that saved",
                )
        fresh: dict[str, torch.Tensor] = {}
        for group in self._sources.stateful:
            item = self._objects.get(group)
            for name in [] if item is None else arrays_in(item.value, group):
                if name not in snapshot.trees:
                    if f"{WRAPPED}/{name}" in self._objects:
                        raise StateMismatchError(
                            "made of several tensors: only one of its kind can take them over",
                            where=name,
                            hint="have one there, or take load_state(location, nested=True)",
                        )
                    array = self._checkpoint[name]
                    fresh[name] = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
                    targets.append(Target(LiveTensor(name, array.shape, {}, fresh[name]), name))
        return targets, fresh

    def _hand_over(
        self, snapshot: Snapshot, resumed: Resumed, fresh: dict[str, torch.Tensor]
    ) -> None:
        sources = self._sources
        hand_over(sources, snapshot, self._extra_state(), resumed.documents)
        tensors = snapshot.trees | fresh
        for group, value in sources.stateful.items():
            item = self._objects.get(group)
            if item is None or any(line.startswith(f"{group}:") for line in self._report.skipped):
                continue
            if group in self._positions and isinstance(value, PerDataRank):
                self._positions[group].give(value.value, group)
                continue
            tree = item.value[self._world.rank] if item.semantics == "per_rank" else item.value
            _give(value, put_tensors(tree, tensors.__getitem__, group))

    def _optimizer_documents(self) -> Documents:
        if "optimizer" not in self._objects:
            return []
        value = self._objects["optimizer"].value
        wrong = not isinstance(value, list) or not all(
            isinstance(d, dict) and {"kind", "groups", "values"} <= d.keys() for d in value
        )
        if wrong:
            raise FormatError("not what a save writes", where="objects.optimizer", value=value)
        return value  # type: ignore[no-any-return]

    def _extra_state(self) -> dict[str, Any]:
        """By name, what the modules of the model had besides tensors."""
        value = self._objects["model"].value if "model" in self._objects else {}
        if not isinstance(value, dict):
            raise FormatError("not what a save writes", where="objects.model", value=value)
        return put_tensors(value, _no_array, "model")  # type: ignore[no-any-return]

    def _extra(self) -> Extra:
        prefix = "extra/"
        found = {
            n.removeprefix(prefix): replace(o, value=unmarked(o.value, n))
            for n, o in self._objects.items()
            if n.startswith(prefix)
        }
        return Extra(found, self._data)


@dataclass(frozen=True, slots=True)
class _Position:
    """Where in the data an object goes on: its state, or those of all shares of another size."""

    tree: Any
    is_resized: bool = False

    def give(self, target: Any, group: str) -> None:
        """Let the object, or each of a list of them, take it over."""
        tree = put_tensors(self.tree, _no_array, group)
        if not self.is_resized:
            _give(target, tree)
        elif isinstance(target, list):
            for at, each in enumerate(target):
                each.load_state_dicts([states[at] for states in tree])
        else:
            target.load_state_dicts(tree)


def _can_resize(target: object) -> bool:
    several = target if isinstance(target, list) else [target]
    return all(hasattr(each, "load_state_dicts") for each in several)


def _in_model(name: str) -> str:
    return join("model", name)


def _no_array(name: str) -> torch.Tensor:
    raise FormatError("extra state has no arrays", where="objects.model", value=name)


def _known_as(held: LiveTensor, snapshot: Snapshot) -> list[str]:
    """The names of a tensor: tied ones may have been saved under another of theirs."""
    return [held.name, *(tied.name for tied in snapshot.tied if tied.of == held.name)]


def _give(target: object, tree: Any) -> None:
    """Let an object take over what was loaded for it."""
    if isinstance(target, (Replicated, PerRank)):
        _give(target.value, tree)
    elif hasattr(target, "load_state_dict"):
        target.load_state_dict(tree)
    elif isinstance(target, list) and any(hasattr(each, "load_state_dict") for each in target):
        for each, inner in zip(target, tree, strict=True):
            _give(each, inner)
    else:
        replace_leaves(target, tree)
