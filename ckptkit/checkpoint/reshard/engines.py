"""Who copies the packs: the threads of this process, an executor's workers in others, or some
machines a slice each. And which packs are there already, of an earlier run or of other slices.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import resource_tracker
from typing import Any

import numpy as np

from ckptkit.checkpoint.places import (
    DATA,
    Place,
    StepFolder,
    committed_steps,
    described,
    step_folders,
    store_at,
)
from ckptkit.checkpoint.read.checkpoint import Checkpoint, reopened
from ckptkit.checkpoint.read.packs import PackBytes, faults_of, read_record
from ckptkit.checkpoint.reshard.copy import at_work, copy_packs
from ckptkit.checkpoint.reshard.target import Budget, ReshardOptions, ReshardTarget, target_of
from ckptkit.checkpoint.workers import LOOK, Progress
from ckptkit.checkpoint.write.commit import commit, committed_save_id, gather
from ckptkit.errors import (
    CkptkitError,
    FormatError,
    NotCommittedError,
    NotFoundError,
    PeerError,
    UsageError,
)
from ckptkit.format.array_table import ArrayTables
from ckptkit.format.manifest import Manifest, pack_name
from ckptkit.plan.chunks import chunks_to_write
from ckptkit.storage import Address, Options, Store

ENGINES = "threads, processes, dask://host:port, ray, ray://host:port or slice:i/n"
_NAMED = 8
# Seconds between looks at whether the parent still lives.
_LOOKS = 0.5
# What has not been written for so long is taken for abandoned.
QUIET_SECONDS = 5.0


def ranks_to_copy(options: ReshardOptions, source: Store, destination: Store) -> range:
    """The ranks whose packs are asked for: all, or of a slice:i/n every n-th beginning with rank i,
    the share of one of n machines. What is no engine is refused, and one whose workers do not see
    both stores.
    """
    engine, count = options.engine, options.strategy.world_size
    name = engine if isinstance(engine, str) else ""
    if options.is_slice:
        first, _, step = name.removeprefix("slice:").partition("/")
        if first.isdecimal() and step.isdecimal() and int(first) < int(step) <= 1 << 24:
            return range(int(first), count, int(step))
        raise UsageError(
            "not a slice", value=engine, hint="the first of four is slice:0/4, the last slice:3/4"
        )
    known = name in ("threads", "processes", "ray") or name.startswith(("dask://", "ray://"))
    if not known and not isinstance(engine, Executor):
        raise UsageError("no such engine", value=engine, hint=f"accepted are {ENGINES}")
    for store in (source, destination):
        if not options.is_here and store.location.scheme == "memory":
            raise UsageError(
                "what is in the memory of this process no other worker sees",
                where=str(store.location),
                hint="use the engine threads",
            )
    return range(count)


@dataclass(frozen=True, slots=True)
class Task:
    """One pack to be copied, for a worker that knows nothing else."""

    source: Address
    source_folder: str
    source_save_id: str
    destination: Address
    save_id: str
    options: ReshardOptions
    digest: str
    rank: int
    budget: Budget


def copy_elsewhere(
    target: ReshardTarget,
    ranks: Sequence[int],
    source: Checkpoint,
    destination: Store,
    budget: Budget,
    copied: Callable[[int], None],
) -> None:
    """Have an executor's workers copy packs; `copied` is told the rank of each that is done. The
    first error stops what has not begun, and on Ray what runs too.
    """
    engine = target.options.engine
    # Each worker writes one pack at a time, in a process of its own.
    alone = replace(
        budget,
        workers=1,
        whole_pace=budget.pace,
        packs=1,
        shared_bytes=0,
        decoded_bytes=budget.decoded_bytes // budget.workers,
    )
    # What a worker need not know, and could not be sent.
    options = replace(target.options, engine="threads")
    places = source.store.address, source.folder.name, source.save_id, destination.address
    what = target.save.save_id, options, target.digest
    with _executor(engine, budget.workers) as executor:
        tasks = [Task(*places, *what, rank, alone) for rank in ranks]
        with _unheard():
            futures: list[Future[int]] = [executor.submit(copy_pack, task) for task in tasks]
        try:
            left = set(futures)
            while left:
                done, left = wait(left, LOOK, FIRST_COMPLETED)
                for future in done:
                    copied(future.result())
        except CkptkitError:
            raise
        except Exception as error:
            # What executors say of workers that died, each in its own way.
            ended = [f for f in futures if f.done() and not f.cancelled()]
            complete = sum(1 for f in ended if f.exception() is None)
            raise PeerError(
                f"a worker was lost: {complete} of {len(tasks)} packs are complete",
                value=type(error).__name__,
                hint="it may have run out of memory; the same command again goes on from there",
            ) from error
        finally:
            for future in futures:
                future.cancel()


_known: dict[tuple[Address, str, str, str], tuple[ReshardTarget, Manifest]] = {}
_lock = threading.Lock()


def copy_pack(task: Task) -> int:
    """Copy one pack; returns its rank. What a worker's tasks have in common is decided once."""
    key = task.source, task.source_folder, task.source_save_id, task.save_id
    with _lock:
        if key not in _known:
            manifest = reopened(*key[:3]).manifest
            target = target_of(manifest, task.options, task.digest)
            if target.save.save_id != task.save_id:
                raise PeerError(
                    f"this worker would make {target.save.save_id}, wanted is {task.save_id}",
                    hint="all workers need the same version of ckptkit",
                )
            _known.clear()
            _known[key] = target, manifest
        target, manifest = _known[key]
    with Checkpoint(StepFolder(store_at(task.source), task.source_folder), manifest) as source:
        destination = store_at(task.destination)
        copy_packs(target, [task.rank], source, destination, task.budget)
    return task.rank


def _executor(engine: str | Executor, workers: int) -> AbstractContextManager[Executor]:
    """The executor of an engine's name, for as long as the block lasts."""
    if isinstance(engine, Executor):
        return nullcontext(engine)
    if engine == "processes":
        context = multiprocessing.get_context("spawn")
        own = (os.getpid(),)
        resource_tracker.ensure_running()  # begun later, it would undo `_unheard`
        return ProcessPoolExecutor(workers, context, initializer=_follow, initargs=own)
    if engine.startswith("dask://"):
        return _dask_executor(engine.removeprefix("dask://"))
    return _ray_executor(engine if "://" in engine else "")


@contextmanager
def _unheard() -> Iterator[None]:
    """Processes that start meanwhile never hear Ctrl-C, of which their Python would tell before
    `_follow` could ignore it; this thread hears it a moment later.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _follow(parent: int) -> None:
    """End with the process that this one works for, which alone hears Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _dask_executor(address: str) -> Iterator[Executor]:
    """The workers of a Dask scheduler."""
    distributed = _imported("dask", "distributed")
    host, _, port = address.rpartition(":")
    try:
        # The client itself would go on in the background, and complain at the end.
        socket.create_connection((host, int(port)), timeout=5).close()
        client = distributed.Client(f"tcp://{address}", timeout="5s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise PeerError(
            "no Dask scheduler answers", where=f"dask://{address}", hint="is `dask scheduler` up?"
        ) from error
    with client:
        # A pack may be written once only: where a worker is lost the caller hears of it.
        yield client.get_executor(pure=False, retries=0)


@contextmanager
def _ray_executor(address: str) -> Iterator[Executor]:
    """The workers of a Ray cluster; without an address one on this machine."""
    ray = _imported("ray", "ray")
    started = not ray.is_initialized()
    if started:
        try:
            ray.init(address=address or None, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise PeerError("no Ray cluster answers", where=address, hint=str(error)) from error
    try:
        with _RayExecutor(ray) as executor:
            yield executor
    finally:
        if started:
            ray.shutdown()


@dataclass(eq=False)
class _RayExecutor(Executor):
    """Tasks as Ray has them, futures as everybody has them."""

    _ray: Any
    _watchers: list[threading.Thread] = field(default_factory=list)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        reference = self._ray.remote(max_retries=0)(fn).remote(*args, **kwargs)

        def cancel(done: Future[Any]) -> None:
            if done.cancelled():
                self._ray.cancel(reference)

        future.add_done_callback(cancel)
        watcher = threading.Thread(target=self._watch, args=(reference, future), daemon=True)
        watcher.start()
        self._watchers.append(watcher)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as Executor has it
        if wait:
            for watcher in self._watchers:
                watcher.join()

    def _watch(self, reference: Any, future: Future[Any]) -> None:
        result, problem = None, None
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            problem = error.cause if isinstance(error.cause, Exception) else error
        except BaseException as error:  # noqa: BLE001 - the future carries it
            problem = error
        # Until now, as it can be cancelled while it waits and while it runs.
        if not future.set_running_or_notify_cancel():
            return
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(problem)


def _imported(engine: str, package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise UsageError(
            f"the engine {engine} needs a package that is not installed",
            value=package,
            hint=f"pip install 'ckptkit[{engine}]'",
        ) from error


# What an earlier run left: packs that are whole need not be copied again.


def finished_packs(
    target: ReshardTarget,
    folder: StepFolder,
    ranks: Sequence[int],
    progress: Progress | None = None,
    *,
    again: bool = False,
) -> set[int]:
    """The ranks of these whose packs are there, whole and of these bytes; what is left of others is
    removed, with `again` also where the very step is committed.
    """
    store, save_id = folder.store, target.save.save_id
    data = folder.data(save_id)
    there = set(store.children(data))
    finished = set()
    for rank in ranks:
        key = f"{data}/{pack_name(rank)}"
        if pack_name(rank) not in there:
            continue
        if not _is_finished(target, folder, rank, progress):
            # Where a pack is visible before it is finished, another run may still be writing it.
            may_be_open = store.abilities.claims_names
            if may_be_open:
                _wait_until_quiet(store, key)
            # Another run may have finished it meanwhile, or even have made the step.
            if not (may_be_open and _is_finished(target, folder, rank, progress)):
                if committed_save_id(folder) == save_id and not again:
                    raise at_work(described(store, key))
                store.delete([key])
                continue
        if store.abilities.claims_names:
            # Its writer may have died between the last byte and making it durable.
            store.sync([key])
        finished.add(rank)
    return finished


def _is_finished(
    target: ReshardTarget, folder: StepFolder, rank: int, progress: Progress | None
) -> bool:
    """Whether a pack has the record that it has to have, and the bytes that this says."""
    tables = ArrayTables()
    tables.add(target.table, len(target.strategy.mesh.axes))
    try:
        found = read_record(folder, target.save.save_id, rank, tables)
    except (FormatError, NotFoundError):
        return False
    record, chunks = found.record, chunks_to_write(target.owned, rank)
    numbers = np.repeat(np.arange(len(chunks)), [len(each) for each in chunks])
    if not (
        record.save.strategy == target.save.strategy
        and record.table.digest == target.table.digest
        and np.array_equal(record.array, numbers)
        and np.array_equal(record.chunk, np.concatenate([*chunks, np.zeros(0, np.int64)]))
    ):
        return False
    store, key = folder.store, folder.pack(target.save.save_id, pack_name(rank))
    try:
        known = PackBytes.of_rank(found, described(store, key))
        return not faults_of(store, key, found.pack.size, known, progress=progress)
    except FormatError:
        return False


def _wait_until_quiet(store: Store, key: str) -> None:
    """Return when nobody has written an unfinished pack for a while: it may belong to another run,
    which must not lose it.
    """
    last = _modified(store, key)
    age = QUIET_SECONDS if last is None else time.time() - last
    if age < QUIET_SECONDS:
        # Whatever the server's clock says: what has not changed since then is quiet.
        time.sleep(min(QUIET_SECONDS, QUIET_SECONDS - age))
        if _modified(store, key) not in (last, None):
            raise at_work(described(store, key))


def _modified(store: Store, key: str) -> float | None:
    folder = key.rpartition("/")[0]
    return next((entry.modified for entry in store.list(folder) if entry.key == key), None)


def commit_packs(
    location: Place,
    *,
    step: int | None = None,
    save_id: str | None = None,
    overwrite: bool = False,
    storage_options: Options | None = None,
) -> Manifest:
    """Commit the step of a run whose packs slices have written: the only one that is not committed,
    unless `step` names it.

    `save_id` says whose packs are meant, where those of several reshards are in the step;
    `overwrite` lets the step replace one that is committed.
    """
    store = store_at(location, storage_options)
    folder = _begun_step(store, step, overwrite=overwrite)
    names, where = store.children(folder.data()), folder.where(DATA)
    committed = committed_save_id(folder)
    if names and save_id is not None and save_id not in names:
        hint = f"there is {', '.join(names[-_NAMED:])}"
        raise NotFoundError("no such save", where=where, value=save_id, hint=hint)
    wanted = {save_id} if save_id is not None else set(names) - {committed}
    # Where slices wrote damaged packs of the very step anew, it is closed again.
    found = [name for name in names if name in wanted or (overwrite and not wanted)]
    if not found:
        is_there = committed in names
        raise NotFoundError(
            "no packs but those of the committed step" if is_there else "no packs",
            where=where,
            hint="--overwrite looks at these again" if is_there else "reshard its slices first",
        )
    if len(found) > 1:
        raise UsageError(
            f"the packs of {len(found)} saves: {', '.join(found[-_NAMED:])}",
            where=where,
            hint="say which one with save_id (`ckpt commit RUN --save-id …`)",
        )
    save_id = found[0]
    data = folder.data(save_id)
    there = set(store.children(data))
    try:
        first = read_record(folder, save_id, 0, ArrayTables())
    except CkptkitError as error:
        raise NotCommittedError(
            f"the first pack is missing or not complete: {error.what}",
            where=described(store, data),
            hint="run the slice 0 (again)",
        ) from error
    count = first.record.save.world_size
    missing = [rank for rank in range(count) if pack_name(rank) not in there]
    if missing:
        shown = ", ".join(map(str, missing[:_NAMED])) + (" …" if len(missing) > _NAMED else "")
        raise NotCommittedError(
            f"missing are {len(missing)} of {count} packs, of the ranks {shown}",
            where=described(store, data),
            hint="run their slices (again): slice:i/n has the ranks that leave i when divided by n",
        )
    manifest = gather(folder, save_id)
    if store.abilities.claims_names:
        # A slice may have died between its last byte and making that durable.
        store.sync([f"{data}/{pack.name}" for pack in manifest.packs])
    commit(folder, manifest, overwrite=overwrite)
    return manifest


def _begun_step(store: Store, step: int | None, *, overwrite: bool) -> StepFolder:
    folders, done = step_folders(store), committed_steps(store)
    if step is not None:
        if step not in folders:
            raise NotFoundError("no such step", where=str(store.location), value=step)
        return StepFolder(store, folders[step])
    begun = [number for number in folders if number not in done]
    if overwrite and not begun:
        begun = list(done)
    if not begun:
        raise NotFoundError(
            "nothing to commit: every step is committed" if done else "nothing to commit",
            where=str(store.location),
            hint="pass the run that the slices were written to",
        )
    if len(begun) > 1:
        raise UsageError(
            f"several steps are not committed: {', '.join(map(str, begun[-_NAMED:]))}",
            where=str(store.location),
            hint="say which one with step (`ckpt commit RUN --step …`)",
        )
    return StepFolder(store, folders[begun[0]])
