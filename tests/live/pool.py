"""Gloo processes that are started once and run one job after another."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.live.network import DEVICE

T = TypeVar("T")

# Torch keeps the threads of groups that are gone, and each wakes up a hundred times a second.
_MOST_THREADS = 32
# On a busy machine one rank has imported a job long before another.
_MEETING = timedelta(seconds=150)
_GRACE = 2.0  # a rank that fails leaves the others in a collective that never ends
_PRELOADED = ["tests.live.preloaded"]


class JobError(Exception):
    """A rank of a job failed, died, or did not come to an end."""


@dataclass(frozen=True, slots=True)
class Died:
    """What a job gives for a rank that ended its process."""

    exit_code: int | None


@dataclass(slots=True)
class _Worker:
    process: ForkServerProcess
    pipe: Connection
    is_worn: bool = False

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


@dataclass(slots=True)
class _Job:
    """What is known of the ranks of a job so far."""

    results: dict[int, Any] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)


class Pool:
    """Runs a function on the ranks of a gloo job; the processes outlive the job.

    A job is a function of a module that the workers can import. What it returns comes back, by
    rank; the first traceback of a rank is raised.
    """

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        # Torch is imported once, by the process that all workers are forked from.
        self.context.set_forkserver_preload(_PRELOADED)
        self._workers: dict[int, _Worker] = {}
        # Not TCP: that looks up the names of hosts, which takes seconds where nobody knows them.
        self._stores = tempfile.TemporaryDirectory(prefix="stores-")
        self._jobs = 0

    def run(
        self,
        ranks: int,
        job: Callable[..., T],
        *args: object,
        timeout: float = 200.0,
        may_die: Sequence[int] = (),
    ) -> list[T]:
        """What the job returns on each rank; `Died` for ranks that may end their process."""
        __tracebackhide__ = True
        self._jobs += 1
        workers = [self._worker(rank) for rank in range(ranks)]
        for rank, worker in enumerate(workers):
            worker.pipe.send((job, args, rank, ranks, f"{self._stores.name}/{self._jobs}"))
        found = self._watch(workers, timeout, may_die)
        died = [rank for rank, result in found.results.items() if isinstance(result, Died)]
        if found.problems or died:
            # Their process groups have lost a member, or never ended.
            self._end(range(ranks))
        if found.problems:
            raise JobError("\n".join(found.problems[rank] for rank in sorted(found.problems)))
        return [found.results[rank] for rank in range(ranks)]

    def end(self) -> None:
        """End all processes; the next job has fresh ones."""
        self._end(list(self._workers))

    def close(self) -> None:
        """End all processes for good."""
        self.end()
        self._stores.cleanup()

    def _watch(self, workers: list[_Worker], timeout: float, may_die: Sequence[int]) -> _Job:
        found = _Job()
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(workers))
        while waiting:
            sources = {w.pipe: rank for rank, w in waiting.items()}
            ready = wait(list(sources), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = sources[pipe]  # type: ignore[index]
                _hear(waiting.pop(rank), rank, found, may_die)
            if found.problems:
                deadline = min(deadline, time.monotonic() + _GRACE)
            if not ready and time.monotonic() >= deadline:
                if not found.problems:
                    late = ", ".join(map(str, sorted(waiting)))
                    found.problems[-1] = f"rank {late} still ran after {timeout:g} s"
                break
        return found

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers.get(rank)
        if worker is not None and worker.is_worn:
            self._end([rank])
            worker = None
        if worker is None or not worker.process.is_alive():
            mine, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            worker = self._workers[rank] = _Worker(process, mine)
        return worker

    def _end(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if rank in self._workers:
                self._workers.pop(rank).end()


def _hear(worker: _Worker, rank: int, found: _Job, may_die: Sequence[int]) -> None:
    try:
        went_well, result, worker.is_worn = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(_GRACE)
        code = worker.process.exitcode
        if rank in may_die:
            found.results[rank] = Died(code)
        else:
            found.problems[rank] = f"rank {rank} ended its process with exit code {code}"
        return
    if went_well:
        found.results[rank] = result
    else:
        found.problems[rank] = f"rank {rank}:\n{result}"


def _serve(pipe: Connection) -> None:
    """What a worker does: one job after another, until nobody is left to ask for them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"ckptkit\..*")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with suppress(EOFError, OSError):
        while True:
            job, args, rank, ranks, store = pipe.recv()
            try:
                answer = True, _run(job, args, rank, ranks, store)
            except BaseException:  # noqa: BLE001 — told to the test
                answer = False, traceback.format_exc()
            threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 — counted, not read
            pipe.send((*answer, threads > _MOST_THREADS))


def _run(job: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, path: str) -> Any:
    store = FileStore(path, ranks)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else f"cpu:gloo,{DEVICE}:gloo",
        store=store,
        rank=rank,
        world_size=ranks,
        timeout=_MEETING,
    )
    try:
        dist.barrier()  # a rank that fails at once must not take away what others connect to
        return job(*args)
    finally:
        dist.destroy_process_group()
        # They know the process groups by name, and the next job's have the same names.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _gen_transform_infos.cache_clear()
