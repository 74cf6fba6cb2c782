"""Who copies the packs: the threads of this process, or an executor's workers in others."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from ckptkit.checkpoint.locate import read_manifest
from ckptkit.checkpoint.places import described, store_at
from ckptkit.checkpoint.read.checkpoint import Checkpoint
from ckptkit.checkpoint.read.packs import OpenPacks
from ckptkit.checkpoint.reshard.budget import Budget
from ckptkit.checkpoint.reshard.copying import Route
from ckptkit.checkpoint.reshard.running import Packs
from ckptkit.checkpoint.reshard.target import Outline, Recipe, Target, target_of
from ckptkit.checkpoint.workers import Progress
from ckptkit.errors import CkptkitError, FormatError, PeerError, UsageError
from ckptkit.storage import Address

ENGINES = "threads, processes, dask://host:port, ray, ray://host:port or slice:i/n"


@dataclass(frozen=True, slots=True)
class Task:
    """One pack to be copied, for a worker that knows nothing else."""

    source: Address
    source_prefix: str
    source_save_id: str
    destination: Address
    prefix: str
    save_id: str
    recipe: Recipe
    rank: int
    budget: Budget


@dataclass(frozen=True, slots=True)
class Slice:
    """Every n-th pack, beginning with number i: the share of one of n machines."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Slice:
        """Read `slice:0/4`."""
        number, _, count = text.removeprefix("slice:").partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count) <= 1 << 24):
            raise UsageError(
                "not a slice", value=text, hint="the first of four is slice:0/4, the last slice:3/4"
            )
        return cls(int(number), int(count))

    def of(self, ranks: Sequence[int]) -> list[int]:
        """The ranks of this share."""
        return [rank for rank in ranks if rank % self.count == self.number]


def check_engine(engine: object) -> None:
    """Refuse what is no engine before anything is done."""
    if isinstance(engine, Executor) or engine in ("threads", "processes", "ray"):
        return
    if isinstance(engine, str) and engine.startswith("slice:"):
        Slice.parse(engine)
    elif not (isinstance(engine, str) and engine.startswith(("dask://", "ray://"))):
        raise UsageError("no such engine", value=engine, hint=f"accepted are {ENGINES}")


def copy_pack(task: Task) -> int:
    """Copy one pack; returns its rank."""
    target, checkpoint = _looked_up(task)
    sources = OpenPacks(checkpoint.store, checkpoint.prefix, checkpoint.manifest)
    try:
        store = store_at(task.destination)
        route = Route(checkpoint, sources, store, task.prefix, task.budget)
        Packs(target, [task.rank], route).run()
    finally:
        sources.close()
    return task.rank


# Seconds between looks at whether the parent still lives.
_LOOKS = 0.5

_Key: TypeAlias = tuple[Address, str, str, str]

_known: dict[_Key, tuple[Target, Checkpoint]] = {}
_lock = threading.Lock()


def _looked_up(task: Task) -> tuple[Target, Checkpoint]:
    """What the tasks of one worker have in common, decided once."""
    key = task.source, task.source_prefix, task.source_save_id, task.save_id
    with _lock:
        if key not in _known:
            found = _decided(task)
            _known.clear()
            _known[key] = found
        return _known[key]


def _decided(task: Task) -> tuple[Target, Checkpoint]:
    store = store_at(task.source)
    manifest = read_manifest(store, task.source_prefix)
    if manifest.save.save_id != task.source_save_id:
        raise FormatError(
            "the step was saved anew meanwhile",
            where=described(store, task.source_prefix),
            hint="run the command again",
        )
    target = target_of(Outline.of(manifest), task.recipe)
    if target.save.save_id != task.save_id:
        raise PeerError(
            f"this worker would make {target.save.save_id}, wanted is {task.save_id}",
            hint="all workers need the same version of ckptkit",
        )
    return target, Checkpoint(store, task.source_prefix, manifest)


def run_tasks(
    executor: Executor,
    tasks: Sequence[Task],
    sizes: Callable[[int], int],
    progress: Progress | None,
) -> None:
    """Run tasks on any executor; the first error stops what has not begun."""
    futures: list[Future[int]] = [executor.submit(copy_pack, task) for task in tasks]
    try:
        for future in as_completed(futures):
            rank = future.result()
            if progress:
                progress(sizes(rank))
    except CkptkitError:
        raise
    except Exception as error:
        # What executors say of workers that died, each in its own way.
        done = sum(1 for f in futures if f.done() and not f.cancelled() and f.exception() is None)
        raise PeerError(
            f"a worker was lost: {done} of {len(tasks)} packs are complete",
            value=type(error).__name__,
            hint="it may have run out of memory; the same command again goes on from there",
        ) from error
    finally:
        for future in futures:
            future.cancel()


def _follow(parent: int) -> None:
    """End with the process that this one works for, which alone hears Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def executor_of(engine: str | Executor, workers: int) -> Iterator[Executor]:
    """The executor of an engine's name, for as long as the block lasts."""
    if isinstance(engine, Executor):
        yield engine
    elif engine == "processes":
        context = multiprocessing.get_context("spawn")
        own = (os.getpid(),)
        with ProcessPoolExecutor(workers, context, initializer=_follow, initargs=own) as pool:
            yield pool
    elif engine.startswith("dask://"):
        from ckptkit.checkpoint.reshard.clusters import dask_executor  # noqa: PLC0415

        with dask_executor(engine.removeprefix("dask://")) as found:
            yield found
    else:
        from ckptkit.checkpoint.reshard.clusters import ray_executor  # noqa: PLC0415

        with ray_executor(engine if "://" in engine else "") as found:
            yield found
