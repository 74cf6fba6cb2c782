"""One reshard from beginning to end: look, decide, copy what is missing, commit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from ckptkit.checkpoint.checkpoint import Checkpoint
from ckptkit.checkpoint.commit import commit, committed_save_id, gather
from ckptkit.checkpoint.places import described, step_name, under
from ckptkit.checkpoint.reshard.budget import Budget, resident_bytes
from ckptkit.checkpoint.reshard.checking import check_chunks, finished_packs, huge_chunks
from ckptkit.checkpoint.reshard.copying import Route
from ckptkit.checkpoint.reshard.engines import Slice, Task, check_engine, executor_of, run_tasks
from ckptkit.checkpoint.reshard.planning import Cost, cost_of
from ckptkit.checkpoint.reshard.running import Packs
from ckptkit.checkpoint.reshard.target import Target
from ckptkit.checkpoint.sources import Sources
from ckptkit.checkpoint.threads import Progress
from ckptkit.errors import NoSpaceError, StepExistsError, UsageError
from ckptkit.model import Strategy
from ckptkit.storage import Store

Engine = str | Executor

# What a worker in a process of its own has in memory before it does anything.
_PROCESS_BYTES = 96 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Means:
    """What a reshard may use."""

    memory: int
    workers: int
    engine: Engine = "threads"
    overwrite: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine)

    @property
    def is_here(self) -> bool:
        """Whether the threads of this process do the work."""
        return isinstance(self.engine, str) and (
            self.engine == "threads" or self.engine.startswith("slice:")
        )


class Work:
    """Makes one target in one place."""

    def __init__(
        self, checkpoint: Checkpoint, target: Target, store: Store, means: Means, resident: int
    ) -> None:
        self._checkpoint = checkpoint
        self._target = target
        self._store = store
        self._means = means
        self._prefix = step_name(target.save.step)
        self.budget = self._budgeted(resident)

    @property
    def location(self) -> str:
        """Where the step will be."""
        return described(self._store, self._prefix)

    @property
    def is_done(self) -> bool:
        """Whether the very step is there already; another one in its place is an error."""
        there = committed_save_id(self._store, self._prefix)
        if there == self._target.save.save_id:
            return True
        # By the save, since one folder may have many names.
        if there == self._checkpoint.save_id:
            raise StepExistsError(
                "the result would be in the place of its source, or of a copy of that",
                where=self.location,
                hint="name another run: the step gets the same number there",
            )
        if there is not None and not self._means.overwrite:
            raise StepExistsError(
                "the step is committed already",
                where=self.location,
                hint="name another run, delete the step first, or overwrite it (--overwrite)",
            )
        return False

    def run(self) -> int:
        """Copy the packs that are missing and commit; returns how many there were already."""
        target, means = self._target, self._means
        finished = finished_packs(target, self._store, self._prefix, progress=means.progress)
        ranks = [rank for rank in range(target.world_size) if rank not in finished]
        if isinstance(means.engine, str) and means.engine.startswith("slice:"):
            self._copy(Slice.parse(means.engine).of(ranks))
            return len(finished)
        self._copy(ranks)
        manifest = gather(self._store, self._prefix, target.save.save_id)
        commit(self._store, self._prefix, manifest, overwrite=means.overwrite)
        return len(finished)

    def finished(self) -> set[int]:
        """The ranks whose packs seem to be there, by their names alone."""
        folder = under(self._prefix, f"data/{self._target.save.save_id}")
        names = set(self._store.children(folder))
        return {r for r in range(self._target.world_size) if f"rank-{r:05d}.zip" in names}

    def _copy(self, ranks: Sequence[int]) -> None:
        cost = cost_of(self._target, self.budget.batch_bytes)
        self._check_room(cost, ranks)
        checkpoint = self._checkpoint
        sources = Sources(checkpoint.store, checkpoint.prefix, checkpoint.manifest)
        route = Route(checkpoint, sources, self._store, self._prefix, self.budget)
        try:
            check_chunks(route, huge_chunks(self._target, route))
            if self._means.is_here:
                Packs(self._target, ranks, route).run(self._means.progress)
                return
        finally:
            sources.close()
        self._check_reachable()
        with executor_of(self._means.engine, self.budget.workers) as executor:
            tasks = [self._task(rank) for rank in ranks]
            run_tasks(executor, tasks, cost.bytes_by_rank.__getitem__, self._means.progress)

    def _task(self, rank: int) -> Task:
        checkpoint = self._checkpoint
        return Task(
            source=str(checkpoint.store.location),
            source_prefix=checkpoint.prefix,
            source_save_id=checkpoint.save_id,
            destination=str(self._store.location),
            prefix=self._prefix,
            save_id=self._target.save.save_id,
            recipe=self._target.recipe,
            rank=rank,
            budget=Budget(1, self.budget.batch_bytes, self.budget.chunk_bytes),
        )

    def _check_reachable(self) -> None:
        for store in (self._checkpoint.store, self._store):
            if store.location.scheme == "memory":
                raise UsageError(
                    "what is in the memory of this process no other worker sees",
                    where=str(store.location),
                    hint="use the engine threads",
                )

    def _check_room(self, cost: Cost, ranks: Collection[int]) -> None:
        room = self._store.room()
        needed = sum(cost.bytes_by_rank[rank] for rank in ranks)
        if room is not None and needed > room:
            raise NoSpaceError(
                f"{needed} bytes are to be written, {room} are free",
                where=str(self._store.location),
                hint="nothing was written; `ckpt prune` frees what runs do not need",
            )

    def _budgeted(self, resident: int) -> Budget:
        means, target = self._means, self._target
        chunks = (array.info.grid.chunk_elements * array.itemsize for array in target.arrays)
        largest = max(chunks, default=0)
        fixed = max(0, resident_bytes() - resident)
        each = 0 if means.is_here else _PROCESS_BYTES
        return Budget.of(means.memory, means.workers, largest, fixed, each)


def checked_from(checkpoint: Checkpoint, expected: str | None) -> None:
    """Refuse a step of another strategy than its user thinks."""
    if expected is None:
        return
    wanted = Strategy.of(expected)
    if wanted != checkpoint.strategy:
        raise UsageError(
            f"the step was written by {checkpoint.strategy}, not by {wanted}",
            where=checkpoint.location,
            hint="leave --from out: the strategy is in the step",
        )
