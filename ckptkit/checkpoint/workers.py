"""Threads that share out work, as writing, reading, checking and copying do, and how much they ask
of a store at a time.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Self, TypeVar

from ckptkit.model.document import size_text
from ckptkit.storage import Abilities, Store
from ckptkit.storage.base.disk import DEVICE_BYTES

T = TypeVar("T")
R = TypeVar("R")

DEFAULT_THREADS = 6
# Of small questions, each of which a file system answers at once.
_FEW = 8
# Seconds that the main thread waits at a time: see `look_until`.
LOOK = 0.2
_MOMENT = 0.005
# A request is in memory twice for a moment: as it came, and where it was asked for.
_COPIES = 2
_LEAST_REQUEST = 1 << 20
# Above that, many requests at a time are worth more than larger ones.
_GOOD_REQUEST = 8 << 20
# What is copied is on its way to nobody: a device has about half of these to work on.
_FROM_DEVICE = 12
# A device reads so much in the time of a request.
_GAP_ON_DEVICE = 128 << 10

Progress = Callable[[int], None]
"""Called, from any thread, with the number of bytes done since the last call."""

_BETWEEN = 0.2  # seconds, of what a notebook shows


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for cycles of garbage later, as a block or a decorated function. While some
    objects are made for each of 100,000 arrays, looking at all of them again and again takes longer
    than making them; a job with a large model has millions more.

    In the main thread only, so that no two of these blocks end in each other's middle. Whether
    Python looks is said for the whole process: what another thread says of it meanwhile is undone.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        gc.disable()
        yield
    finally:
        gc.enable()


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def copy_threads(ranks: int = 1) -> int:
    """How many threads of each of so many ranks copy memory: its share of the cores, within reason,
    since by then the memory is what is slow.
    """
    return max(1, min(8, cores() // ranks))


def look_until(is_over: Callable[[float], bool]) -> None:
    """Wait by short waits, each of which says whether it is over: Ctrl-C may reach another thread,
    which ends no wait of this one, and is heard between two.
    """
    while not is_over(LOOK):
        pass


def share_out(items: Iterable[T], do: Callable[[T], object], count: int) -> None:
    """Let some threads take the items in their order, each the next one as soon as it is done with
    the one before; after an error, which is raised, or Ctrl-C nobody takes another.
    """
    if isinstance(items, Sized):
        count = min(count, len(items))
    if count <= 1:
        for item in items:
            do(item)
        return
    pending, lock, stopped = iter(items), threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    futures: list[Future[None]] = []
    busy: list[None] = []  # one for each thread that works

    def work() -> None:
        busy.append(None)
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
        finally:
            busy.pop()

    executor = ThreadPoolExecutor(count, thread_name_prefix="ckptkit")
    try:
        try:
            futures += [executor.submit(work) for _ in range(count)]
            look_until(
                lambda seconds: bool(errors) or not wait(futures, seconds, FIRST_EXCEPTION).not_done
            )
        finally:
            stopped.set()
            _settle(busy)
            executor.shutdown()
        if errors:
            # Threads that fail because another one did may be faster: then that one's counts.
            raise next((e for e in errors if e is errors[0].__cause__), errors[0])
    finally:
        # Errors, whose tracebacks know this frame, would be kept alive by it.
        errors.clear()
        futures.clear()


def _settle(busy: Sequence[object]) -> None:
    """Wait until no thread is busy, through any number of Ctrl-C: as long as one works it writes
    into memory of the caller's, who would take that for free.
    """
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            # Not `join`, which takes a thread for ended when Ctrl-C comes (Python 3.11).
            while busy:
                time.sleep(_MOMENT)
        except KeyboardInterrupt as error:
            interrupt = error
        else:
            break
    if interrupt is not None:
        raise interrupt


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
        # As many again wait their turn, so that no thread is idle while an answer is taken.
        under_way = [executor.submit(ask, item) for item in islice(left, 2 * count)]
        try:
            while under_way:
                look_until(lambda seconds: not wait(under_way[:1], seconds).not_done)
                answer = under_way.pop(0).result()
                under_way.extend(executor.submit(ask, item) for item in islice(left, 1))
                yield answer
        finally:
            for future in under_way:
                future.cancel()


@dataclass(frozen=True, slots=True)
class Pace:
    """How a store is read: the size of requests, how many there are at a time, and what they may
    take along that nobody needs.
    """

    requests: int
    request_bytes: int
    gap_bytes: int
    by_request: bool
    """Each read waits for an answer: of a server, or of a device past the page cache. Elsewhere
    reads are copies, and many small ones cost little: some rows of many chunks at a time.
    """
    borrows: bool = True
    """Whether what the system has of a file in memory is copied from there. Meanwhile it counts as
    memory of this process.
    """

    @classmethod
    def of(cls, store: Store, memory: int | None = None) -> Pace:
        """What a store likes best; elsewhere than in a file system never more than `memory` is on
        its way.
        """
        can = store.abilities
        if not can.waits_for_answers:
            requests = can.concurrency or copy_threads()
            return cls(requests, can.request_bytes, can.gap_bytes, by_request=False)
        whole = cls(at_once(can), can.request_bytes, can.gap_bytes, by_request=True)
        return whole if memory is None else whole.within(memory)

    def past_cache(self) -> Pace:
        """How a device is read past the page cache: as a server is, by few large requests."""
        return replace(
            self,
            requests=max(self.requests, _FROM_DEVICE),
            request_bytes=DEVICE_BYTES,
            gap_bytes=_GAP_ON_DEVICE,
            by_request=True,
        )

    @property
    def nbytes(self) -> int:
        """The most that is on its way, besides what the caller reads into."""
        return self.requests * self.request_bytes * _COPIES if self.by_request else 0

    def within(self, memory: int) -> Pace:
        """A pace that takes so much memory: smaller requests, as long as they are good ones, then
        fewer of them, and where even one is too much a smaller one.
        """
        if not self.by_request or self.nbytes <= memory:
            return self
        room = memory // _COPIES
        good = min(self.request_bytes, max(_GOOD_REQUEST, room // self.requests))
        requests = min(self.requests, max(1, room // good))
        return self._sized(requests, room // requests)

    def shared(self, workers: int) -> Pace:
        """What each of some workers in bounded memory gets of it; in a file system, where each does
        its own reading, one request.
        """
        if not self.by_request:
            return replace(self, requests=1, borrows=False)
        requests = max(1, self.requests // workers)
        return self._sized(requests, self.requests * self.request_bytes // (requests * workers))

    def _sized(self, requests: int, size: int) -> Pace:
        size = min(self.request_bytes, max(_LEAST_REQUEST, size))
        gap = min(self.gap_bytes, self.gap_bytes * size // min(_GOOD_REQUEST, self.request_bytes))
        return replace(self, requests=requests, request_bytes=size, gap_bytes=gap)


class ProgressBar:
    """Shows in a notebook how far long work is, and how fast; elsewhere it shows nothing.

    What takes `progress` calls it, from any thread, with the bytes that are done; it may be called
    with the bytes of all that is to be done, where these are known::

        with ckptkit.ProgressBar("verify", checkpoint.stored_bytes) as bar:
            ckptkit.verify("runs/7b", progress=bar)
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self._begun = self._shown = time.monotonic()
        self._lock = threading.Lock()
        self._handle: Any = None

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if time.monotonic() - self._shown >= _BETWEEN:
                self._show()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._show()

    def __repr__(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-3)
        text = f"{self.label}: {size_text(self.done)}"
        if self.total:
            text += f" of {size_text(self.total)}"
        text += f", {size_text(self.done / seconds)}/s"
        if self.total and 0 < self.done < self.total:
            text += f", {seconds * (self.total / self.done - 1):.0f} s left"
        return text

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415 - for notebooks only

        # A bar that says nothing where nobody knows how much there is.
        values = f' value="{min(self.done, self.total)}" max="{self.total}"' if self.total else ""
        return f"<div><progress{values}></progress> <small>{escape(repr(self))}</small></div>"

    def _show(self) -> None:
        self._shown = time.monotonic()
        # Where nothing has imported it there is no notebook.
        ipython = sys.modules.get("IPython")
        if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
            return
        if self._handle is None:
            self._handle = ipython.display.display(self, display_id=True)
        else:
            self._handle.update(self)
