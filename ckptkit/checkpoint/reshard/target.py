"""The step that will be: all of it but its bytes, and what it costs to make."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ckptkit.checkpoint.places import Place, step_name
from ckptkit.checkpoint.read.checkpoint import open_checkpoint
from ckptkit.checkpoint.read.reader import BAND_BYTES
from ckptkit.checkpoint.reshard.selection import Choice, Selection, choose
from ckptkit.checkpoint.reshard.translation import Chosen
from ckptkit.checkpoint.rules_file import RulesLike, rules_between
from ckptkit.checkpoint.workers import Pace, copy_threads
from ckptkit.errors import LayoutError, UsageError
from ckptkit.foreign.contents import ForeignManifest
from ckptkit.format.array_table import ArrayTable
from ckptkit.format.arrays import ArrayInfo, ArrayKind
from ckptkit.format.encoding import dumps
from ckptkit.format.manifest import Manifest, SaveInfo
from ckptkit.format.names import DIGEST_ALGORITHM, MODEL, OPTIMIZER, inner_name
from ckptkit.model import Layout, Strategy, layout_of
from ckptkit.model.document import parse_size
from ckptkit.model.rules import Rules
from ckptkit.plan.chunks import DEFAULT_CHUNK_BYTES, Owned, target_grid
from ckptkit.plan.cuts import Tensor
from ckptkit.plan.place import decide, place
from ckptkit.plan.read import spread
from ckptkit.storage import Options, Store
from ckptkit.storage.base.store import piece_size
from ckptkit.version import __version__

# What a source says of itself, and no longer of what is made of it.
_OWN = ("resharded", "digest")

SAVE_ID_PREFIX = "resharded-"

DEFAULT_MEMORY = 1 << 30
# Two: threads that write one file through the page cache wait for each other. With many at once few
# would be complete when a run is cut off.
PACKS_AT_ONCE = 2
_MIB = 1 << 20
_LARGEST_BATCH, _SMALLEST_BATCH = 64 * _MIB, 4 * _MIB
_LARGEST_CHUNK = 16 * _MIB
# Threads, buffers of the storage, and what allocators keep.
_PER_WORKER = 6 * _MIB
_SPARE = 24 * _MIB
# What a worker in a process of its own has in memory before it does anything.
_PROCESS_BYTES = 96 * _MIB
# Of all memory, what may be on its way from a store that is asked over a network, and to one.
_ON_ITS_WAY = 4
# Of all memory, what may be kept of chunks that several packs need, where reading costs more.
_KEPT_CHUNKS = 16
# A sink that holds fewer parts waits for each.
_LEAST_PARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions:
    """What is to become of a step, and by what means; `reshard` says what each is."""

    to: str | Strategy
    expect: str | Strategy | None = None
    rules: RulesLike | None = None
    sizes: Mapping[str, Any] | None = None
    replicate_unknown: bool = False
    allow_split_heads: bool = False
    selection: Selection | None = None
    chunk_bytes: int | str = DEFAULT_CHUNK_BYTES
    memory: int | str = DEFAULT_MEMORY
    workers: int | None = None
    engine: str | Executor = "threads"
    digest: bool = False
    step: int | None = None
    overwrite: bool = False

    @property
    def strategy(self) -> Strategy:
        return Strategy.of(self.to)

    @property
    def is_slice(self) -> bool:
        """Whether a share of the packs is asked for, and no step."""
        return isinstance(self.engine, str) and self.engine.startswith("slice:")

    @property
    def is_here(self) -> bool:
        """Whether the threads of this process do the work."""
        return self.engine == "threads" or self.is_slice


@dataclass(frozen=True, slots=True, eq=False)
class TargetArray(Chosen):
    """One array, cut as it will be."""

    layout: Layout
    why: str
    """What decided how it is cut, in words."""

    @property
    def itemsize(self) -> int:
        """The bytes of an element, here or in the source, whichever are more."""
        return max(self.info.dtype.itemsize, self.source.dtype.itemsize)

    @property
    def is_kept(self) -> bool:
        """Whether its chunks go over byte for byte."""
        return self.info.grid == self.source.grid and not self.is_cast and not self.rows


@dataclass(frozen=True, eq=False)
class ReshardTarget:
    """The arrays, sorted by name, and the objects of the step, and who writes what."""

    source: SaveInfo
    options: ReshardOptions
    """Their rules are those that were found, whatever named them."""
    strategy: Strategy
    choice: Choice
    arrays: tuple[TargetArray, ...]
    written_by: str
    """The strategy of the source, as far as anything says it."""
    digest: str = ""
    """The digest of the state, to be recorded; empty where none is."""

    @property
    def world_size(self) -> int:
        """The number of ranks, and of packs."""
        return self.strategy.world_size

    @cached_property
    def table(self) -> ArrayTable:
        """What every record says of the arrays."""
        return ArrayTable.of([array.info for array in self.arrays], self.choice.aliases)

    @cached_property
    def save(self) -> SaveInfo:
        """What the records of the new step say of it. It depends on the source and the options
        alone, so that packs which were finished before an interruption, or by another machine, are
        those that are needed.

        Its time is that of the source: that is how old the state is.
        """
        source = self.source
        details: dict[str, Any] = {
            **{key: value for key, value in source.details.items() if key not in _OWN},
            "resharded": {"from": self.written_by, "save_id": source.save_id},
        }
        if self.digest:
            details["digest"] = {"algorithm": DIGEST_ALGORITHM, "step": self.digest}
        what: list[Any] = [
            self.strategy.to_doc(),
            source.save_id,
            source.step,
            [
                [a.number, a.name, *([r.number, r.start, r.count] for r in a.rows)]
                for a in self.arrays
            ],
            [[item.name, item.value] for item in self.choice.objects],
            details,
            __version__,
        ]
        digest = hashlib.sha256(self.table.digest + dumps(what)).hexdigest()[:16]
        return SaveInfo(
            save_id=f"{SAVE_ID_PREFIX}{digest}",
            step=source.step,
            time=source.time,
            writer=f"ckptkit {__version__}",
            world_size=self.world_size,
            strategy=self.strategy,
            details=details,
        )

    @cached_property
    def alike(self) -> list[tuple[TargetArray, int]]:
        """One array of each kind, and how many are what it is, here and in the source."""
        counts = Counter((id(array.source.kind), id(array.info.kind)) for array in self.arrays)
        one = {(id(array.source.kind), id(array.info.kind)): array for array in self.arrays}
        return [(one[kind], count) for kind, count in counts.items()]

    @cached_property
    def owned(self) -> list[Owned]:
        """The arrays as planning knows them."""
        return [Owned(a.name, a.layout, a.info.grid, a.info.dtype.itemsize) for a in self.arrays]


def target_of(manifest: Manifest, options: ReshardOptions, digest: str = "") -> ReshardTarget:
    """Decide everything; no byte of any array is read."""
    strategy, chunk_bytes = options.strategy, parse_size(options.chunk_bytes)
    choice = choose(manifest, options.selection or Selection(), options.sizes)
    rules = _rules(choice, manifest, options)
    placed = place(
        _tensors(choice),
        source=manifest.save.strategy,
        target=strategy,
        rules=rules,
        replicate_unknown=options.replicate_unknown,
        allow_split_heads=options.allow_split_heads,
    )
    by_name = {each.name: each for each in placed}
    arrays = []
    # Layers are alike: what is decided of one array holds for all of its kind.
    kinds: dict[tuple[int, int], tuple[ArrayKind, Layout]] = {}
    for chosen in choice.arrays:
        source, info, found = chosen.source, chosen.info, by_name[chosen.name]
        kind = id(info.kind), id(found.placements)
        if kind not in kinds:
            try:
                layout = layout_of(info.shape, strategy, found.placements)
            except LayoutError as error:
                error.where = f"{chosen.name}: {error.where}" if error.where else chosen.name
                error.hint = error.hint or f"{found.why} says so: `ckpt rules` shows all of them"
                raise
            grid = target_grid(source.grid, info.dtype.itemsize, layout.edges, chunk_bytes)
            cut = replace(info.kind, grid=grid, placements=found.placements)
            kinds[kind] = cut, layout
        cut, layout = kinds[kind]
        info = ArrayInfo(info.name, cut, info.of)
        arrays.append(TargetArray(chosen.number, source, info, chosen.rows, layout, found.why))
    decided, save = replace(options, rules=rules), manifest.save
    if options.step is not None:
        step_name(options.step)  # raises where it is no step
        save = replace(save, step=options.step)
    is_known = not isinstance(manifest, ForeignManifest) or manifest.foreign.strategy is not None
    # Part of the id of the save, so never to be worded anew.
    written_by = str(save.strategy) if is_known else "unknown"
    return ReshardTarget(save, decided, strategy, choice, tuple(arrays), written_by, digest)


def _rules(choice: Choice, manifest: Manifest, options: ReshardOptions) -> Rules | None:
    # They are about the names that the arrays will have.
    names = [inner_name(chosen.name, chosen.source.role) for chosen in choice.arrays]
    sizes = {**manifest.sizes, **(options.sizes or {})}
    source = manifest.save.strategy
    return rules_between(source, options.strategy, options.rules, names=names, sizes=sizes)


def _tensors(choice: Choice) -> list[Tensor]:
    """What is placed, in the order of the optimizers' parameters, which decides who owns what."""
    # As far as they say so.
    order: dict[str | None, int] = {}
    for item in choice.objects:
        if item.name == OPTIMIZER and isinstance(item.value, list):
            groups = [d.get("groups") for d in item.value if isinstance(d, dict)]
            for group in [g for each in groups if isinstance(each, list) for g in each]:
                names = group.get("params") if isinstance(group, dict) else None
                for name in names if isinstance(names, list) else []:
                    order.setdefault(f"{MODEL}/{name}", len(order))
    infos = [chosen.info for chosen in choice.arrays]
    tensors = [Tensor(i.name, i.shape, i.dtype.itemsize, i.role, i.of, i.placements) for i in infos]
    return sorted(tensors, key=lambda tensor: order.get(tensor.of, len(order)))


@dataclass(frozen=True)
class ReshardCost:
    """The sums over all arrays."""

    bytes_needed: int
    """The bytes of the chunks of the source, each once."""
    bytes_read: int
    """The bytes that will be read of them."""
    bytes_written: int
    requests: int
    """At most so many of the source: one for each chunk, and neighbours are read together."""
    chunks: int
    bytes_by_rank: tuple[int, ...]

    @property
    def files(self) -> int:
        """The packs and the manifest."""
        return len(self.bytes_by_rank) + 1

    @property
    def read_amplification(self) -> float:
        """How often a byte is read."""
        return self.bytes_read / self.bytes_needed if self.bytes_needed else 1.0

    @property
    def imbalance(self) -> float:
        """The largest pack, by the mean of all."""
        mean = sum(self.bytes_by_rank) / len(self.bytes_by_rank)
        return max(self.bytes_by_rank) / mean if mean else 1.0


def cost_of(target: ReshardTarget, batch_bytes: int) -> ReshardCost:
    """Add up what all arrays take; those of one kind are looked at once."""
    by_rank = np.zeros(target.world_size)
    needed = read = requests = chunks = 0
    for array, count in target.alike:
        source, info = array.source, array.info
        itemsizes = source.dtype.itemsize, info.dtype.itemsize
        nbytes, reading = spread(array.layout, source.grid, info.grid, itemsizes, batch_bytes)
        by_rank += nbytes * count
        needed += int(source.grid.stored_elements().sum()) * source.dtype.itemsize * count
        read += reading.nbytes * count
        requests += reading.requests * count
        chunks += info.grid.chunk_count * count
    rounded = tuple(np.rint(by_rank).astype(np.int64).tolist())
    return ReshardCost(needed, read, round(float(by_rank.sum())), requests, chunks, rounded)


@dataclass(frozen=True, slots=True)
class Budget:
    """What each of some workers may hold: a batch of the target's chunks, and the chunks of the
    source that it is filled from, one at a time; and what is under way to and from the stores.
    """

    workers: int
    batch_bytes: int
    chunk_bytes: int
    whole_pace: Pace
    """How the source is read by all workers together."""
    sink_bytes: int | None
    """What the sink of one pack may keep; None where it keeps nothing."""
    packs: int
    """How many packs are written at a time."""
    shared_bytes: int
    """What may be kept of chunks of the source that several of these need a part of."""
    decoded_bytes: int = 0
    """What may be kept of chunks that are decoded whole, by all processes together."""

    @classmethod
    def of(  # noqa: PLR0913 — one keyword for each thing that takes memory
        cls,
        memory: int,
        workers: int | None,
        source: Store,
        destination: Store,
        *,
        largest: int,
        pack_bytes: int = 0,
        fixed: int = 0,
        decoded: int = 0,
        is_here: bool = True,
    ) -> Budget:
        """The largest batches with which `memory` is never exceeded; `largest` is the largest
        chunk of the target, `pack_bytes` about how large the largest pack will be, and `fixed`
        what is in use besides; `decoded` is what a process keeps of decoded chunks. Unless it is
        here, each worker has a process and a pack of its own.
        """
        workers = max(4, copy_threads()) if workers is None else workers
        if workers < 1:
            raise UsageError("at least one worker is needed", value=workers)
        share, can = memory // _ON_ITS_WAY, destination.abilities
        is_far = source.abilities.waits_for_answers
        kept = memory // _KEPT_CHUNKS if is_far and is_here else 0
        sink_bytes, packs = None, PACKS_AT_ONCE if is_here else workers
        if can.waits_for_answers:
            part = piece_size(pack_bytes, can.part_size)
            least, most = _LEAST_PARTS * part, (can.concurrency + 2) * part
            packs = max(1, min(packs, share // least))
            sink_bytes = max(least, min(most, share // packs))
        if not is_here:
            workers = packs
        pace, shared = Pace.of(source, share - kept), kept if packs > 1 else 0
        found = cls(workers, 0, 0, pace, sink_bytes, packs, shared)
        fixed += found.under_way + _SPARE
        each = _PER_WORKER + (0 if is_here else _PROCESS_BYTES)
        for count in range(workers, 0, -1):
            kept = decoded * (1 if is_here else count)
            # A batch, one chunk of the source, and as much again where values are converted.
            free = (memory - fixed - kept) // count - each - BAND_BYTES
            batch = min(_LARGEST_BATCH, free // 3)
            if batch >= max(_SMALLEST_BATCH, largest):
                chunk_bytes = max(BAND_BYTES, min(_LARGEST_CHUNK, batch))
                found = replace(found, workers=count, decoded_bytes=kept)
                return replace(found, batch_bytes=batch, chunk_bytes=chunk_bytes)
        least = fixed + decoded + each + BAND_BYTES + 3 * max(_SMALLEST_BATCH, largest)
        raise UsageError(
            f"that is too little memory: this checkpoint takes {-(-least // _MIB)} MiB at least",
            value=memory,
            hint="most of it is for the list of chunks and for one chunk at a time"
            + (", which is decoded whole" if decoded else ""),
        )

    @property
    def under_way(self) -> int:
        """The most that is kept besides what the workers hold."""
        sinks = (self.sink_bytes or 0) * self.packs
        return self.whole_pace.nbytes + sinks + self.shared_bytes + self.decoded_bytes

    @property
    def peak(self) -> int:
        """The most that is in memory."""
        each = 3 * self.batch_bytes + max(BAND_BYTES, self.chunk_bytes) + _PER_WORKER
        return self.workers * each + _SPARE + self.under_way

    @property
    def pace(self) -> Pace:
        """How each worker reads the source."""
        return self.whole_pace.shared(self.workers)

    def is_huge(self, array: ArrayInfo) -> bool:
        """Whether the chunks of an array of the source are too large to be read whole."""
        size = array.grid.chunk_elements * array.dtype.itemsize
        return array.grid.chunk_count > 0 and size > self.chunk_bytes


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Explained:
    """How a strategy cuts one tensor, and which rule says so."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, str], ...]
    """Per axis its name and how it cuts, such as ("tp", "shard(0)")."""
    part: tuple[int, ...]
    """The shape of what rank 0 holds."""
    why: str
    unknown: tuple[str, ...] = ()
    """The axes for which no rule knows the tensor."""
    unknown_sizes: tuple[str, ...] = ()
    """Sizes that nobody gave, and without which heads may be cut in two; `reshard` refuses that."""


def explain_rules(
    src: Place,
    *,
    to: str | Strategy,
    rules: RulesLike | None = None,
    sizes: Mapping[str, Any] | None = None,
    replicate_unknown: bool = False,
    storage_options: Options | None = None,
) -> list[Explained]:
    """How `reshard` with the same arguments would cut every tensor of the step at `src`.

    Only the manifest is read. Tensors that no rule knows are in the list, as replicated; unless
    that was asked for, their `unknown` is not empty, and `reshard` would refuse them.
    """
    target = Strategy.of(to)
    axes = [axis.name for axis in target.mesh.axes]
    with open_checkpoint(src, storage_options=storage_options) as checkpoint:
        manifest = checkpoint.manifest
    choice = choose(manifest, Selection())
    known = _rules(choice, manifest, ReshardOptions(to=to, rules=rules, sizes=sizes))
    tensors = _tensors(choice)
    placed = decide(tensors, source=manifest.save.strategy, target=target, rules=known)
    found = [
        Explained(
            tensor.name,
            tensor.shape,
            tuple(zip(axes, map(str, each.placements), strict=True)),
            layout_of(tensor.shape, target, each.placements).part(0).shape,
            each.why,
            () if replicate_unknown else each.unknown,
            each.unknown_sizes,
        )
        for tensor, each in zip(tensors, placed, strict=True)
    ]
    return sorted(found, key=lambda each: each.name)
