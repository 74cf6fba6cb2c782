"""What `Checkpointer.save` does before anything is written: `prepare` looks, agrees, lays out and,
where asked to, stages. The call itself, and what is done after that, is in `checkpointer`; what it
leaves to the next one is a `LastSave`.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
import zlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt
import torch
from torch.distributed.device_mesh import DeviceMesh

from ckptkit.checkpoint.ranks import DEFAULT_TIMEOUT, OneRank, Ranks
from ckptkit.checkpoint.rules_file import fitting_presets, of_first_layer
from ckptkit.checkpoint.workers import DEFAULT_THREADS, Progress, uncollected
from ckptkit.checkpoint.write.plan import PackPlan
from ckptkit.checkpoint.write.writer import HeldKind, Writer
from ckptkit.errors import GivenUpError, PeerError, UsageError
from ckptkit.format.encoding import canonical
from ckptkit.format.names import inner_name, join, matches
from ckptkit.live.snapshot import Outline, Snapshot, rules_of, take_snapshot
from ckptkit.live.state.parts import HandCuts, LiveTensor
from ckptkit.live.state.ranks import (
    Agreement,
    StoreRanks,
    World,
    copying_threads,
    listed,
    put_together,
)
from ckptkit.live.state.tensors import (
    bits_of,
    checksum,
    checksum_of,
    devices_of,
    dtype_of,
    host_memory,
    synchronize,
)
from ckptkit.live.state.topology import Topology
from ckptkit.live.state.trees import Keys, keys_digest, keys_of_some, own_apart, tensors_inline
from ckptkit.live.wrappers import Training
from ckptkit.model import Shard, Strided
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, may_cut
from ckptkit.storage import AlignedBuffer, BufferPool, Store

_THREADS_BESIDE = 2  # the training
_ALIGNMENT = 64

WithValues: TypeAlias = Sequence[tuple[LiveTensor, npt.NDArray[Any]]]
"""Tensors, each with its elements."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save; none of it changes what a load gives back."""

    overwrite: bool = False
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    differing: Sequence[str] = ()
    threads: int | None = None
    timeout: float = DEFAULT_TIMEOUT
    progress: Progress | None = None
    mesh: DeviceMesh | None = None
    """Names the axes that the model does not."""
    rules: HandCuts = field(default_factory=HandCuts)
    copies_first: bool = False
    """Whether the state may change as soon as a save is prepared."""


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """One save of one rank, which any thread may commit."""

    writer: Writer
    ranks: StoreRanks | OneRank
    cancelled: threading.Event
    nbytes: int
    """The bytes of the whole job."""
    basis: Basis | None
    """None where there is something to find out each time."""
    compared: Sequence[tuple[str, int, int]] | None
    """Name, first rank and checksum of what has to be alike; None where no rank compares any."""

    def check_replicas(self) -> None:
        """Refuse the save where what has to be alike is not, before it is committed: in `prepare` a
        training would wait for the slowest rank.
        """
        if self.compared is None:
            return
        # Mostly all ranks say the same, of 100,000 tensors perhaps: then one word is enough.
        digest = hashlib.sha256(repr(self.compared).encode()).digest()
        if self.ranks.agree(digest, lambda heard: len(set(heard)) == 1):
            return

        def conclude(heard: list[list[tuple[str, int, int]]]) -> tuple[int, str, list[int]]:
            kept: dict[tuple[str, int], int] = {}
            others: dict[str, list[int]] = {}
            for rank, said in enumerate(heard):
                for name, first, crc in said:
                    if kept.setdefault((name, first), crc) != crc:
                        others.setdefault(name, []).append(rank)
            name = next(iter(others), "")
            return len(others), name, others.get(name, [])

        count, name, those = self.ranks.agree(self.compared, conclude)
        if count:
            raise _not_alike(name, those, count)

    def cancel(self) -> None:
        """From another thread: write nothing more and do not commit, if it is not too late."""
        self.cancelled.set()
        self.ranks.cancel("the save was cancelled")


@uncollected()
def prepare(
    store: Store,
    step: int,
    training: Training,
    extra: Mapping[str, object] | None,
    options: SaveOptions,
    last: LastSave,
    *,
    world: World,
    ranks: StoreRanks | OneRank,
) -> PreparedSave:
    """Everything of a save that is done while the training waits. All ranks call it alike; what
    goes wrong on one has to reach the others by the caller's `failing_together`.
    """
    # Look at what this rank holds. Where that is not as its placements say it is moved, and what
    # lies on devices is copied into host memory. For tensors on the CPU only `stage` sees to that.
    basis = last.basis
    snapshot = take_snapshot(
        world,
        training,
        extra=extra,
        mesh=options.mesh,
        rules=options.rules,
        ranks=ranks,
        outlined=True,
        last=None if basis is None else basis.outline,
    )
    tensors: Sequence[LiveTensor] = [
        held if held.own is None else held.moved(snapshot.topology) for held in snapshot.tensors
    ]
    on_devices = not all(held.local.is_cpu for held in tensors)
    tensors = last.hold(tensors) if on_devices else tensors
    # The elements of each, made once: of 100,000 tensors that takes a tenth of a second.
    values = [(held, bits_of(held.name, held.local)) for held in tensors]

    # Agree with the other ranks, and lay out what this one writes of it. Where tensors are those of
    # the last save, what was found out for them then holds.
    known = basis if basis is not None and snapshot.outline is basis.outline else None
    agreed = _agree(ranks, step, training, snapshot, values, options, known)
    cancelled = threading.Event()

    def progress(nbytes: int) -> None:
        if cancelled.is_set():
            raise GivenUpError("the save was cancelled", where=f"step {step}")
        if options.progress is not None:
            options.progress(nbytes)

    writer = Writer(
        store,
        step=step,
        strategy=snapshot.topology.strategy,
        rank=world.rank,
        barrier=ranks,
        details=agreed.details,
        overwrite=options.overwrite,
        chunk_bytes=options.chunk_bytes,
        threads=_writing_threads(store, options, world),
        progress=progress,
    )
    _lay_out(writer, training, snapshot, values, agreed, options, last)

    # Stage: what came from devices is a copy already.
    if options.copies_first and not on_devices:
        writer.stage(last.pool, threads=copying_threads(world))
    return PreparedSave(writer, ranks, cancelled, agreed.nbytes, agreed.basis, agreed.compared)


@dataclass(frozen=True, slots=True, eq=False)
class _Agreed:
    """What the ranks of a job have told each other before a save."""

    details: dict[str, Any]
    preset: str | None
    agreement: Agreement
    keys_of_some: Mapping[Keys, list[int]]
    compared: Sequence[tuple[str, int, int]] | None
    nbytes: int
    basis: Basis | None


def _agree(
    ranks: Ranks,
    step: int,
    training: Training,
    snapshot: Snapshot,
    values: WithValues,
    options: SaveOptions,
    known: Basis | None,
) -> _Agreed:
    """Find out with the other ranks what each of them saves. Where tensors are those of the last
    save, what is `known` of them need not be found out again.
    """
    # What only some pipeline stages have, or owners of ZeRO-1.
    topology, trees = snapshot.topology, snapshot.open_trees
    mesh, pipeline = topology.strategy.mesh, topology.pipeline
    parameters = {held.name: held for held, _ in values if held.role == "param"}

    def fingerprint(name: str) -> object:
        """What a parameter holds; buffers of one name may differ from stage to stage."""
        if (held := parameters.get(name)) is None:
            return None
        return [str(dtype_of(name, held.local)), list(held.shape), checksum(name, held.local)]

    names = [*(held.name for held in snapshot.tensors), *snapshot.tied]
    # Extra state is that of the first rank which has the module, as buffers are.
    extra = tensors_inline(snapshot.values, "model")
    agreement = put_together(ranks, topology, names, snapshot.optimizers, extra, fingerprint)

    # The step and its details, which stages may tell differently, and what ranks may have of their
    # own: keys of nested dictionaries, and values that nothing keeps the same, which are compared
    # before the commit. Ranks meet here for such keys only: else a late one keeps nobody waiting.
    numbered = known.replicas if known else _replicas(snapshot, options.differing)
    replicas = [(values[n][0].name, first, checksum_of(values[n][1])) for n, first in numbered]
    plain = _plain_values(snapshot, extra, options.differing)
    keys = keys_digest(trees)
    # With stages all ranks meet: the first one may have nothing to compare where others have.
    compares = ranks.world_size > 1 and bool(replicas or trees or pipeline is not None)

    wanted, details, first_keys, compares, theirs, preset = ranks.share(
        lambda: (step, training.details(), keys, compares, plain, _preset(snapshot, options, known))
    )
    if wanted != step:
        raise UsageError(f"rank 0 saves step {wanted}, rank {ranks.rank} another one", value=step)
    compared = None
    if compares:
        # Stages of a pipeline have groups of their own: the first rank of each is what counts.
        here = enumerate(mesh.coords(ranks.rank))
        first = mesh.rank(tuple(at if axis == pipeline else 0 for axis, at in here))
        compared = [*((name, first, crc) for name, crc in plain.items()), *replicas]
    elif apart := [name for name, crc in plain.items() if theirs.get(name, crc) != crc]:
        raise _not_alike(apart[0], [ranks.rank], len(apart))
    some = keys_of_some(ranks, trees, differs=keys != first_keys) if first_keys else {}

    # Stages are taken to be alike.
    stages = 1 if pipeline is None else mesh.sizes[pipeline]
    nbytes = known.nbytes if known else stages * sum(held.nbytes for held in snapshot.tensors)
    basis = None
    if snapshot.outline is not None and not some:
        basis = Basis(snapshot.outline, numbered, agreement.elsewhere, preset, nbytes)
    return _Agreed(details, preset, agreement, some, compared, nbytes, basis)


def _lay_out(
    writer: Writer,
    training: Training,
    snapshot: Snapshot,
    values: WithValues,
    agreed: _Agreed,
    options: SaveOptions,
    last: LastSave,
) -> None:
    """Add to what this rank writes all that no earlier stage saves, and what it alone has: as the
    last time where nothing but the values is new.
    """
    topology, agreement = snapshot.topology, agreed.agreement
    objects = dict(snapshot.objects)
    if some := agreed.keys_of_some:
        objects, own = own_apart(topology, objects, [held for held, _ in values], some)
        values = [(held, bits) for held, (_, bits) in zip(own, values, strict=True)]
    if topology.rank == 0:
        of_all = {"model": dict(agreement.values), "optimizer": agreement.optimizers}
        objects |= {group: known for group, known in of_all.items() if known}
    values = [each for each in values if each[0].name not in agreement.elsewhere]
    writer.like = last.plan
    if (plan := last.plan) and agreed.basis is not None and agreed.basis == last.basis:
        pairs = zip(values, plan.parts, strict=True)
        writer.add_again([None if part.is_empty else bits for (_, bits), part in pairs])
    else:
        rules = rules_of(training, options.rules)
        sliced = _sliced(topology, [rules, HandCuts.of(agreed.preset)])
        # Layers are alike: what one has found out holds for all.
        kinds: dict[Hashable, HeldKind] = {}
        for held, bits in values:
            name, shape, dtype = held.name, held.shape, dtype_of(held.name, held.local)
            is_large = may_cut(math.prod(shape) * dtype.itemsize, options.chunk_bytes)
            dims = sliced(held) if is_large else None
            key = shape, dtype.name, id(held.placements), held.alike_along, held.role, dims
            if key not in kinds:
                placements = held.saved_placements(topology)
                kinds[key] = writer.kind(name, shape, dtype, placements, held.role, dims)
            kind = kinds[key]
            writer.add_alike(name, kind, None if kind.part.is_empty else bits, held.of)
        for name, first in snapshot.tied.items():
            if name not in agreement.elsewhere:
                writer.add_alias(name, first)
    for group, value in objects.items():
        writer.add_object(group, value)


def _writing_threads(store: Store, options: SaveOptions, world: World) -> int:
    if options.threads is not None:
        return options.threads
    # Each thread of the background takes a thirtieth from a training that keeps all cores busy: a
    # rank with fewer than two cores for itself gets one.
    is_beside = options.copies_first and not store.abilities.waits_for_answers
    return min(_THREADS_BESIDE, copying_threads(world)) if is_beside else DEFAULT_THREADS


def _preset(snapshot: Snapshot, options: SaveOptions, known: Basis | None) -> str | None:
    """The preset that this model's names call for, where a tensor is large enough to be cut."""
    if known is not None:
        return known.preset
    largest = max((held.nbytes for held in snapshot.tensors), default=0)
    if not may_cut(largest, options.chunk_bytes):
        return None
    names = [inner_name(held.name, "param") for held in snapshot.tensors if held.role == "param"]
    fitting = fitting_presets(names)
    return fitting[0] if len(fitting) == 1 else None


def _sliced(
    topology: Topology, rules: Sequence[HandCuts]
) -> Callable[[LiveTensor], tuple[int, ...] | None]:
    """Which dims of a tensor layouts may cut, where rules know the tensor, or where this layout is
    one that cuts more than the first.
    """
    says_all = any(axis.kind in ("tp", "ep") for axis in topology.strategy.mesh.axes)
    by_rules: dict[Hashable, Collection[int] | None] = {}  # layers are alike

    def sliced(held: LiveTensor) -> tuple[int, ...] | None:
        of = None if held.of is None else of_first_layer(held.of)
        name = of_first_layer(held.name)
        kind = name, of, held.shape
        if kind not in by_rules:
            found = (each.sliced(name, held.shape, of=of) for each in rules)
            by_rules[kind] = next((dims for dims in found if dims is not None), None)
        dims = by_rules[kind]
        if dims is None and says_all:
            dims = {how.dim for how in held.placements.values() if isinstance(how, Shard | Strided)}
        # The first one sharded data parallelism may cut, whatever else does.
        return dims if dims is None else tuple(n for n in range(len(held.shape)) if n in {0, *dims})

    return sliced


def _plain_values(
    snapshot: Snapshot, values: Mapping[str, Any], differing: Sequence[str]
) -> dict[str, int]:
    """The checksums of what is no tensor, has to be the same on all ranks, and nobody said may
    differ: extra state, and what an optimizer says in its groups and counts of its parameters.

    What else it keeps of a parameter may be a rank's own, as the last loss is that LBFGS keeps.
    """
    found = {join("model", name): value for name, value in values.items()}
    groups = [group for document in snapshot.optimizers for group in document["groups"]]
    if groups:  # what only some ranks say would be lost, or given to all
        found[join("optimizer", "param_groups")] = [sorted(group["options"]) for group in groups]
    for number, group in enumerate(groups):
        for key, value in group["options"].items():
            found[join("optimizer", "param_groups", str(number), key)] = value
    # Of ZeRO-1 each rank has the state of parameters of its own.
    if groups and not any(axis.kind == "zero1" for axis in snapshot.topology.strategy.mesh.axes):
        found["optimizer/state"] = {
            f"{parameter}/{key}": value
            for document in snapshot.optimizers
            for parameter, said in document["values"].items()
            for key, value in said.items()
            if isinstance(value, int)
        }
    return {
        name: zlib.crc32(canonical(value, name))
        for name, value in found.items()
        if not matches(differing, name, name.partition("/")[2])
    }


def _replicas(snapshot: Snapshot, differing: Sequence[str]) -> list[tuple[int, int]]:
    """The tensors to compare between ranks: nothing keeps them the same, only the first rank's is
    saved, and nobody said that they may differ. Each by its number, and that first rank.

    Parameters of mere copies of a model are not compared: ranks need not meet for them, and one
    that is lost keeps nobody waiting. Along an axis that cuts they are: who forgot a rule for one
    that was cut by hand would lose what the other ranks have.
    """
    mesh = snapshot.topology.strategy.mesh
    cutting = {axis.name for axis in mesh.axes if axis.kind not in ("ddp", "zero1", "pp")}
    coords = list(zip(mesh.axes, mesh.coords(snapshot.topology.rank), strict=True))
    found = []
    kinds: dict[Hashable, frozenset[str]] = {}  # layers are alike
    for number, held in enumerate(snapshot.tensors):
        kind = id(held.placements), held.alike_along
        if (copied := kinds.get(kind)) is None:
            unsure = snapshot.topology.unsure(held.alike_along)
            copied = kinds[kind] = unsure - held.placements.keys()
        if not (apart := copied - held.of_first):
            continue
        is_asked = held.role in ("buffer", "other") or copied & cutting
        if is_asked and not matches(differing, held.name, inner_name(held.name, held.role)):
            first = mesh.rank(tuple(0 if axis.name in apart else at for axis, at in coords))
            found.append((number, first))
    return found


def _not_alike(name: str, those: Sequence[int], count: int) -> PeerError:
    more = f", and so are {count - 1} more" if count > 1 else ""
    return PeerError(
        f"the values of rank {listed(those)} are not those of the first rank that holds the same, "
        f"which alone would be saved{more}",
        where=name,
        hint="if it is cut by hand, say how in rules={…}; in state={…} PerRank(…) keeps each "
        f"rank's; differing=[\"{name}\"] (names or patterns) saves the first rank's knowingly",
    )


class LastSave:
    """What the last save of a job leaves to the next one; before the first that is nothing.

    - Memory of the size of this rank's state: pinned where a device copies into it, a pool of one
      buffer where the writer itself copies from host memory.
    - The plan, and the `Basis` that it rests on: mostly only values have changed, and both hold.
      Without a basis the writer itself compares what is added with what its plan was made for.

    Besides the memory that is about 2.5 KB an array.
    """

    def __init__(self) -> None:
        self.plan: PackPlan | None = None
        self.basis: Basis | None = None
        self.pool = _PoolOfOne(limit=sys.maxsize)
        self._memory: torch.Tensor | None = None

    def hold(self, tensors: Sequence[LiveTensor]) -> list[LiveTensor]:
        """The same tensors in this memory; complete, and independent of those, on return."""
        padded = (-(-held.local.nbytes // _ALIGNMENT) * _ALIGNMENT for held in tensors)
        *starts, size = accumulate(padded, initial=0)
        devices = devices_of(held.local for held in tensors)
        pinned = any(device.type == "cuda" for device in devices)
        # What other streams still compute is part of the state, and copies here wait for none.
        synchronize(devices)
        memory = self._memory
        if memory is None or memory.nbytes < size or memory.is_pinned() < pinned:
            memory = self._memory = None  # freed first: two would be twice the promised memory
            memory = self._memory = host_memory(size, devices)
        copies = []
        for held, start in zip(tensors, starts, strict=True):
            local = held.local
            copy = memory[start : start + local.nbytes].view(local.dtype).view(local.shape)
            # Torch copies the bits of a conjugate and then turns the copy, on the host, whether
            # they have arrived or not: so it is turned before.
            copy.copy_(local.resolve_conj().resolve_neg(), non_blocking=True)
            copies.append(held.in_memory(copy))
        synchronize(devices)
        return copies

    def keep(self, save: PreparedSave) -> None:
        """Remember what was found out for a save that is committed."""
        self.plan, self.basis = save.writer.plan, save.basis

    def close(self) -> None:
        """Free the memory."""
        self._memory = self.plan = self.basis = None
        self.pool.clear()


class Basis(NamedTuple):
    """What the plan of a save rests on: what this rank has, and what other ranks have said."""

    outline: Outline
    replicas: list[tuple[int, int]]
    """The tensors that are compared between ranks: their numbers, and the first rank of each."""
    elsewhere: frozenset[str]
    """The tensors that an earlier stage saves."""
    preset: str | None
    nbytes: int


class _PoolOfOne(BufferPool):
    """Keeps the last buffer, whatever its size, and never two: states grow by optimizer state."""

    def take(self, size: int, *, congruent_to: int = 0) -> AlignedBuffer:
        if not self.has(size, congruent_to=congruent_to):
            self.clear()
        return super().take(size, congruent_to=congruent_to)
