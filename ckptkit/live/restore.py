"""Loading a step into live objects of any layout: first everything is compared, then memory is
filled, then the objects take over what is theirs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial as bound
from itertools import zip_longest
from typing import Unpack

import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.places import (
    Place,
    StepFolder,
    decoded_manifest,
    step_number,
    store_at,
    stored_manifest,
)
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Failure, Ranks, failing_together
from ckptkit.checkpoint.read.checkpoint import Checkpoint, open_alike, open_foreign
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.workers import uncollected
from ckptkit.checkpoint.write.damage import Damage, stamp
from ckptkit.errors import (
    CkptkitError,
    CorruptionError,
    FormatError,
    GivenUpError,
    NotFoundError,
    PeerError,
)
from ckptkit.format.names import MODEL, in_group, inner_name
from ckptkit.live.comparison import LoadOptions, Report, check_wrappers, compare, give_back
from ckptkit.live.fill import by_sharing, fill, fill_once
from ckptkit.live.resume import hand_over
from ckptkit.live.snapshot import rules_of, take_snapshot, with_optimizers
from ckptkit.live.state.entries import StateMismatchError
from ckptkit.live.state.extra import Extra
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.ranks import (
    World,
    bytes_of_first,
    current_world,
    next_name,
    ranks_here,
    ranks_of,
    reading_threads,
)
from ckptkit.live.state.tensors import checksum, devices_of, synchronize
from ckptkit.live.state.trees import put_tensors
from ckptkit.live.wrappers import Training, TrainingObjects
from ckptkit.model.document import parse_seconds, size_text
from ckptkit.storage import Options, Store

log = logging.getLogger("ckptkit.live")

NOT_LOADED = "the step was not loaded"
# What torch calls what `get_extra_state` gives.
_EXTRA_STATES = (f"{MODEL}/_extra_state", "._extra_state")


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
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    storage_options: Options | None = None,
    **objects: Unpack[TrainingObjects],
) -> Restored:
    """Load a step, or the newest committed step of a run, into live objects; every rank calls it
    alike, and rank 0 reads the manifest for all.

    `objects` are `model=`, `optimizer=`, `scheduler=`, `dataloader=`, `scaler=` and `state=`.
    `skip` names groups that are left as they are (`skip=["dataloader"]`; * and ? mean several).
    With `partial` what the step lacks stays as it is; with `cast` other dtypes are converted.
    Without `verify` nothing is compared with its checksum.
    With `read_once`, what several ranks need alike is read by one of them, and reaches the others
    through the job's own network.
    """
    world = current_world()
    ranks = ranks_of(world, next_name(world, "load"), parse_seconds(timeout, "timeout"), NOT_LOADED)
    with failing_together(ranks):
        training = Training.of(skip, **objects)
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


@uncollected()
def load_into(
    training: Training,
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
    with failing_together(ranks), open_together(store, step, ranks) as checkpoint:
        if training.model is not None:
            cuts = rules_of(training, options.rules)
            training.model.extra_shapes = _extra_shapes(checkpoint, cuts)
        # What optimizers are to keep is known from the step only.
        before = look(replace(training, optimizers=()))
        match = compare(checkpoint, training, before, ranks, options)
        # Nothing has changed on any rank when one has found that the step does not fit.
        ranks.wait()
        training = match.training
        names = training.names(before.entries)
        for optimizer in training.optimizers:
            optimizer.prepare(names, match.optimizers.of_kind(optimizer.kind))
        snapshot = with_optimizers(before, training, ranks) or look(training)
        check_wrappers(snapshot, match.objects)
        fillings, fresh = match.to_fill(checkpoint, snapshot)
        verify = options.verify and checkpoint.manifest.is_checked
        threads = reading_threads(world, checkpoint.store.abilities, options.threads)
        options = replace(options, verify=verify, threads=threads)
        topology = snapshot.topology
        rest = [(_with_memory_for_each(held), array) for held, array in fillings]
        shared_memory = [
            (held, own.local)
            for (held, _), (own, _) in zip(fillings, rest, strict=True)
            if own is not held
        ]
        # Another stream may still compute what is now overwritten.
        synchronize(devices_of(held.local for held, _ in fillings))
        if options.read_once and world.size > 1:
            rest = fill_once(checkpoint, topology, rest, ranks, options)
        alone, shared = by_sharing(topology, rest, ranks_here(world), parts=not verify)
        fill(checkpoint, topology, alone, options, alone=True)
        fill(checkpoint, topology, shared, options, alone=False)
        for held, values in shared_memory:
            _take_shared(held, values)
        # Some wrappers take over in a collective, which one that failed would not come to.
        ranks.wait()
        hand_over(training, snapshot, match.values, match.optimizers.documents)
        give_back(match, snapshot.trees | fresh, world.rank)
        ranks.wait()
    if world.rank == 0:
        seconds, nbytes = time.perf_counter() - started, sum(h.local.nbytes for h, _ in fillings)
        log.info(
            "loaded step %d of %s: %s on rank 0 in %.2f s, %s/s",
            checkpoint.step,
            checkpoint.location,
            size_text(nbytes),
            seconds,
            size_text(nbytes / seconds),
        )
    extra = {
        name: replace(item, value=put_tensors(item.value, None, item.name))
        for name, item in in_group("extra", match.objects).items()
    }
    return Restored(checkpoint.step, Extra(extra, match.data), match.report)


def _with_memory_for_each(held: LiveTensor) -> LiveTensor:
    """The tensor with memory of its own for each element: where several share it, as `expand` makes
    them, each would get the value that is read last.
    """
    local = held.local
    if local.is_contiguous() or not _shared_axes(local):
        return held
    return held.in_memory(torch.empty(local.shape, dtype=local.dtype, device=local.device))


def _shared_axes(local: torch.Tensor) -> list[int]:
    return [n for n, step in enumerate(local.stride()) if not step and local.shape[n] > 1]


def _take_shared(held: LiveTensor, values: torch.Tensor) -> None:
    """Fill a tensor whose elements share memory, with values that must be the same for those."""
    one, given = held.local, values
    for axis in _shared_axes(held.local):
        one, given = one.narrow(axis, 0, 1), given.narrow(axis, 0, 1)
    with torch.no_grad():
        one.copy_(given)
    if checksum(held.name, held.local) != checksum(held.name, values):
        raise StateMismatchError(
            "its elements share memory here (as `expand` makes them), and differ in the step",
            where=held.name,
            hint="give it memory of its own, with clone(), before it is loaded",
        )


def _extra_shapes(checkpoint: Checkpoint, rules: HandCuts) -> dict[str, tuple[int, ...]]:
    """The shapes that tensors which `get_extra_state` gave have in a step, by their names in the
    model; not of those that are cut by hand.
    """
    names = [name for name in checkpoint.names if name.endswith(_EXTRA_STATES)]
    shapes = {name: checkpoint.info(name).shape for name in names}
    return {inner_name(n, "buffer"): s for n, s in shapes.items() if not rules.find(n, s)}


def open_together(store: Store, step: int | None, ranks: Ranks) -> Checkpoint:
    """Open what rank 0 finds in the store: a collective call, in the thread that trains. Even while
    others are being saved, all ranks open the same step: rank 0 reads the manifest for all.
    """
    data: bytes | None = None
    name, foreign, place = "", None, ("", b"")
    if ranks.rank == 0:
        # An error here reaches the others before anyone begins to wait for bytes.
        try:
            (_, name), data = stored_manifest(store, step)
        except NotFoundError as error:
            foreign = open_foreign(store, error)
            name = foreign.folder.name
            place = str(foreign.store.location), foreign.manifest.table.digest
    if ranks.world_size > 1:
        size, name, place = ranks.share(lambda: (len(data or b""), name, place))
        if size:
            # A rank that has left would be missing in the collective: nobody begins it without all.
            ranks.wait()
            data = bytes_of_first(data, size)
    if data is None:
        with failing_together(ranks):  # of a foreign one there is nothing to send
            return foreign or open_alike(store, name, *place)
    folder = StepFolder(store, name)
    return Checkpoint(folder, decoded_manifest(folder, data))


def attempts(
    steps: Sequence[StepFolder], damaged: list[Damage], *, is_first: bool = False
) -> Iterator[tuple[StepFolder, AbstractContextManager[None]]]:
    """Each of some steps with an attempt: load it inside `with attempt:`, and then break or return.
    Where the load raises FormatError the attempt keeps it back: it is in the log and in `damaged`,
    and the next step comes. The last step's attempt keeps nothing back.

    Where ranks load together, they have to find damage alike: see `raise_alike`. One of them
    `is_first`, and finds out which save it was that is damaged.
    """
    for here, then in zip_longest(steps, steps[1:]):
        yield here, _attempt(here, then, damaged, is_first=is_first)


@contextmanager
def _attempt(
    here: StepFolder, then: StepFolder | None, damaged: list[Damage], *, is_first: bool
) -> Iterator[None]:
    before = stamp(here) if is_first and then is not None else None
    try:
        yield
    except FormatError as error:
        if then is None:
            raise
        damaged.append((here, before, error))
        # The same step elsewhere loses nothing, an older one does.
        level = logging.WARNING if then.name == here.name else logging.ERROR
        places = [(step_number(at.name), at.store.location) for at in (here, then)]
        what = "step %s is damaged in %s, trying step %s in %s: %s"
        log.log(level, what, *places[0], *places[1], error)


def raise_alike(ranks: Ranks, error: Exception | None) -> None:
    """All ranks say what their loads raised, and decide whether to go back: where some found damage
    and none anything else, all raise that. Otherwise who has another error raises it, and the
    others that they did not load because of it: no FormatError, so nobody goes back alone.
    """
    told = None
    # A rank that only knows that others did not come has no reason of its own.
    if error is not None and not isinstance(error, PeerError):
        told = isinstance(error, FormatError), Failure.of(ranks.rank, error).said()
    # What counts is what is no damage, and then bytes that are not as they were written.
    found: tuple[bool, bytes] | None = ranks.agree(
        told,
        lambda heard: min(
            (each for each in heard if each is not None),
            key=lambda each: (each[0], Failure.heard(each[1]).kind != CorruptionError.__name__),
            default=None,
        ),
    )
    if found is not None:
        is_damage, said = found
        first = Failure.heard(said)
        kind: type[CkptkitError]
        if is_damage:
            is_corrupt = first.kind == CorruptionError.__name__
            kind = CorruptionError if is_corrupt else FormatError
            says_it = isinstance(error, kind)
        else:
            kind = GivenUpError
            says_it = error is not None and not isinstance(error, FormatError)
        if not says_it:
            raise first.error(NOT_LOADED, kind) from error
    if error is not None:
        raise error


def check_whole(restored: Restored, damaged: Sequence[Damage]) -> None:
    """With `partial`, what the step that was loaded lacks has to be as it was before."""
    left = restored.report.missing + restored.report.reshaped
    read = [folder for folder, _, error in damaged if isinstance(error, CorruptionError)]
    if left and read:
        raise CorruptionError(
            f"step {restored.step} does not have {left[0]}, into which this damaged one was read",
            where=str(read[0]),
            hint="it has values of the damaged step now: make the objects anew, and pass step=",
        )
