"""Threads that share out work: writing, reading, checking and copying all do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import TypeVar

from ckptkit.storage import Abilities, Store

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_THREADS = 6
# Of small questions, each of which a file system answers at once.
_FEW = 8

Progress = Callable[[int], None]
"""Called, from any thread, with the number of bytes done since the last call."""


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_out(items: Iterable[T], do: Callable[[T], object], count: int) -> None:
    """Let some threads take the items in their order, each the next one as soon as it is done with
    the one before; after an error, which is raised, or Ctrl-C nobody takes another.
    """
    if count <= 1:
        for item in items:
            do(item)
        return
    pending, lock, stopped = iter(items), threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    futures: list[Future[None]] = []

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    # A list, since an item may be anything.
                    item = list(islice(pending, 1))
                if not item:
                    return
                do(item[0])
        except BaseException as error:
            errors.append(error)
            raise

    try:
        with ThreadPoolExecutor(count, thread_name_prefix="ckptkit") as executor:
            try:
                futures += [executor.submit(work) for _ in range(count)]
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                stopped.set()
        if errors:
            raise _first(errors)
    finally:
        # Errors, whose tracebacks know this frame, would be kept alive by it.
        errors.clear()
        futures.clear()


def _first(errors: Sequence[BaseException]) -> BaseException:
    """The one that came first, or that it came from: threads that fail because another one did may
    be faster.
    """
    cause = errors[0].__cause__
    return cause if cause is not None and any(cause is error for error in errors) else errors[0]


def at_once(can: Abilities) -> int:
    """How many small questions at a time a store answers fast."""
    return can.concurrency or _FEW


def ask_all(
    store: Store, ask: Callable[[T], R], items: Iterable[T], most: int | None = None
) -> Iterator[R]:
    """Ask the same of many things, some at a time, never far ahead of who takes the answers; these
    come in order.
    """
    if not store.abilities.waits_for_answers:
        yield from map(ask, items)
        return
    yield from asked_in_threads(ask, items, most or at_once(store.abilities))


def asked_in_threads(ask: Callable[[T], R], items: Iterable[T], count: int) -> Iterator[R]:
    """What `ask` says of each item, in their order, asked by so many threads."""
    left = iter(items)
    with ThreadPoolExecutor(count, thread_name_prefix="ckptkit") as executor:
        under_way = [executor.submit(ask, item) for item in islice(left, 2 * count)]
        try:
            while under_way:
                answer = under_way.pop(0).result()
                under_way += [executor.submit(ask, item) for item in islice(left, 1)]
                yield answer
        finally:
            for future in under_way:
                future.cancel()
