"""Loading a step into live objects of any layout: first everything is compared, then memory is
filled, then the objects take over what is theirs.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial as bound
from itertools import accumulate, pairwise
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.places import Place, StepFolder, decoded_manifest, store_at, stored_manifest
from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, Ranks, failing_together
from ckptkit.checkpoint.read.checkpoint import Array, Checkpoint, ReadMany, open_alike, open_foreign
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.workers import uncollected
from ckptkit.errors import LayoutError, NotFoundError
from ckptkit.live.comparison import (
    Filling,
    LoadOptions,
    Report,
    check_wrappers,
    compare,
    give_back,
)
from ckptkit.live.resume import hand_over
from ckptkit.live.snapshot import take_snapshot, with_optimizers
from ckptkit.live.state.extra import Extra
from ckptkit.live.state.parts import HandCuts, LiveTensor, indices
from ckptkit.live.state.ranks import (
    Axes,
    World,
    bytes_of_first,
    copying_threads,
    current_world,
    group_along,
    next_name,
    ranks_here,
    ranks_of,
    wire,
)
from ckptkit.live.state.tensors import (
    bits_of,
    devices_of,
    dtype_of,
    host_memory,
    synchronize,
    torch_dtype,
)
from ckptkit.live.state.topology import Topology
from ckptkit.live.state.trees import put_tensors
from ckptkit.live.wrappers.training import Training, TrainingObjects
from ckptkit.model import Box, Replicate
from ckptkit.model.document import size_text
from ckptkit.plan.read import Pieces, batches, readable_pieces, readers_of
from ckptkit.storage import Options, Store

log = logging.getLogger("ckptkit.live")

NOT_LOADED = "the step was not loaded"

_TURN_BYTES = 32 << 20
_AT_HAND = 4  # turns: one is given while the others are read, each of which begins and ends slowly
_PIECE_BYTES = 8 << 20  # small enough to spread evenly over readers
_ALIGNMENT = 64
_PAST_CACHE = 1.3  # past the page cache a device gives bytes so many times as fast


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
        # What optimizers are to keep is known from the step only.
        before = look(replace(training, optimizers=()))
        match = compare(checkpoint, training, before, ranks, options)
        # Nothing has changed on any rank when one has found that the step does not fit.
        ranks.wait()
        training = match.training
        names = training.names(before.entries)
        for optimizer in training.optimizers:
            optimizer.prepare(names, match.optimizers.of_kind(optimizer.kind))
        snapshot = with_optimizers(before, training) or look(training)
        check_wrappers(snapshot, match.objects)
        fillings, fresh = match.to_fill(checkpoint, snapshot)
        threads = options.threads
        if threads is None and not checkpoint.store.abilities.waits_for_answers:
            # Elsewhere they wait rather than copy: as many as the store likes.
            threads = copying_threads(world)
        verify = options.verify and checkpoint.manifest.is_checked
        read = bound(
            checkpoint.read_many, verify=verify, threads=threads, progress=options.progress
        )
        topology, rest = snapshot.topology, fillings
        # Another stream may still compute what is now overwritten.
        synchronize(devices_of(held.local for held, _ in fillings))
        if options.read_once and world.size > 1:
            rest = fill_once(checkpoint, topology, rest, ranks, bound(read, alone=True))
        for alone, some in _told_apart(topology, rest, ranks_here(world), parts=not verify).items():
            fill(checkpoint, topology, some, bound(read, alone=alone))
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
        name.removeprefix("extra/"): replace(item, value=put_tensors(item.value, None, name))
        for name, item in match.objects.items()
        if name.startswith("extra/")
    }
    return Restored(checkpoint.step, Extra(extra, match.data), match.report)


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


# Filling memory from the arrays of a step: each rank for itself, or what several need alike by one
# of them, which gives it to the others.


def fill(
    checkpoint: Checkpoint, topology: Topology, fillings: Sequence[Filling], read: ReadMany
) -> None:
    """Fill tensors: those in host memory directly, the others through memory of a bounded size.

    A step has raw elements, which numpy can put in place only where the tensor has these too: what
    lies on a device, is of another dtype, or is a conjugate view, torch has to copy.
    """
    known: dict[Any, list[tuple[Box, tuple[Any, ...]]]] = {}  # layers are alike
    direct: list[Any] = []
    staged: list[Filling] = []
    for held, array in fillings:
        local = held.local
        is_alike = array.dtype == dtype_of(held.name, local)
        if not (is_alike and local.is_cpu) or local.is_conj() or local.is_neg():
            staged.append((held, array))
            continue
        bits = bits_of(held.name, local)
        kind = held.shape, local.shape, id(held.placements), held.own
        if kind not in known:
            known[kind] = _boxes(topology, held)
        direct += [(array.name, box, bits[inside]) for box, inside in known[kind]]
    read(direct)
    if staged:
        plan = _shares(checkpoint, topology, staged)
        if errors := _FillByTurns([topology.rank], topology.rank, None, plan).run(read):
            raise errors[0]


def _repeating(topology: Topology, held: LiveTensor) -> Axes:
    """The axes along which ranks hold the same of a tensor."""
    return tuple(
        number
        for number, axis in enumerate(topology.strategy.mesh.axes)
        if axis.size > 1 and isinstance(held.placements.get(axis.name, Replicate()), Replicate)
    )


def _told_apart(
    topology: Topology, fillings: Sequence[Filling], here: int, *, parts: bool
) -> dict[bool, list[Filling]]:
    """What to fill, told apart: under True what no other of the `here` ranks of this machine reads,
    by whole chunks or by `parts` of them. Where much is read along, such as the rest of rows, that
    is what others need.
    """
    # Their numbers follow each other, so ranks that are further apart are on other machines.
    sizes = topology.strategy.mesh.sizes
    found: dict[bool, list[Filling]] = {}
    known: dict[tuple[int, int, int], bool] = {}  # layers are alike
    for held, array in fillings:
        kind = id(held.placements), id(held.own), id(array.info.kind)
        if kind not in known:
            axes = _repeating(topology, held)
            pieces = [Pieces(array.grid, box) for box in held.part(topology).boxes]
            read = sum(each.reach(parts=parts) for each in pieces)
            is_mine = here == 1 or read <= _PAST_CACHE * held.local.numel()
            known[kind] = is_mine and all(math.prod(sizes[axis + 1 :]) >= here for axis in axes)
        found.setdefault(known[kind], []).append((held, array))
    return found


def _boxes(topology: Topology, held: LiveTensor) -> list[tuple[Box, tuple[Any, ...]]]:
    """The boxes of a tensor that this rank holds, and where each is in its memory: an index with an
    ellipsis, so that it also gives a view of what has no dims.
    """
    part, shape = held.part(topology), tuple(held.local.shape)
    if not part.boxes and 0 in shape:
        return []  # torch's empty parts have lost their other dims
    if part.shape != shape:
        raise LayoutError(
            f"this rank should hold {part.shape} of {held.shape}, but the tensor here has {shape}",
            where=held.name,
            hint="if it was cut by hand, say how with rules={…}",
        )
    places = [here for _, here in indices(part, held.shape)]
    return [(box, (*place, ...)) for box, place in zip(part.boxes, places, strict=True)]


def fill_once(
    checkpoint: Checkpoint,
    topology: Topology,
    fillings: Sequence[Filling],
    ranks: Ranks,
    read: ReadMany,
) -> list[Filling]:
    """Fill what several ranks need alike, and return what is this rank's alone. A collective call
    of the default process group.

    Ranks that differ only along axes which repeat a tensor need the same boxes of it. Each such
    group cuts what it needs into pieces, and every rank of it computes alike who reads which.
    """
    mesh = topology.strategy.mesh
    by_axes: dict[Axes, list[Filling]] = {}
    for held, array in fillings:
        by_axes.setdefault(_repeating(topology, held), []).append((held, array))
    own = by_axes.pop((), [])
    plans = {axes: _shares(checkpoint, topology, each) for axes, each in by_axes.items()}
    agreed = _agreed(ranks, topology, plans)
    errors: list[Exception] = []
    by_turns: _FillByTurns | None = None
    for axes in agreed:
        # Made by all ranks, also by those that need nothing along these axes.
        members, group = group_along(mesh.sizes, mesh.coords(topology.rank), axes)
        by_turns = None  # before the next one is made: the memory of one is what was promised
        if axes in plans:
            by_turns = _FillByTurns(members, topology.rank, group, plans[axes])
        # A rank without the memory would not come to a broadcast that others wait in.
        ranks.wait()
        if by_turns is not None:
            errors += by_turns.run(read)
    for axes in plans.keys() - set(agreed):
        own += by_axes[axes]
    if errors:
        raise errors[0]
    return own


@dataclass(frozen=True, slots=True, eq=False)
class _SharedBox:
    """A box that a group of ranks needs, and where it goes on this one."""

    array: Array
    box: Box
    target: torch.Tensor
    order: tuple[int, int]
    """The pack and the offset of its first chunk."""

    @property
    def nbytes(self) -> int:
        """Its bytes, as the step has them."""
        return self.box.size * self.array.dtype.itemsize

    @property
    def room(self) -> int:
        """The bytes that it takes in a turn."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


def _shares(
    checkpoint: Checkpoint, topology: Topology, fillings: Sequence[Filling]
) -> list[_SharedBox]:
    """What a group of ranks needs of some tensors, in the order in which it lies in the packs."""
    manifest, found = checkpoint.manifest, []
    for held, array in fillings:
        grid, start = array.grid, checkpoint.first_row(array.name)
        for box, inside in _boxes(topology, held):
            memory = held.local[inside]
            for piece in readable_pieces(grid, box, array.dtype.itemsize, _PIECE_BYTES):
                row = start + grid.flat(tuple(span[0] for span in grid.span(piece)))
                order = int(manifest.pack[row]), int(manifest.offset[row])
                there: tuple[Any, ...] = (*piece.within(box), ...)
                found.append(_SharedBox(array, piece, memory[there], order))
    return sorted(found, key=lambda share: (share.order, share.array.name, share.box.offset))


def _agreed(ranks: Ranks, topology: Topology, plans: dict[Axes, list[_SharedBox]]) -> list[Axes]:
    """The axes along which all ranks of every group have come to the same plan.

    Where they have not, as when one passes other objects, all of them read for themselves.
    """
    mesh = topology.strategy.mesh

    def same_for_all(heard: list[list[tuple[Axes, str]]]) -> list[Axes]:
        known: dict[tuple[Axes, Axes], list[str]] = {}
        for rank, said in enumerate(heard):
            for axes, digest in said:
                rest = tuple(at for axis, at in enumerate(mesh.coords(rank)) if axis not in axes)
                known.setdefault((axes, rest), []).append(digest)
        wrong = {
            axes
            for (axes, _), digests in known.items()
            if len(set(digests)) > 1 or len(digests) != math.prod(mesh.sizes[axis] for axis in axes)
        }
        if wrong:
            log.warning(
                "ranks that repeat each other want different tensors: each reads for itself"
            )
        return sorted({axes for axes, _ in known} - wrong)

    mine = []
    for axes, plan in sorted(plans.items()):
        digest = hashlib.sha256()
        for share in plan:
            digest.update(repr((share.array.name, share.box, share.array.dtype)).encode())
        mine.append((axes, digest.hexdigest()))
    agreed: list[Axes] = ranks.agree(mine, same_for_all)
    return agreed


class _FillByTurns:
    """Fills tensors by turns, through memory of a bounded size: in each turn every rank of a group
    reads a batch, and then gives it to all. A group of one rank fills what no read can directly.

    A rank whose reading fails takes part in all broadcasts nevertheless, and raises at the end:
    nobody waits for it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
        plan: Sequence[_SharedBox],
    ) -> None:
        self._ranks = ranks
        self._group = group
        self._me = ranks.index(rank)
        readers = readers_of([share.nbytes for share in plan], len(ranks))
        # By place in the group, what each rank reads in each turn, with where it begins there.
        self._turns: list[list[list[tuple[int, _SharedBox]]]] = []
        largest = 0
        for place in range(len(ranks)):
            own = [share for share, reader in zip(plan, readers, strict=True) if reader == place]
            starts = list(accumulate((share.room for share in own), initial=0))
            runs = batches([b - a for a, b in pairwise(starts)], _TURN_BYTES)
            largest = max([largest, *(starts[last] - starts[first] for first, last in runs)])
            self._turns.append(
                [[(starts[n] - starts[i], own[n]) for n in range(i, j)] for i, j in runs]
            )
        device = wire() if len(ranks) > 1 else torch.device("cpu")
        self._devices = devices_of([torch.empty(0, device=device), *(each.target for each in plan)])
        self._own = [host_memory(largest, self._devices) for _ in self._turns[self._me][:_AT_HAND]]
        # What others give arrives here, and on a device also what this rank gives leaves from here.
        if device.type == "cpu":
            self._wired = host_memory(largest if len(ranks) > 1 else 0, self._devices)
        else:
            self._wired = torch.empty(largest, dtype=torch.uint8, device=device)

    def run(self, read: ReadMany) -> list[Exception]:
        """Fill all; what went wrong on this rank is returned when the others have theirs."""
        errors: list[Exception] = []
        mine = self._turns[self._me]

        def read_turn(turn: int) -> None:
            if errors:
                return
            memory, wanted = self._own[turn % _AT_HAND], []
            for start, share in mine[turn]:
                raw = memory[start : start + share.nbytes].numpy()
                bits = raw.view(share.array.dtype.bits)
                wanted.append((share.array.name, share.box, bits.reshape(share.box.shape)))
            try:
                read(wanted)
            except Exception as error:  # noqa: BLE001 — as the class says
                errors.append(error)

        ahead = _AT_HAND - 1
        with ThreadPoolExecutor(ahead, thread_name_prefix="ckptkit") as readers:
            reading = [readers.submit(read_turn, turn) for turn in range(len(mine))[:ahead]]
            for turn in range(max(map(len, self._turns), default=0)):
                if turn < len(mine):
                    reading[turn].result()
                if turn + ahead < len(mine):  # into the memory of the turn before
                    reading.append(readers.submit(read_turn, turn + ahead))
                for place, turns in enumerate(self._turns):
                    if turn < len(turns):
                        self._give(place, turn, errors)
        return errors

    @torch.no_grad()
    def _give(self, place: int, turn: int, errors: list[Exception]) -> None:
        """One rank's batch of a turn, from it to all."""
        batch, memory = self._turns[place][turn], self._wired
        start, last = batch[-1]
        room = start + last.room
        if place == self._me and memory.device.type == "cpu":
            memory = self._own[turn % _AT_HAND]
        elif place == self._me:
            memory[:room].copy_(self._own[turn % _AT_HAND][:room])
        if len(self._ranks) > 1:
            dist.broadcast(memory[:room], src=self._ranks[place], group=self._group)
        try:
            for start, share in batch:
                values = memory[start : start + share.nbytes].view(torch_dtype(share.array.dtype))
                share.target.copy_(values.view(share.box.shape), non_blocking=True)
        except Exception as error:  # noqa: BLE001 — as the class says
            errors.append(error)
        # Before the memory is used again; and whatever stream uses the tensors next.
        synchronize(self._devices)
