"""A reshard from beginning to end: plan it, which changes nothing, and run the plan."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Required, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from ckptkit.checkpoint.places import (
    DATA,
    Place,
    StepFolder,
    check_room,
    holds_step,
    refuse_inside_step,
    step_name,
    step_number,
    stores_at,
)
from ckptkit.checkpoint.read.checkpoint import UNKNOWN, Checkpoint, open_checkpoint
from ckptkit.checkpoint.read.stream import LEAST_MEMORY, Limits, Readable, stored_arrays
from ckptkit.checkpoint.reshard.copy import cast, check_huge_chunks, copy_packs
from ckptkit.checkpoint.reshard.engines import copy_elsewhere, finished_packs, ranks_to_copy
from ckptkit.checkpoint.reshard.selection import Selection, check_numbers
from ckptkit.checkpoint.reshard.target import (
    SAVE_ID_PREFIX,
    Budget,
    ReshardCost,
    ReshardOptions,
    ReshardTarget,
    TargetArray,
    cost_of,
    resident_bytes,
    target_of,
)
from ckptkit.checkpoint.rules_file import RulesLike
from ckptkit.checkpoint.run.run import is_whole
from ckptkit.checkpoint.run.verify import digest_of
from ckptkit.checkpoint.workers import Progress, share_out, uncollected
from ckptkit.checkpoint.write.commit import (
    commit,
    committed_save_id,
    gather,
    refuse_committed,
)
from ckptkit.errors import CorruptionError, StepExistsError, UsageError
from ckptkit.format.manifest import pack_name
from ckptkit.model import Box, Strategy
from ckptkit.model.display import bytes_picture, card, mesh_picture
from ckptkit.model.document import counted, parse_size, size_text
from ckptkit.plan.chunks import chunks_to_write
from ckptkit.storage import Options, default_pool
from ckptkit.storage.base.disk import link_in_the_way

# What a chunk adds to a manifest, and about what an array does.
_CHUNK_BYTES, _ARRAY_BYTES = 24, 160
# How much of a source is read to tell the time it takes, and at most written.
_PROBE_BYTES, _PROBE_PARTS, _PROBE_CHUNKS = 8 << 20, 16, 64


class ReshardKeywords(TypedDict, total=False):
    """The keywords of `plan_reshard` and `reshard`; `ReshardOptions` has their defaults."""

    to: Required[str | Strategy]
    expect: str | Strategy | None
    rules: RulesLike | None
    sizes: Mapping[str, Any] | None
    replicate_unknown: bool
    allow_split_heads: bool
    selection: Selection | None
    chunk_bytes: int | str
    memory: int | str
    workers: int | None
    engine: str | Executor
    digest: bool
    step: int | None
    overwrite: bool


@uncollected()
def reshard(
    src: Place,
    dst: Place,
    *,
    progress: Progress | None = None,
    storage_options: Options | None = None,
    source_options: Options | None = None,
    **keywords: Unpack[ReshardKeywords],
) -> Resharded:
    """Make the step at `src` (of a run: its newest) one of strategy `to`, in the run `dst`.

    Never more than `memory` is in use beyond what the process has already, whatever the size of
    the step. Every chunk that has a checksum is compared with it, `src` is only read, and the step
    exists at `dst` whole or not at all; after an interruption the same call goes on where it was.

    `expect` is the strategy that the step has to have; `rules` a file, a preset, `auto`, a document
    or `Rules` that say which dims tensor parallelism cuts, `sizes` the numbers that they refer to:
    where these do not tell how long an attention head is, a cut that may go through one is refused,
    unless `allow_split_heads`; what no rule knows is refused too, unless `replicate_unknown`.
    `selection` is what to take, to rename and to convert. `chunk_bytes` is about how large chunks
    are that cannot go over as they are. `engine` is threads, processes, dask://…, ray, ray://…,
    slice:i/n (see `commit_packs`) or any executor, with so many `workers`; `digest` records that of
    the state, which does not depend on the strategy, for which `src` is read twice. `step` is its
    number where it gets another; `overwrite` replaces one that is there. `storage_options` reach
    both places, unless `source_options` are those of `src`.
    """
    stores: Any = {"storage_options": storage_options, "source_options": source_options}
    return plan_reshard(src, dst, **stores, **keywords).run(progress)


@uncollected()
def plan_reshard(
    src: Place,
    dst: Place,
    *,
    probe: bool = False,
    storage_options: Options | None = None,
    source_options: Options | None = None,
    **keywords: Unpack[ReshardKeywords],
) -> ReshardPlan:
    """What `reshard` with the same arguments would do, and the errors that it would raise before it
    writes anything; `run` of the plan does it.

    With `probe` also about how long it takes: a little is read of the source, and written at the
    destination and removed again.
    """
    options = ReshardOptions(**keywords)
    source, store = stores_at(src, dst, storage_options, source_options)
    memory, ranks = parse_size(options.memory), ranks_to_copy(options, source, store)
    before = resident_bytes()
    checkpoint = open_checkpoint(source)
    expected = None if options.expect is None else Strategy.of(options.expect)
    if expected is not None and checkpoint.written_by not in (str(expected), UNKNOWN):
        raise UsageError(
            f"the step was written by {checkpoint.written_by}, not by {expected}",
            where=checkpoint.location,
            hint="leave --from out: what is known of the strategy is in the step",
        )
    target = target_of(checkpoint.manifest, options)
    check_numbers(checkpoint, target.choice)
    stored = (a for a, _ in target.alike if a.info.grid.chunk_count)
    budget = Budget.of(
        memory,
        options.workers,
        source,
        store,
        largest=max((a.info.grid.chunk_elements * a.itemsize for a in stored), default=0),
        # Twice the mean: packs need not be alike.
        pack_bytes=2 * sum(n * a.info.nbytes for a, n in target.alike) // target.world_size,
        fixed=max(0, resident_bytes() - before),
        decoded=checkpoint.packs.kept_bytes,
        is_here=options.is_here,
    )
    folder = StepFolder(store, step_name(target.save.step))
    is_there = _is_there(target, checkpoint, folder, digest_to_come=options.digest)
    # By their names alone; a digest is still to become part of these.
    names = set(store.children(folder.data(target.save.save_id)))
    every = range(target.world_size)
    finished = [] if options.digest else [rank for rank in every if pack_name(rank) in names]
    cost = cost_of(target, budget.batch_bytes)
    # With a digest to come nobody knows yet which packs are these: the run looks again.
    may_go_on = options.digest and bool(store.children(folder.data()))
    if not is_there and not may_go_on:
        left = (rank for rank in ranks if rank not in finished)
        check_room(store, sum(cost.bytes_by_rank[rank] for rank in left), store.location)
    return ReshardPlan(
        **vars(cost),
        source=checkpoint.location,
        destination=str(folder),
        step=target.save.step,
        from_strategy=checkpoint.written_by,
        to_strategy=str(target.strategy),
        save_id=None if options.digest else target.save.save_id,
        arrays=target.arrays,
        aliases=tuple(alias.name for alias in target.choice.aliases),
        left_out=tuple(sorted(target.choice.left_out)),
        manifest_bytes=_CHUNK_BYTES * cost.chunks + _ARRAY_BYTES * len(target.arrays),
        memory=min(memory, budget.peak),
        workers=budget.workers,
        finished=tuple(finished),
        seconds=_seconds_of(checkpoint, folder, budget, cost) if probe else None,
        ranks=ranks,
        checkpoint=checkpoint,
        folder=folder,
        target=target,
        budget=budget,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class ReshardPlan(ReshardCost):
    """What a reshard reads, writes and holds; `seconds` comes from a short measured probe."""

    source: str
    destination: str
    step: int
    from_strategy: str
    to_strategy: str
    save_id: str | None
    """None where a digest is still to become part of it."""
    arrays: tuple[TargetArray, ...]
    aliases: tuple[str, ...]
    """Second names of tied arrays."""
    left_out: tuple[str, ...]
    """Names in the source that do not go over."""
    manifest_bytes: int
    memory: int
    workers: int
    finished: tuple[int, ...]
    """Ranks whose packs are there by their names; `run` looks whether they are complete."""
    seconds: float | None
    ranks: Sequence[int] = field(repr=False)
    """The ranks whose packs `run` writes: all, but for a slice."""
    checkpoint: Checkpoint = field(repr=False)
    folder: StepFolder = field(repr=False)
    target: ReshardTarget = field(repr=False)
    budget: Budget = field(repr=False)

    def facts(self) -> dict[str, str]:
        """The plan for people, a line each."""
        left = f", {len(self.left_out)} left out" if self.left_out else ""
        kept = sum(array.is_kept for array in self.arrays)
        count = len(self.arrays) + len(self.aliases)
        read = f"{size_text(self.bytes_read)}, {self.read_amplification:.2f} times each byte"
        files = f"{counted(self.files, 'file')}, {counted(self.chunks, 'chunk')}"
        least, most = map(size_text, (min(self.bytes_by_rank), max(self.bytes_by_rank)))
        found = {
            "from": f"{self.source}, {self.from_strategy}",
            "to": f"{self.destination}, {self.to_strategy}",
            "arrays": f"{count}, chunks of {kept} go over as they are{left}",
            "read": f"{read}, at most {counted(self.requests, 'request')}",
            "write": f"{size_text(self.bytes_written)} in {files}",
            "packs": f"{least} to {most}, the largest {self.imbalance:.2f} times the mean",
            "memory": f"at most {size_text(self.memory)}, {counted(self.workers, 'worker')}",
        }
        if self.seconds is not None:
            found["time"] = f"about {self.seconds:.1f} s, by a short probe"
        if self.finished:
            found["there"] = f"{counted(len(self.finished), 'pack')} of an earlier run"
        return found

    def __repr__(self) -> str:
        what = f"{self.from_strategy} -> {self.to_strategy}, {size_text(self.bytes_written)}"
        return f"ReshardPlan(step {self.step}, {what} to {self.destination!r})"

    def _repr_html_(self) -> str:
        return card(
            f"reshard step {self.step}",
            self.facts(),
            mesh_picture(self.checkpoint.strategy),
            mesh_picture(self.target.strategy),
            bytes_picture(self.bytes_by_rank),
        )

    @uncollected()
    def run(self, progress: Progress | None = None) -> Resharded:
        """Look again at what is there, copy the packs that are missing, and commit.

        `progress` hears of the bytes that are written, and with a digest first of as many that are
        read for it.
        """
        source, folder, target, budget = self.checkpoint, self.folder, self.target, self.budget
        options, store = target.options, folder.store
        with source:
            if options.digest:
                # Raises where another step is in the way, before all of the source is read.
                _is_there(target, source, folder, digest_to_come=True)
                target = replace(target, digest=_digest(source, target, progress))
            save_id, count = target.save.save_id, target.world_size
            done = Resharded(self.destination, self.step, save_id, count, tuple(range(count)))
            if _is_there(target, source, folder):
                return replace(done, is_new=False)
            finished = finished_packs(
                target, folder, self.ranks, progress=progress, again=options.overwrite
            )
            done = replace(done, finished=tuple(sorted(finished)), committed=not options.is_slice)
            missing = [rank for rank in self.ranks if rank not in finished]
            check_room(store, sum(self.bytes_by_rank[rank] for rank in missing), store.location)
            if missing:
                check_huge_chunks(_from_huge_chunks(target, missing, budget), source, budget)
            if options.is_here:
                copy_packs(target, missing, source, store, budget, progress)
            else:
                sizes, told = self.bytes_by_rank, progress or (lambda _: None)
                copy_elsewhere(
                    target, missing, source, store, budget, lambda rank: told(sizes[rank])
                )
            source.check_unchanged()
        if not options.is_slice:
            commit(folder, gather(folder, save_id), overwrite=options.overwrite)
        return done


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a reshard has done: where the step is, and what was there of it already."""

    location: str
    step: int
    save_id: str
    packs: int
    finished: tuple[int, ...]
    """The ranks whose packs an earlier run had completed."""
    committed: bool = True
    """False for a slice: `commit_packs` makes the step of all slices."""
    is_new: bool = True
    """False where the step was there already, and nothing was written."""


def _is_there(
    target: ReshardTarget, source: Checkpoint, folder: StepFolder, *, digest_to_come: bool = False
) -> bool:
    """Whether the very step is there already; StepExistsError where another one is in the way.

    A digest that is still to be found will be part of the step's id: until then any step that was
    resharded may be the very one.
    """
    store, overwrite = folder.store, target.options.overwrite
    is_step = holds_step(StepFolder(store), store.children(""))
    if step_number(store.location.name) is not None or is_step:
        raise UsageError(
            "the destination is a step, not a run",
            where=str(store.location),
            hint="pass the folder of a run: the step gets its own folder in it",
        )
    refuse_inside_step(store)
    there = committed_save_id(folder)
    if there == target.save.save_id and not overwrite:
        if not is_whole(folder):
            raise CorruptionError(
                "the step is there already, made of the same step in the same way, and packs of it "
                "are missing or cut off",
                where=str(folder),
                hint="overwrite it (--overwrite): what is whole stays",
            )
        return True
    if folder.name in store.links():
        raise link_in_the_way(str(folder))
    if DATA in store.links(folder.name):
        raise link_in_the_way(folder.where(DATA))
    # By the save, since one folder may have many names.
    if there == source.save_id:
        raise StepExistsError(
            "the result would be in the place of its source, or of a copy of that",
            where=str(folder),
            hint="name another run: the step gets the same number there",
        )
    may_be_it = digest_to_come and there is not None and there.startswith(SAVE_ID_PREFIX)
    if there is None and not overwrite:
        refuse_committed(folder)  # by a manifest that is empty, or cannot be read
    if there is not None and not may_be_it and not overwrite:
        raise StepExistsError(
            "the step is committed already",
            where=str(folder),
            hint="name another run, delete the step first, or overwrite it (--overwrite)",
        )
    return False


def _from_huge_chunks(
    target: ReshardTarget, ranks: Sequence[int], budget: Budget
) -> Iterator[tuple[TargetArray, Box]]:
    """What some ranks write of the arrays that are read from chunks too large to be read whole. A
    slice has to check these itself: the packs of one that was copied from damage would stay.
    """
    huge = [
        number
        for number, array in enumerate(target.arrays)
        if any(budget.is_huge(info) for _, info in array.origins)
    ]
    if len(ranks) == target.world_size:
        yield from ((target.arrays[n], Box.whole(target.arrays[n].info.shape)) for n in huge)
        return
    for rank in ranks if huge else ():
        writes = chunks_to_write(target.owned, rank)
        for number in huge:
            array = target.arrays[number]
            grid = array.info.grid
            yield from ((array, grid.box(grid.index(n))) for n in writes[number].tolist())


def _digest(source: Checkpoint, target: ReshardTarget, progress: Progress | None) -> str:
    """The digest that a target will have, from its source, in bounded memory."""
    # Values that are cast are in memory twice.
    casts = [a for a in target.arrays if a.is_cast]
    ratios = [a.source.dtype.itemsize / a.info.dtype.itemsize for a in casts]
    kept = source.packs.kept_bytes
    share = (parse_size(target.options.memory) - kept) / (1 + max(ratios, default=0))
    limits = Limits.of(max(LEAST_MEMORY, int(share)) + kept, None, sources=[source])
    stored = stored_arrays(source, limits.chunk_bytes, limits.pace(source.store))
    arrays = {array.name: _readable(array, stored) for array in target.arrays}
    for alias in target.choice.aliases:
        arrays[alias.name] = arrays[alias.alias_of]
    return digest_of(arrays, target.choice.objects, limits, progress=progress).step


def _readable(array: TargetArray, stored: Mapping[str, Readable]) -> Readable:
    """An array of the target, made of what the source has when it is read."""
    source, block = array.source, 1 << 16
    if not array.rows and not array.is_cast:
        return stored[source.name]

    def fill(wanted: Sequence[tuple[str, Box, npt.NDArray[Any]]]) -> None:
        for _, box, out in wanted:
            values = np.empty(box.shape, source.dtype.bits) if array.is_cast else out
            for _, part, inside, there in array.parts(box, values):
                stored[part.name].fill([(part.name, inside, there)])
            if array.is_cast:
                given, found = values.reshape(-1), out.reshape(-1)
                for start in range(0, len(given), block):
                    some = slice(start, start + block)  # so many elements at a time
                    cast(array, given[some], found[some])

    return Readable(array.name, source.shape, array.info.dtype, source.grid, fill)


def _seconds_of(source: Checkpoint, folder: StepFolder, budget: Budget, cost: ReshardCost) -> float:
    """About how long it takes to read and to write, beside each other: a little of both is tried.

    What is written is a pack that is given up before anyone can take it for one; where even that is
    cut off, `prune` finds it.
    """
    manifest, store, reading, writing = source.manifest, folder.store, 0.0, 0.0
    if cost.bytes_read:
        # Chunks all over the step: its beginning may be in a cache, and the rest not.
        spread = np.linspace(0, len(manifest.pack) - 1, _PROBE_CHUNKS).astype(np.int64)
        rows: list[int] = np.unique(spread).tolist()
        sizes = np.minimum(manifest.length[rows], _PROBE_BYTES).astype(np.int64).tolist()

        def read(row: int) -> None:
            size, offset = min(_PROBE_BYTES, int(manifest.length[row])), int(manifest.offset[row])
            with (
                default_pool().take(_PROBE_BYTES) as memory,
                memory[:size] as data,
                source.packs.use(int(manifest.pack[row])) as opened,
            ):
                opened.read_into(offset, data)

        with source:
            began = time.perf_counter()
            share_out(rows, read, budget.workers * budget.pace.requests)
            reading = cost.bytes_read * (time.perf_counter() - began) / max(1, sum(sizes))
    if cost.bytes_written:
        size = min(_PROBE_BYTES, cost.bytes_written)
        parts = min(_PROBE_PARTS, cost.bytes_written // size)
        key = folder.pack(f"probe-{os.urandom(8).hex()}", pack_name(0))
        sink = store.create(key, [size] * parts, memory=budget.sink_bytes)
        is_kept = store.abilities.waits_for_answers

        def write(part: int) -> None:
            with default_pool().take(size) as memory:
                np.frombuffer(memory, np.uint8)[:] = part
                sink.write(part, memory)

        try:
            began = time.perf_counter()
            share_out(range(parts), write, budget.workers)
            if is_kept:
                # What a sink keeps is on its way only, and there when it is finished.
                sink.finish()
            writing = cost.bytes_written * (time.perf_counter() - began) / (size * parts)
        finally:
            sink.abort()
            if is_kept:
                store.delete([key])
    return max(reading, writing)
