"""What a run does beside the training: a thread that saves, and copies of steps from a local folder
to another place. And the signal by which a scheduler takes the machine back: a save that is under
way ends before the process does, or all ranks save once more.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 — what it registers has to come last
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, ClassVar
from weakref import WeakSet

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ckptkit.checkpoint.places import (
    Place,
    StepFolder,
    newest_first,
    refuse_step,
    step_name,
    step_number,
    steps_to_keep,
    store_at,
)
from ckptkit.checkpoint.ranks import Failure, Ranks, in_one_line
from ckptkit.checkpoint.run.mirror import LOCAL, REMOTE, CopyOptions, Mirror
from ckptkit.checkpoint.run.run import Retention, Run, prune
from ckptkit.checkpoint.workers import look_until
from ckptkit.checkpoint.write.damage import Damage, mark_replaceable, note_replacing
from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.live.state.ranks import World
from ckptkit.storage import Store

log = logging.getLogger("ckptkit.live")


class Tiers:
    """The places of a run, as one rank sees them; all ranks make the same calls.

    With a local folder, steps are saved there and copied in the background. After each save and
    load a round of copying begins, in which rank 0 says what is to be copied. All ranks go through
    all rounds, in the same order, whether their own save went well or not.
    """

    def __init__(
        self,
        remote: Store,
        local: Place | None,
        retention: Retention,
        *,
        overwrite: bool,
        is_first: bool,
    ) -> None:
        if local is None and retention.local_keep_last is not None:
            raise UsageError(
                "local_keep_last is for a run with a local folder", hint="pass local=…"
            )
        self._remote = remote
        self._retention = retention
        self._is_first = is_first
        self.written = remote if local is None else store_at(local)
        """Where a save writes."""
        self._mirror: Mirror | None = None
        if local is not None:
            options = CopyOptions(overwrite=overwrite, progress=self._check_wanted)
            self._mirror = Mirror(self.written, remote, retention, options)
        self._copies = Background()
        self._has_looked = False
        self._given_up = threading.Event()
        self._over: list[Ranks] = []

    def keep(self, steps: Iterable[int]) -> None:
        """Which steps retention leaves from now on, besides those that its rules do. Those that
        were named before stay until these are committed.
        """
        named, before = steps_to_keep(steps), self._retention.keep
        if before[:1] != (named,):
            self._retention = replace(self._retention, keep=(named, *before))
        if self._mirror is not None:
            self._mirror.retention = self._retention

    def at(self, place: str) -> Store:
        """The store of a place that `candidates` names."""
        return self.written if place == LOCAL else self._remote

    def meet(self, ranks: Ranks) -> tuple[int, bytes] | None:
        """Before a save or a load: the number of the last round that failed on rank 0, and why."""
        if self._is_first:
            for store in (self._remote, self.written):
                # By the name first, as to look at each run is a request.
                if step_number(store.location.name) is not None:
                    refuse_step(store)
        if not self._has_looked:
            if ranks.share(lambda: self._mirror is not None) != (self._mirror is not None):
                raise UsageError(
                    f"`local` is passed on rank {ranks.rank} or on rank 0, not on both",
                    hint="pass it on all ranks, or on none: it is one folder that all of them see",
                )
            if self._mirror is not None:
                self._mirror.look(ranks)
            self._has_looked = True
        if self._mirror is None:
            return None
        failure = self._copies.newest_failure()
        told = (failure[0], Failure.of(0, failure[1]).said()) if failure else None
        found: tuple[int, bytes] | None = ranks.share(lambda: told)
        return found

    def turn(self, ranks: Ranks, step: int | None) -> Callable[[], None]:
        """Take the next turn to copy, before a save of a step or before a load.

        What is returned is called after that, however it ended, and begins a round of copying.
        Rounds come in the order in which turns were taken, which is the same on all ranks.
        """
        mirror = self._mirror
        if mirror is None:
            return lambda: None
        return self._copies.turn(lambda: self._round(mirror, ranks, step), "copying")

    def saved(self, step: int) -> None:
        """A step is committed: on rank 0 others may have to go. With a local folder that is left to
        the rounds of copying, as no step may go before it was copied.
        """
        if not self._is_first:
            return
        what = "older ones could not be deleted"
        try:
            if self._mirror is not None:
                what = "a later job may not copy it"
                places = self.written, self._remote
                note_replacing(*(StepFolder(place, step_name(step)) for place in places))
            elif not self._retention.is_all:
                # What lies above is of a future that was given up, and may be damaged.
                prune(self._remote, self._retention, up_to=step)
        except CkptkitError as error:
            # The next save tries again. No training ends, and no save is left out, because of this.
            log.error("step %d was saved, but %s: %s", step, what, in_one_line(error))

    def candidates(self, step: int | None, *, fallback: bool) -> list[tuple[int, str]]:
        """On rank 0: which steps to load from, best first, and from where."""
        run = Run(self._remote)
        if self._mirror is not None:
            found = self._mirror.candidates(step, fallback=fallback)
        elif step is None and not fallback:  # all steps of a long run are many requests
            newest = run.latest()
            found = [] if newest is None else [(newest, REMOTE)]
        else:
            steps = newest_first(run.steps() if fallback else [], step)
            found = [(number, REMOTE) for number in steps]
        if not found:
            refuse_step(self._remote)  # a copy of one has another name
        return found

    def mark_replaceable(self, damaged: Sequence[Damage], loaded: StepFolder) -> None:
        """A load took this step, as these are damaged: see `damage.mark_replaceable`."""
        if not self._is_first:
            return
        # Of the same step elsewhere nothing is lost, so nothing comes in its place.
        mark_replaceable([each for each in damaged if each[0].name != loaded.name], loaded)

    def raise_failed(self, said: tuple[int, bytes] | None) -> None:
        """Raise on all ranks what rank 0 said in `meet`. The others wait for the end of that round:
        it has failed on them too, and they may not know it yet.
        """
        if said is not None:
            number, problem = said
            error = self._copies.take(number)
            raise error or Failure.heard(problem).error("steps could not be copied", PeerError)

    def wait(self) -> None:
        """Return when all rounds are over; raises the last error."""
        self._copies.wait()

    def give_up(self) -> None:
        """The process has to end: leave what is not copied to the next job."""
        self._given_up.set()
        self._copies.give_up()

    def _round(self, mirror: Mirror, ranks: Ranks, step: int | None) -> None:
        if not self._has_looked or self._given_up.is_set():
            return  # a folder that was refused may be that of another run
        try:
            mirror.copy_pending(ranks, step)
        except CkptkitError as error:
            if self._given_up.is_set():
                log.warning("copying of steps was left to the next job")
                return
            error.what = (
                f"not all steps could be copied to {mirror.remote.location}, "
                f"they stay in {mirror.local.location}: {error.what}"
            )
            raise
        # All ranks have met in this round, so all have ended the one before: what that left in the
        # store nobody looks at any more. What this one leaves, others may still look at.
        for old in self._over:
            old.forget()
        self._over = [ranks] if self._is_first else []

    def _check_wanted(self, _: int) -> None:
        if self._given_up.is_set():
            raise PeerError("the process has to end: copying goes on in the next one")


# Where the training keeps all cores busy, a thread gets a thirtieth of one: the save takes twice or
# three times as long, and with four ranks on two cores costs the training a sixth of the time that
# it does with 5. With 19 it would take ten times as long. Idle cores are used all the same.
_NICER = 15


class Background:
    """Runs pieces of work in one thread, in the order in which their turns were taken. The error of
    each is kept under its number, counted from 1, until somebody takes it.

    A process that ends by itself first lets all of them finish.
    """

    def __init__(self) -> None:
        # Entered by itself: Ctrl-C may come in the middle of a condition's `__enter__`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turns: deque[_Turn] = deque()
        self._has_thread = False
        self._thread: threading.Thread | None = None
        self._taken = self._done = 0
        self._errors: dict[int, BaseException] = {}

    @property
    def is_running(self) -> bool:
        """Whether work is under way, or waits for its turn."""
        return self._done < self._taken

    def run(self, work: Callable[[], None], what: str) -> None:
        """Take the next turn, and begin as soon as it has come."""
        self.turn(work, what)()

    def turn(self, work: Callable[[], None], what: str) -> Callable[[], None]:
        """Take the next turn. What is returned lets the work begin; it has to be called some time,
        from any thread, as all work after it waits.
        """
        turn = _Turn(work, what)
        _unsettled.add(self)
        with self._lock:
            self._taken += 1
            self._turns.append(turn)

        def begin() -> None:
            with self._lock:
                turn.may_begin = True
                if self._has_thread or not self._turns or not self._turns[0].may_begin:
                    return
                self._has_thread = True
                # A daemon, which `give_up` can leave behind; otherwise the end of the process
                # waits for it.
                name = f"ckptkit {self._turns[0].what}"
                thread = threading.Thread(target=self._run_nicely, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    log.warning("%s holds up its caller: %s", turn.what, error)
                else:
                    self._thread = thread
                    return
            self._run()  # the system has no thread to give: late is better than not at all

        return begin

    def settle(self, seconds: float | None = None) -> None:
        """Return when all is done, or after so many seconds; errors are still there to be taken."""
        with self._lock:
            self._changed.wait_for(lambda: self._done == self._taken, seconds)

    def wait(self) -> None:
        """Return when all is done; raises the last error."""
        if (error := self.take()) is not None:
            raise error

    def newest_failure(self) -> tuple[int, BaseException] | None:
        """The number and the error of the last piece of work that failed, as far as it is known."""
        with self._lock:
            number = max(self._errors, default=0)
            return (number, self._errors[number]) if number else None

    def take(self, number: int | None = None) -> BaseException | None:
        """Wait until this many are done, or all; the last error among these, all of which are
        forgotten.
        """
        with self._lock:
            wanted = self._taken if number is None else number
            look_until(lambda some: self._changed.wait_for(lambda: self._done >= wanted, some))
            taken = [self._errors.pop(each) for each in sorted(self._errors) if each <= wanted]
            return taken[-1] if taken else None

    def give_up(self) -> None:
        """Begin nothing more, and let nobody wait for what runs."""
        with self._lock:
            self._turns.clear()
            self._errors.clear()
            self._done = self._taken
            self._changed.notify_all()
        _unsettled.discard(self)

    def _run_nicely(self) -> None:
        if sys.platform == "linux":  # elsewhere priorities are those of whole processes
            # The training has the processor first; the threads that this one starts inherit it.
            with suppress(OSError):
                thread = threading.get_native_id()
                priority = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
                os.setpriority(os.PRIO_PROCESS, thread, priority)
        self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not (self._turns and self._turns[0].may_begin):
                    self._has_thread = False
                    return
                turn = self._turns[0]
            error: BaseException | None = None
            try:
                turn.work()
            except BaseException as problem:  # noqa: BLE001 — handed to whoever takes it
                error = problem
                # At once as well: a job that ends without another call would never say it.
                log.error("%s failed: %s", turn.what, in_one_line(problem))
            with self._lock:
                if not self._turns:
                    self._has_thread = False
                    return  # given up meanwhile
                self._turns.popleft().store = None
                self._done += 1
                if error is not None:
                    self._errors[self._done] = error
                self._changed.notify_all()


def _store_of_job() -> object:
    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


@dataclass(slots=True)
class _Turn:
    work: Callable[[], None]
    what: str
    may_begin: bool = False
    # The training may end its process group meanwhile, and the rank that serves the job's store
    # does so for as long as somebody there holds it. Not for longer: who begins another group at
    # that address would find in it what the ranks of the first have said.
    store: object = field(default_factory=_store_of_job)


_unsettled: WeakSet[Background] = WeakSet()


def _settle_all() -> None:
    for background in list(_unsettled):
        background.settle()
        # A thread that still frees tensors while the interpreter ends would abort the process.
        if background._thread is not None:
            background._thread.join()


# A process that is copied has none of the threads: it would wait for them when it ends.
os.register_at_fork(after_in_child=_unsettled.clear)

# Before the thread pools' own end, which was registered earlier, when concurrent.futures was
# loaded: they take no more work after it. A thread that is merely no daemon is joined too late.
threading._register_atexit(_settle_all)  # type: ignore[attr-defined]


class Preemption:
    """Listens for SIGTERM, with which a scheduler takes the machine back in a minute.

    `finish` lets the save under way end and then leaves the process. `save` only notes it: the
    loop asks `should_stop` once in every step, and is told to stop at the same step on all ranks.

    Of several in one process all hear the signal, whichever came last, and the process is left
    when all of them are to `finish` and none is in a save.
    """

    _listening: ClassVar[list[Preemption]] = []

    def __init__(self, world: World, name: str, mode: str, finish: Callable[[], None]) -> None:
        if mode not in ("finish", "save"):
            raise UsageError('on_sigterm is "finish" or "save"', value=mode)
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals reach the main thread only",
                hint="make the Checkpointer there, or leave on_sigterm out",
            )
        store = world.rendezvous
        self._rendezvous = None if store is None else PrefixStore(name, store)
        self._mode = mode
        self._finish = finish
        self._requested = False
        self._is_saving = False
        self._frame: FrameType | None = None
        self._announced = False
        self._process = os.getpid()
        self._before: Any = signal.signal(signal.SIGTERM, self._on_signal)
        self._listening.append(self)

    def should_stop(self, step: int) -> bool:
        """Whether this is the step after which to save and leave, on all ranks alike.

        Ranks may be one step apart, as those that exchange gradients are.
        """
        if self._rendezvous is None:
            return self._requested
        if self._requested and not self._announced:
            self._announced = True
            # A step that no rank has asked about yet, whichever is ahead.
            self._rendezvous.compare_set("stop", "", str(step + 2))
        if not self._rendezvous.check(["stop"]):
            return False
        return step >= int(self._rendezvous.get("stop"))

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note the signal only, and leave at the end: what is done inside is a save."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False
            if self._requested:
                self._leave()

    def finish(self) -> None:
        """The loop is over, and asks no more: a signal ends the process after what is written."""
        self._mode = "finish"

    def remove(self) -> None:
        self._listening.remove(self)
        if signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before)

    def _on_signal(self, _: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A copy of the process, as workers are: whoever ends it waits until it has ended.
            signal.signal(signal.SIGTERM, self._before)
            signal.raise_signal(signal.SIGTERM)
            return
        for each in self._listening:
            each._requested = True
        log.warning("SIGTERM: %s", "saving once more" if self._mode == "save" else "finishing")
        self._frame = frame
        self._leave()

    def _leave(self) -> None:
        # What listened in the process that this one is a copy of has no part in it.
        here = [each for each in self._listening if each._process == self._process]
        if any(each._is_saving or each._mode == "save" for each in here):
            return
        for each in here:
            each._finish()
        if callable(self._before):
            self._before(signal.SIGTERM, self._frame)
        raise SystemExit(128 + signal.SIGTERM)
