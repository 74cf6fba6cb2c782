"""Where the steps of a run go: one place, or a local folder and from there to another place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckptkit.checkpoint.places import Place, store_at
from ckptkit.checkpoint.ranks import Ranks, in_one_line
from ckptkit.checkpoint.run.copy import CopyOptions
from ckptkit.checkpoint.run.mirror import LOCAL, REMOTE, Mirror, Retention
from ckptkit.checkpoint.run.run import Run
from ckptkit.errors import CkptkitError, PeerError, UsageError
from ckptkit.live.background import Background
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
        place: Store,
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
        self._place = place
        self._retention = retention
        self._is_first = is_first
        self._mirror: Mirror | None = None
        if local is not None:
            options = CopyOptions(overwrite=overwrite, progress=self._check_wanted)
            self._mirror = Mirror(store_at(local), place, retention, options)
        self._uploads = Background()
        self._has_looked = False
        self._given_up = threading.Event()
        self._over: list[Ranks] = []

    @property
    def target(self) -> Store:
        """Where a save writes."""
        return self._place if self._mirror is None else self._mirror.local

    def at(self, place: str) -> Store:
        """The store of a place that `candidates` names."""
        return self.target if place == LOCAL else self._place

    def meet(self, ranks: Ranks) -> tuple[int, str] | None:
        """Before a save or a load: the number of the last round that failed on rank 0, and why."""
        if self._mirror is None:
            return None
        if not self._has_looked:
            self._mirror.look(ranks)
            self._has_looked = True

        def newest() -> tuple[int, str] | None:
            failure = self._uploads.newest_failure()
            return (failure[0], in_one_line(failure[1])) if failure else None

        found: tuple[int, str] | None = ranks.share(newest)
        return found

    def turn(self, ranks: Ranks, step: int | None) -> Callable[[], None]:
        """Before a save of a step or a load: what is to be called after it, however it ended. That
        begins a round of copying, after those whose turn was taken before on this and all ranks.
        """
        mirror = self._mirror
        if mirror is None:
            return lambda: None
        return self._uploads.turn(lambda: self._round(mirror, ranks, step), "the upload")

    def saved(self, step: int) -> None:
        """A step is committed: on rank 0 others may have to go, but none before it was copied."""
        rules = self._retention
        if self._mirror is not None or not self._is_first or rules.is_all:
            return
        try:
            # What lies above is of a future that was given up, and may be damaged.
            Run(self._place).prune(
                keep_last=rules.keep_last, keep_every=rules.keep_every, up_to=step
            )
        except CkptkitError as error:
            error.what = f"the step was saved, but older ones could not be deleted: {error.what}"
            raise

    def candidates(self, step: int | None, *, fallback: bool) -> list[tuple[int, str]]:
        """On rank 0: which steps to load from, best first, and from where."""
        if self._mirror is not None:
            return self._mirror.candidates(step, fallback=fallback)
        steps = [step] if step is not None else Run(self._place).steps()[::-1]
        return [(number, REMOTE) for number in (steps if fallback else steps[:1])]

    def raise_failed(self, said: tuple[int, str] | None) -> None:
        """Raise on all ranks what rank 0 said in `meet`; the others wait for the end of that round,
        which they have failed in too.
        """
        if said is not None:
            number, problem = said
            error = self._uploads.take(number)
            raise error or PeerError(f"steps could not be copied, because of rank 0: {problem}")

    def wait(self) -> None:
        """Return when all rounds are over; raises the last error."""
        self._uploads.wait()

    def give_up(self) -> None:
        """The process has to end: leave what is not copied to the next job."""
        self._given_up.set()
        self._uploads.give_up()

    def _round(self, mirror: Mirror, ranks: Ranks, step: int | None) -> None:
        if not self._has_looked or self._given_up.is_set():
            return  # a folder that was refused may be that of another run
        try:
            mirror.upload(ranks, step)
        except CkptkitError as error:
            if self._given_up.is_set():
                log.warning("copying of steps was left to the next job")
                return
            error.what = (
                f"not all steps could be copied to {mirror.remote.location}, "
                f"they stay in {mirror.local.location}: {error.what}"
            )
            raise
        # All ranks have begun this round: none can look at what earlier ones left in the store.
        for old in self._over:
            old.forget()
        self._over = [ranks] if self._is_first else []

    def _check_wanted(self, _: int) -> None:
        if self._given_up.is_set():
            raise PeerError("the process has to end: copying goes on in the next one")
