"""One reshard from beginning to end: look, copy what is missing, commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ckptkit.checkpoint.locate import refuse_links
from ckptkit.checkpoint.places import (
    DATA,
    MANIFEST,
    data_prefix,
    described,
    step_name,
    step_number,
)
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.reshard.budget import Budget, Ends, resident_bytes
from ckptkit.checkpoint.reshard.checking import check_chunks, finished_packs, huge_chunks
from ckptkit.checkpoint.reshard.copying import Route
from ckptkit.checkpoint.reshard.engines import Slice, Task, check_engine, executor_of, run_tasks
from ckptkit.checkpoint.reshard.planning import Cost, ReshardPlan, cost_of, plan_of
from ckptkit.checkpoint.reshard.probe import seconds_for
from ckptkit.checkpoint.reshard.running import PACKS_AT_ONCE, Packs
from ckptkit.checkpoint.reshard.sharing import SharedChunks
from ckptkit.checkpoint.reshard.target import SAVE_ID_PREFIX, Target
from ckptkit.checkpoint.workers import Progress
from ckptkit.checkpoint.write.commit import commit, committed_save_id, gather
from ckptkit.errors import NoSpaceError, StepExistsError, UsageError
from ckptkit.format.manifest import pack_name
from ckptkit.storage import Store

# What a worker in a process of its own has in memory before it does anything.
_PROCESS_BYTES = 96 << 20


@dataclass(frozen=True, slots=True)
class Resharded:
    """What a reshard has done: where the step is, and what was there of it already."""

    location: str
    step: int
    save_id: str
    committed: bool
    """False for a slice: `commit_packs` makes the step of all slices."""
    packs: int
    finished: tuple[int, ...]
    """The ranks whose packs an earlier run had completed."""


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """What a reshard may use and do."""

    memory: int
    workers: int
    engine: str | Executor = "threads"
    digest: bool = False
    overwrite: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine)

    @property
    def slice(self) -> Slice | None:
        """The share of the packs that is asked for, where not all are."""
        is_slice = isinstance(self.engine, str) and self.engine.startswith("slice:")
        return Slice.parse(str(self.engine)) if is_slice else None

    @property
    def is_here(self) -> bool:
        """Whether the threads of this process do the work."""
        return self.engine == "threads" or self.slice is not None


class Work:
    """Makes one target in one place."""

    def __init__(
        self, checkpoint: Checkpoint, target: Target, store: Store, means: Means, resident: int
    ) -> None:
        self.target = target
        self.store = store
        self.resident = resident
        self._checkpoint = checkpoint
        self._means = means
        self._prefix = step_name(target.save.step)
        self._budget = self._budgeted()

    @property
    def location(self) -> str:
        """Where the step will be."""
        return described(self.store, self._prefix)

    def check_way(self, *, digest_to_come: bool = False) -> bool:
        """Whether the very step is there already; StepExistsError where another one is in the way.

        A digest that is still to be found will be part of the step's id: until then any step that
        was resharded may be the very one.
        """
        _check_run(self.store)
        there = committed_save_id(self.store, self._prefix)
        if there == self.target.save.save_id:
            return True
        refuse_links(self.store, self._prefix)
        # By the save, since one folder may have many names.
        if there == self._checkpoint.save_id:
            raise StepExistsError(
                "the result would be in the place of its source, or of a copy of that",
                where=self.location,
                hint="name another run: the step gets the same number there",
            )
        if digest_to_come and there is not None and there.startswith(SAVE_ID_PREFIX):
            return False
        if there is not None and not self._means.overwrite:
            raise StepExistsError(
                "the step is committed already",
                where=self.location,
                hint="name another run, delete the step first, or overwrite it (--overwrite)",
            )
        return False

    def plan(self, *, probe: bool) -> ReshardPlan:
        """What `run` would do; nothing changes."""
        target, means, budget = self.target, self._means, self._budget
        is_there = self.check_way(digest_to_come=means.digest)
        finished = set() if means.digest else self._seem_finished()
        cost = cost_of(target, budget.batch_bytes)
        left = [rank for rank in range(target.world_size) if rank not in finished]
        if not is_there:
            self._check_room(cost, left)
        seconds = None
        if probe:
            nbytes = cost.bytes_read, cost.bytes_written
            place = self.store, self._prefix
            seconds = seconds_for(self._checkpoint, place, budget, nbytes)
        return plan_of(
            target,
            (self._checkpoint.location, self.location),
            cost,
            memory=min(means.memory, budget.peak),
            workers=budget.workers,
            finished=tuple(sorted(finished)),
            seconds=seconds,
            save_id=None if means.digest else target.save.save_id,
        )

    def run(self) -> Resharded:
        """Copy the packs that are missing and commit."""
        target, means, every = self.target, self._means, range(self.target.world_size)
        if self.check_way():
            return self._done(every)
        finished = finished_packs(
            target, self.store, self._prefix, means.slice, progress=means.progress
        )
        ranks = [rank for rank in every if rank not in finished]
        if means.slice is not None:
            self._copy(means.slice.of(ranks))
            return self._done(finished, committed=False)
        self._copy(ranks)
        manifest = gather(self.store, self._prefix, target.save.save_id)
        commit(self.store, self._prefix, manifest, overwrite=means.overwrite)
        return self._done(finished)

    def _done(self, finished: Iterable[int], *, committed: bool = True) -> Resharded:
        save, there = self.target.save, tuple(sorted(finished))
        return Resharded(
            self.location, save.step, save.save_id, committed, self.target.world_size, there
        )

    def _seem_finished(self) -> set[int]:
        """The ranks whose packs seem to be there, by their names alone."""
        names = set(self.store.children(data_prefix(self._prefix, self.target.save.save_id)))
        return {rank for rank in range(self.target.world_size) if pack_name(rank) in names}

    def _copy(self, ranks: Sequence[int]) -> None:
        cost = cost_of(self.target, self._budget.batch_bytes)
        self._check_room(cost, ranks)
        checkpoint = self._checkpoint
        sources = OpenPacks(checkpoint.store, checkpoint.prefix, checkpoint.manifest)
        kept = self._budget.ends.shared_bytes if self._means.is_here else 0
        shared = SharedChunks(kept) if kept else None
        route = Route(checkpoint, sources, self.store, self._prefix, self._budget, shared)
        try:
            check_chunks(route, huge_chunks(self.target, route))
            if self._means.is_here:
                Packs(self.target, ranks, route).run(self._means.progress)
                return
        finally:
            sources.close()
        self._check_reachable()
        with executor_of(self._means.engine, self._budget.workers) as executor:
            tasks = [self._task(rank) for rank in ranks]
            run_tasks(executor, tasks, cost.bytes_by_rank.__getitem__, self._means.progress)

    def _task(self, rank: int) -> Task:
        checkpoint = self._checkpoint
        return Task(
            source=checkpoint.store.address,
            source_prefix=checkpoint.prefix,
            source_save_id=checkpoint.save_id,
            destination=self.store.address,
            prefix=self._prefix,
            save_id=self.target.save.save_id,
            recipe=self.target.recipe,
            rank=rank,
            budget=self._budget.alone(),
        )

    def _check_reachable(self) -> None:
        for store in (self._checkpoint.store, self.store):
            if store.location.scheme == "memory":
                raise UsageError(
                    "what is in the memory of this process no other worker sees",
                    where=str(store.location),
                    hint="use the engine threads",
                )

    def _check_room(self, cost: Cost, ranks: Iterable[int]) -> None:
        room = self.store.room()
        needed = sum(cost.bytes_by_rank[rank] for rank in ranks)
        if room is not None and needed > room:
            raise NoSpaceError(
                f"{needed} bytes are to be written, {room} are free",
                where=str(self.store.location),
                hint="nothing was written; `ckpt prune` frees what runs do not need",
            )

    def _budgeted(self) -> Budget:
        means, target = self._means, self.target
        stored = (a for a in target.arrays if a.info.grid.chunk_count)
        largest = max((a.info.grid.chunk_elements * a.itemsize for a in stored), default=0)
        fixed = max(0, resident_bytes() - self.resident)
        each = 0 if means.is_here else _PROCESS_BYTES
        packs = PACKS_AT_ONCE if means.is_here else means.workers
        # Twice the mean: packs need not be alike.
        pack_bytes = 2 * sum(a.info.nbytes for a in target.arrays) // target.world_size
        stores = self._checkpoint.store, self.store
        ends = Ends.of(*stores, means.memory, packs, pack_bytes)
        # Who works alone writes one pack at a time.
        workers = means.workers if means.is_here else ends.packs
        return Budget.of(means.memory, workers, largest, ends, fixed, each)


def _check_run(store: Store) -> None:
    """Refuse to put a step into a step."""
    if step_number(store.location.name) is not None or {DATA, MANIFEST} & set(store.children("")):
        raise UsageError(
            "the destination is a step, not a run",
            where=str(store.location),
            hint="pass the folder of a run: the step gets its own folder in it",
        )
