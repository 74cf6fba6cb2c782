"""Copying packs: a few at a time, each by all threads; and how long that would take."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import call

import numpy as np

from ckptkit.checkpoint.places import StepFolder, step_name
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.reshard.chunks import (
    ChunkCopier,
    SharedChunks,
    SmallChunks,
    read_boxes,
)
from ckptkit.checkpoint.reshard.selection import objects_of
from ckptkit.checkpoint.reshard.target import Budget, ReshardCost, ReshardTarget, TargetArray
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.checkpoint.write.plan import PackedArray, PackPlan, documents_of
from ckptkit.errors import AlreadyExistsError, CkptkitError, PeerError
from ckptkit.format.manifest import pack_name
from ckptkit.plan.read import batches
from ckptkit.storage import Store, default_pool

# As the parts of local files are when a job writes them: larger ones are no faster to write, and
# leave less for other threads to take over.
_USUAL = 8 << 20
# How much of a source is read to tell the time it takes, and at most written.
_PROBE_BYTES, _PROBE_PARTS, _PROBE_CHUNKS = 8 << 20, 16, 64


def copy_packs(
    target: ReshardTarget,
    ranks: Iterable[int],
    source: Checkpoint,
    destination: Store,
    budget: Budget,
    progress: Progress | None = None,
) -> None:
    """Write the packs of some ranks, each segment by the thread that comes to it: who writes the
    last one of a pack finishes that.

    Where one fails, those packs that are not finished are removed, and those that are stay.
    """
    begun: list[Pack] = []
    room, read = budget.shared_bytes, partial(read_boxes, source, budget)
    shared = SharedChunks(source.manifest.arrays, read, room) if room else None
    # Chunks of a foreign checkpoint have no checksums, and may overlap.
    is_ours = source.manifest.is_checked and not budget.source.by_request
    copier = ChunkCopier(source, budget, shared, SmallChunks(source) if is_ours else None)

    def segments_of(rank: int) -> Iterator[Callable[[], None]]:
        pack = _begin_pack(target, rank, destination, copier, progress)
        begun.append(pack)
        for number in range(len(pack.segments)):
            yield partial(pack.write_segment, number)

    def segments() -> Iterator[Callable[[], None]]:
        """By turns from a few packs, which are begun as threads ask for work."""
        waiting = iter(ranks)
        turns: deque[Iterator[Callable[[], None]]] = deque()
        while True:
            # Those that are finished are let go of: each holds the names of all its chunks. Those
            # of which only the end is being written take memory as all others do.
            begun[:] = [pack for pack in begun if not pack.is_finished]
            if len(begun) < budget.packs or not turns:
                turns.extendleft(map(segments_of, islice(waiting, 1)))
            if not turns:
                return
            turn = turns.popleft()
            segment = next(turn, None)
            if segment is not None:
                turns.append(turn)
                yield segment

    try:
        share_out(segments(), call, budget.workers)
    except BaseException:
        for pack in begun:
            if not pack.is_finished:
                with suppress(CkptkitError):
                    pack.abort()
        raise


def _begin_pack(
    target: ReshardTarget,
    rank: int,
    destination: Store,
    copier: ChunkCopier,
    progress: Progress | None,
) -> Pack:
    """Begin the pack of a rank; every segment of it can be written by any thread."""
    writes = target.chunks_of(rank)
    known = [(owned, a.info) for owned, a in zip(target.owned, target.arrays, strict=True)]
    mine = [(a, chunks) for a, chunks in zip(target.arrays, writes, strict=True) if len(chunks)]
    origins = [array for array, _ in mine]
    pack = Pack(
        rank,
        PackPlan(
            target.table,
            documents_of(known, writes, rank),
            [PackedArray(array.info, chunks) for array, chunks in mine],
        ),
        objects_of(target.choice.objects, rank, target.world_size),
        partial(copier.fill, origins),
    )
    try:
        pack.begin(
            StepFolder(destination, step_name(target.save.step)),
            target.save,
            pack.segments_at(_lasts(pack.plan, origins, copier.budget)),
            refers=rank > 0,
            memory=copier.budget.sink_bytes,
            progress=progress,
        )
    except AlreadyExistsError as error:
        raise at_work(error.where) from error
    return pack


def at_work(where: str) -> PeerError:
    """The error where another run writes the same packs."""
    return PeerError(
        "another reshard of the same step is writing here",
        where=where,
        hint="wait for it; the same command again goes on with what it leaves, should it fail",
    )


def _lasts(plan: PackPlan, origins: Sequence[TargetArray], budget: Budget) -> list[int]:
    """Where segments end: each array's chunks in batches as the plan has them, small ones together.

    The batches of chunks that go over as they are need not be large: no chunk of the source is
    needed by two.
    """
    end = len(plan.documents)
    lasts: list[int] = []
    usual = min(_USUAL, budget.batch_bytes)
    held = sum(len(data) for _, data in plan.documents)
    ends: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for (info, chunks), origin in zip(plan.arrays, origins, strict=True):
        kind = id(origin.source.kind), id(info.kind), id(chunks)
        if kind not in ends:
            sizes = info.grid.stored_elements(chunks) * origin.itemsize
            limit = usual if origin.is_kept else budget.batch_bytes
            ends[kind] = [(last, int(sizes[i:last].sum())) for i, last in batches(sizes, limit)]
        base = end
        for last, nbytes in ends[kind]:
            if held and held + nbytes > usual:
                lasts.append(end)
                held = 0
            end, held = base + last, held + nbytes
    return [*lasts, end] if end else []


def seconds_of(source: Checkpoint, folder: StepFolder, budget: Budget, cost: ReshardCost) -> float:
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
            reading = cost.bytes_read * _passed(began) / max(1, sum(sizes))
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
            writing = cost.bytes_written * _passed(began) / (size * parts)
        finally:
            sink.abort()
            if is_kept:
                store.delete([key])
    return max(reading, writing)


def _passed(began: float) -> float:
    return max(1e-9, time.perf_counter() - began)
