"""Copying packs by the threads of this process: each takes the next segment, of whichever pack."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ckptkit.checkpoint.reshard.copying import Route, begin_pack
from ckptkit.checkpoint.reshard.target import Target
from ckptkit.checkpoint.workers import Progress, share_out
from ckptkit.checkpoint.write.pack import Pack
from ckptkit.errors import CkptkitError

# Writers of one file wait for each other, where it is not written past the page cache; of many, few
# would be complete when a run is cut off.
PACKS_AT_ONCE = 2


class Packs:
    """The packs of some ranks, begun one after another as threads ask for work."""

    def __init__(self, target: Target, ranks: Iterable[int], route: Route) -> None:
        self._target = target
        self._ranks = ranks
        self._route = route
        self._lock = threading.Lock()
        self._left: dict[Pack, int] = {}
        self._work = self._segments()

    def run(self, progress: Progress | None = None) -> None:
        """Write all of them. Where one fails, those that are not finished are removed, and those
        that are stay.
        """

        def write(segment: tuple[Pack, int]) -> None:
            writing, number = segment
            size = writing.write_segment(number)
            self._finish_last(writing)
            if progress:
                progress(size)

        try:
            share_out(self._work, write, self._route.budget.workers)
        except BaseException:
            for writing in self._left:
                with suppress(CkptkitError):
                    writing.abort()
            raise

    def _segments(self) -> Iterator[tuple[Pack, int]]:
        """Segments by turns from a few packs."""
        ranks = iter(self._ranks)
        begun: deque[Iterator[tuple[Pack, int]]] = deque()
        while True:
            for rank in islice(ranks, self._route.budget.ends.packs - len(begun)):
                begun.append(self._segments_of(rank))
            if not begun:
                return
            turn = begun.popleft()
            segment = next(turn, None)
            if segment is not None:
                begun.append(turn)
                yield segment

    def _segments_of(self, rank: int) -> Iterator[tuple[Pack, int]]:
        writing = begin_pack(self._target, rank, self._route)
        self._left[writing] = len(writing.segments)
        if not writing.segments:
            writing.finish()
            del self._left[writing]
        yield from ((writing, number) for number in range(len(writing.segments)))

    def _finish_last(self, writing: Pack) -> None:
        with self._lock:
            self._left[writing] -= 1
            is_last = not self._left[writing]
        if is_last:
            # While it is made durable the other threads go on with the next pack.
            writing.finish()
            with self._lock:
                del self._left[writing]
