"""Where the steps of a run go: one place, or a local folder and from there to another place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.checkpoint.run.copy import CopyOptions
from ckptkit.checkpoint.run.mirror import LOCAL, REMOTE, Mirror, Retention
from ckptkit.checkpoint.run.run import Run
from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.live.background import Background
from ckptkit.storage import Store

log = logging.getLogger("ckptkit.live")


class Tiers(Protocol):
    """What a `Checkpointer` asks about places; all ranks make the same calls."""

    @property
    def target(self) -> Store:
        """Where a save writes."""

    def meet(self, barrier: Ranks, /) -> tuple[int, str] | None:
        """Before a save or a load: what rank 0 has to say about copies that failed."""

    def saved(self, step: int, *, is_first: bool) -> None:
        """A step is committed; on rank 0 (`is_first`) others may have to go."""

    def turn(self, barrier: Ranks, step: int | None, /) -> Callable[[], None]:
        """Before a save of a step or a load: what is to be called after it, however it ended."""

    def candidates(self, step: int | None, *, fallback: bool) -> list[tuple[int, str]]:
        """On rank 0: which steps to load from, best first, and from where."""

    def at(self, place: str, /) -> Store:
        """The store of such a place."""

    def raise_failed(self, said: tuple[int, str] | None = None) -> None:
        """Raise where rank 0 said that something failed."""

    def wait(self) -> None:
        """Return when nothing is under way; raises what went wrong."""

    def give_up(self) -> None:
        """The process has to end: leave what is not done to the next one."""


def tiers_of(
    place: Store, local: Place | None, retention: Retention, *, overwrite: bool, is_first: bool
) -> Tiers:
    """The tiers of a run, which is in one place where there is no local one."""
    if local is not None:
        return TwoTiers(store_at(local), place, retention, overwrite=overwrite, is_first=is_first)
    if retention.local_keep_last is not None:
        raise UsageError("local_keep_last is for a run with a local folder", hint="pass local=…")
    return OneTier(place, retention)


class OneTier:
    """A run in one place."""

    def __init__(self, store: Store, retention: Retention) -> None:
        self.target = store
        self._retention = retention

    def meet(self, _: Ranks, /) -> tuple[int, str] | None:
        """Nothing to say."""
        return None

    def saved(self, step: int, *, is_first: bool) -> None:
        """Delete what retention does not keep."""
        rules = self._retention
        if not is_first or rules.is_all:
            return
        try:
            # What lies above is of a future that was given up, and may be damaged.
            Run(self.target).prune(
                keep_last=rules.keep_last, keep_every=rules.keep_every, up_to=step
            )
        except CkptkitError as error:
            error.what = f"the step was saved, but older ones could not be deleted: {error.what}"
            raise

    def turn(self, _: Ranks, __: int | None, /) -> Callable[[], None]:
        """Nothing to do."""
        return lambda: None

    def candidates(self, step: int | None, *, fallback: bool) -> list[tuple[int, str]]:
        """The committed steps, newest first; only the newest without `fallback`."""
        steps = [step] if step is not None else Run(self.target).steps()[::-1]
        return [(number, REMOTE) for number in (steps if fallback else steps[:1])]

    def at(self, _: str, /) -> Store:
        """The only store."""
        return self.target

    def raise_failed(self, said: tuple[int, str] | None = None) -> None:
        """Nothing can have failed."""

    def wait(self) -> None:
        """Nothing is under way."""

    def give_up(self) -> None:
        """Nothing to leave."""


class TwoTiers:
    """A run whose steps are saved to a local folder, and copied from there in the background.

    After each save and load a round of copying begins, in which rank 0 says what is to be copied.
    All ranks go through all rounds, in the same order, whether their own save went well or not.
    """

    def __init__(
        self,
        local: Store,
        remote: Store,
        retention: Retention,
        *,
        overwrite: bool = False,
        is_first: bool = True,
    ) -> None:
        options = CopyOptions(overwrite=overwrite, progress=self._check_wanted)
        self._mirror = Mirror(local, remote, retention, options)
        self._is_first = is_first
        self._uploads = Background()
        self._has_looked = False
        self._given_up = threading.Event()
        self._over: list[Ranks] = []

    @property
    def target(self) -> Store:
        """The local folder."""
        return self._mirror.local

    def meet(self, barrier: Ranks, /) -> tuple[int, str] | None:
        """The number of the last round that failed on rank 0, and why."""
        if not self._has_looked:
            self._mirror.look(barrier)
            self._has_looked = True

        def newest() -> tuple[int, str] | None:
            failure = self._uploads.newest_failure()
            return (failure[0], in_one_line(failure[1])) if failure else None

        found: tuple[int, str] | None = barrier.share(newest)
        return found

    def saved(self, step: int, *, is_first: bool) -> None:
        """Nothing goes before it has been copied."""

    def turn(self, barrier: Ranks, step: int | None, /) -> Callable[[], None]:
        """A round of copying, after those whose turn was taken before on this and all ranks."""
        return self._uploads.turn(lambda: self._round(barrier, step), "the upload")

    def candidates(self, step: int | None, *, fallback: bool) -> list[tuple[int, str]]:
        """The newest steps of both places."""
        return self._mirror.candidates(step, fallback=fallback)

    def at(self, place: str, /) -> Store:
        """The local or the other store."""
        return self._mirror.local if place == LOCAL else self._mirror.remote

    def raise_failed(self, said: tuple[int, str] | None = None) -> None:
        """Raise on all ranks what rank 0 said at the beginning of a save; the others wait for the
        end of that round, which they have failed in too.
        """
        if said is None:
            return
        number, problem = said
        error = self._uploads.take(number)
        raise error or PeerError(f"steps could not be copied, because of rank 0: {problem}")

    def wait(self) -> None:
        """Return when all rounds are over; raises the last error."""
        self._uploads.wait()

    def give_up(self) -> None:
        """Leave it to the next job to go on."""
        self._given_up.set()
        self._uploads.give_up()

    def _round(self, barrier: Ranks, step: int | None) -> None:
        if not self._has_looked or self._given_up.is_set():
            return  # a folder that was refused may be that of another run
        try:
            self._mirror.upload(barrier, step)
        except CkptkitError as error:
            if self._given_up.is_set():
                log.warning("copying of steps was left to the next job")
                return
            error.what = (
                f"not all steps could be copied to {self._mirror.remote.location}, "
                f"they stay in {self._mirror.local.location}: {error.what}"
            )
            raise
        self._forget_before(barrier)

    def _forget_before(self, barrier: Ranks) -> None:
        """Remove what earlier rounds left in the job's store: all ranks have begun this one."""
        for old in self._over:
            old.forget()
        self._over = [barrier] if self._is_first else []

    def _check_wanted(self, _: int) -> None:
        if self._given_up.is_set():
            raise PeerError("the process has to end: copying goes on in the next one")
